"""The command ``redelastic``: one module per subcommand, each light to import until it runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

from redelastic import __version__

from . import demo

COMMANDS = (demo,)  # each has NAME, SUMMARY, DESCRIPTION, add_arguments(parser) and run(arguments) -> exit code


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the arguments; None for those of the process.

    Returns:
        The exit code; 2 and 0 come as ``SystemExit`` from argparse for wrong arguments and for ``--help``.
    """
    parser = _Parser("redelastic", description="A Redis-backed elastic runtime for PyTorch.")
    parser.add_argument("--version", action="version", version=f"redelastic {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        subparser = commands.add_parser(
            command.NAME,
            help=command.SUMMARY,
            description=command.DESCRIPTION,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    arguments = parser.parse_args(argv)
    try:
        code: int = arguments.run(arguments)
    except KeyboardInterrupt:
        return 130
    return code
