"""Sets the demo up, and cleans everything up again, however it ends."""

from __future__ import annotations

import contextlib
import queue
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

from redelastic.redis.server import RedisServer

from .nodes import Events, Interrupted, Nodes
from .story import BATCH, PACE, SAVE_EVERY, STEPS, DemoError, InterruptedDemoError, Plan, Story
from .view import View


def play(plan: Plan) -> int:
    """Run the demo from the first node's start to the last one's end.

    Returns:
        The exit code: 0 if all went as promised, 1 if not, 128 + n when signal n ended it.
    """
    view = View(STEPS)
    events: Events = queue.SimpleQueue()
    try:
        with (
            _signals_become(events),  # first, so that the cleanup is not interrupted
            tempfile.TemporaryDirectory(prefix="redelastic-demo-") as folder,
            RedisServer() as server,
            Nodes(server, Path(folder), plan.nnodes, _training(plan, folder), events) as nodes,
            view,
        ):
            story = Story(plan, nodes, view, events)
            story.introduce(server.endpoint)
            story.run()
        story.conclude()
    except InterruptedDemoError as interrupted:
        view.conclude(f"Ended by {interrupted}: all processes are stopped, all files removed.", "yellow")
        return 128 + interrupted.number
    except (DemoError, OSError, RuntimeError) as error:
        view.conclude(f"FAILED: {error}", "bold red")
        return 1
    return 0


def _training(plan: Plan, folder: str) -> list[str]:
    """The training script's module and arguments."""
    command = ["redelastic.cli.demo.train", f"--checkpoint={folder}/checkpoint.pt", f"--steps={STEPS}"]
    command += [f"--save-every={SAVE_EVERY}", f"--pace={PACE}", f"--batch={BATCH}", f"--seed={plan.seed}"]
    return command


@contextlib.contextmanager
def _signals_become(events: Events) -> Iterator[None]:
    """Turn signals that ask this process to end into events like any other."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {
        number: signal.signal(number, lambda number, _frame: events.put(Interrupted(number))) for number in numbers
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
