"""The command ``redelastic``: one module per subcommand, each light to import until it runs."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from redelastic import __version__
from redelastic.logs import correct_level, say, unhurried_stderr
from redelastic.monitoring.wording import clean

from . import (
    checkpoint,
    close,
    common,
    completion,
    dashboard,
    demo,
    doctor,
    drain,
    events,
    logs,
    preflight,
    readmit,
    run,
    runs,
    server,
    status,
    timeline,
)

# Each has NAME, SUMMARY, DESCRIPTION, add_arguments(parser) and run(arguments) -> exit code.
COMMANDS = (
    status,
    events,
    logs,
    timeline,
    dashboard,
    runs,
    drain,
    checkpoint,
    close,
    readmit,
    preflight,
    doctor,
    server,
    demo,
    completion,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the arguments; None for the process' own.

    Returns:
        The exit code; 2 and 0 come as ``SystemExit`` from argparse for wrong arguments and for ``--help``.
    """
    _replace_closed_streams()
    _tolerate_other_encodings()
    correct_level()
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv[:1] == [run.NAME]:  # its parser is torchrun's
        with unhurried_stderr():  # before torch is imported: its loggers keep the stream that they find
            return _ended(run.NAME, lambda: run.main(argv[1:]))
    parser, commands = make_parser()
    if not argv:
        parser.print_help(sys.stderr)
        return common.USAGE
    named = next((word for word in argv if not word.startswith("-")), "")
    if named and named not in commands.choices:
        names = ", ".join(commands.choices)
        parser.error(f"unknown command {named!r}{common.suggestion(named, commands.choices) or f'; commands: {names}'}")
    arguments = parser.parse_args(argv)
    return _ended(arguments.command.NAME, lambda: arguments.command.run(arguments))


def _replace_closed_streams() -> None:
    """Open /dev/null for each standard stream that the parent has closed, so that no other file gets its number."""
    for name, mode in ("stdin", "r"), ("stdout", "w"), ("stderr", "w"):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, the stream's
            os.set_inheritable(null, True)
            setattr(sys, name, os.fdopen(null, mode))


def _tolerate_other_encodings() -> None:
    """Print what the locale's encoding lacks as a question mark, not as an error; stderr does so by default."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def make_parser() -> tuple[argparse.ArgumentParser, Any]:
    """The parser of all commands (of ``run`` only the name), and argparse's action that holds the subparsers."""
    parser = common.Parser("redelastic", description="A Redis-backed elastic runtime for PyTorch.")
    parser.add_argument("--version", action="version", version=f"redelastic {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    commands.add_parser(run.NAME, help=run.SUMMARY)
    for command in COMMANDS:
        subparser = commands.add_parser(
            command.NAME,
            help=command.SUMMARY,
            description=command.DESCRIPTION,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(subparser)
        subparser.set_defaults(command=command)
    return parser, commands


def _ended(name: str, call: Callable[[], int]) -> int:
    """Run a command to its exit code."""
    try:
        code = call()
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of the output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as e:
        code = exit_code(e)
        if not code:
            raise
        say(f"redelastic {name}: {clean(str(e)) or 'out of memory'}")  # it may quote what Redis holds
    finally:
        common.end_time_limit()
    return code


def exit_code(error: Exception) -> int:
    """The exit code for an error; 0 if the error is a bug in redelastic."""
    from redelastic.monitoring.control import UnknownNodeError, UnknownRunError
    from redelastic.redis.errors import RedelasticError

    if isinstance(error, UnknownNodeError | UnknownRunError):
        return common.UNKNOWN
    if isinstance(error, RedelasticError | MemoryError):
        return common.UNREACHABLE
    return common.USAGE if isinstance(error, ValueError) else 0
