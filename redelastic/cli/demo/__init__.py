"""``redelastic demo``: a training run that loses the node of rank 0, goes on, and takes in a replacement."""

from __future__ import annotations

import argparse
import importlib.util
import sys

from redelastic.cli.common import whole_number

NAME = "demo"
SUMMARY = "kill the node of rank 0 during training, and watch the training go on"
DESCRIPTION = """\
A training run that survives the loss of rank 0's node, on this machine, in
about a minute.

It starts a private Redis and a few nodes, each a `redelastic run` with
--preload=torch, that train a small network on scikit-learn's handwritten
digits (DDP, gloo, CPU only). During the training, the node of rank 0 gets
SIGKILL, agent and worker. The others regroup and go on from the last
checkpoint, with --survive in the same processes and from the last step; then
a replacement joins. Meanwhile it prints the run's events, as
`redelastic events RUN --follow` does, and at the end the accuracy on held-out
digits.

It leaves no process and no file behind. The exit code is 0 if the node was
killed, the others survived, the replacement joined, and the accuracy is at
least 95 %."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "--nodes",
        type=whole_number(2, 8),
        default=3,
        metavar="N",
        help="nodes to start with, 2 to 8 (default: 3; more take longer)",
    )
    parser.add_argument("--survive", action="store_true", help="workers keep their processes when another node is lost")


def run(arguments: argparse.Namespace) -> int:
    """Run the demo; see :data:`DESCRIPTION`.

    Returns:
        0 if all went as promised, 1 if not, 128 + n when signal n ended it.
    """
    if missing := [name for name in ("torch", "rich", "sklearn", "numpy") if importlib.util.find_spec(name) is None]:
        print(  # noqa: T201
            f"redelastic demo: {' and '.join(missing)} not installed; install what the demo needs with: "
            "pip install 'redelastic[demo]'",
            file=sys.stderr,
        )
        return 1
    from .play import play

    return play(arguments.nodes, survive=arguments.survive)
