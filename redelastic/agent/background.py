"""What is done again and again beside the agent's loop, each task in a thread of its own: none delays another."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator

log = logging.getLogger(__name__)


@contextlib.contextmanager
def repeat(task: Callable[[], object], interval: float, name: str) -> Iterator[None]:
    """Run ``task`` every ``interval`` seconds until the block ends, which does not wait for a task that hangs.

    An error is logged once, however often it comes in a row, and the task goes on.

    Args:
        task: what to do; it may take any time, and then runs less often.
        interval: between two runs, in seconds.
        name: of the task, for the log; its thread is called ``redelastic-<name>``.
    """
    ended = threading.Event()
    thread = threading.Thread(target=_loop, args=(task, interval, name, ended), name=f"redelastic-{name}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()


def _loop(task: Callable[[], object], interval: float, name: str, ended: threading.Event) -> None:
    last_error = ""
    while not ended.wait(interval):
        try:
            task()
            last_error = ""
        except Exception as e:  # noqa: PERF203
            error = f"{type(e).__name__}: {e}"
            if error != last_error:
                log.exception("The agent's task %r failed and will be retried; the training is not affected.", name)
            last_error = error
