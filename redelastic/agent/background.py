"""Work beside the agent's loop: periodic tasks, and reports to Redis in order; the training waits for neither."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Iterator

from torch.distributed import DistNetworkError

from redelastic.redis.errors import RedelasticError

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


# A SimpleQueue: a signal handler that interrupts put() may itself call it.
_Tasks = queue.SimpleQueue[Callable[[], object] | None]


class BackgroundReporter:
    """Runs tasks one by one in its own thread; a task that fails is logged, and not retried."""

    def __init__(self) -> None:
        self._tasks: _Tasks = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start running tasks, even after :meth:`close`, which may have left some to the previous thread."""
        self._tasks = queue.SimpleQueue()
        self._thread = threading.Thread(target=_run, args=(self._tasks,), name="redelastic-reporter", daemon=True)
        self._thread.start()

    def send(self, task: Callable[[], object]) -> None:
        """Queue a task; returns at once."""
        self._tasks.put(task)

    def close(self, timeout: float) -> None:
        """Run what is left, for at most ``timeout`` seconds."""
        self._tasks.put(None)
        if self._thread is not None:
            self._thread.join(timeout)


def _run(tasks: _Tasks) -> None:
    while (task := tasks.get()) is not None:
        try:
            task()
        except (RedelasticError, DistNetworkError) as e:  # noqa: PERF203  # the next may succeed
            log.warning("%s", e)
        except Exception:
            log.exception("The agent could not report to Redis.")
