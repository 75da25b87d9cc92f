"""Periodic tasks beside the agent's loop, each in its own thread: none delays another."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator

log = logging.getLogger(__name__)


@contextlib.contextmanager
def repeat(task: Callable[[], object], interval: float, name: str) -> Iterator[None]:
    """Run ``task`` every ``interval`` seconds until the block ends; leaving it does not wait for a hung task.

    An error is logged once, however often it repeats, and the task goes on.

    Args:
        task: what to do; if it takes long, it runs less often.
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
