"""``redelastic completion``: print the script with which a shell completes commands and options."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from .common import OK

NAME: Final = "completion"
SUMMARY: Final = "complete commands and options in bash, zsh or fish"
DESCRIPTION: Final = """\
Print a shell script that completes `redelastic`, its commands and their
options, including torchrun's where torch is installed.

bash: redelastic completion bash > ~/.local/share/bash-completion/completions/redelastic
zsh:  redelastic completion zsh > DIRECTORY/_redelastic, with DIRECTORY in $fpath
fish: redelastic completion fish > ~/.config/fish/completions/redelastic.fish

Exit code: 0; 2 for wrong arguments."""

SHELLS: Final = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help="bash, zsh or fish")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; see :data:`DESCRIPTION`."""
    import shtab

    from redelastic.cli import make_parser
    from redelastic.torch_internals import require_torch

    from . import run as run_command
    from . import run_options

    parser, commands = make_parser()
    try:
        require_torch()
    except ImportError:
        pass  # then `run` has no options here
    else:
        commands.choices.pop(run_command.NAME)
        commands.add_parser(run_command.NAME, parents=[run_options.make_parser()], add_help=False)
    for action in _actions(parser):
        if action.type is Path or action.metavar == "FILE" or action.dest == "training_script":
            action.complete = shtab.FILE
    sys.stdout.write(shtab.complete(parser, shell=arguments.shell) + "\n")
    return OK


def _actions(parser: argparse.ArgumentParser) -> Iterator[Any]:
    """All actions of a parser and its subparsers."""
    for action in parser._actions:  # noqa: SLF001  # argparse offers no other access
        yield action
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            for inner in action.choices.values():
                yield from _actions(inner)
