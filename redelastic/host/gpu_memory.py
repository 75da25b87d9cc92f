"""Waits for the driver to free the GPU memory of workers that have ended: after SIGKILL that may take seconds."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import psutil

from .devices import handle_of, open_nvml
from .gpus import Gpu

log = logging.getLogger(__name__)

FREE_TIMEOUT: Final = 30.0  # for the driver to free it, in seconds
POLL_INTERVAL: Final = 0.1  # between two looks, in seconds
SLACK: Final = 256 << 20  # that another process may take meanwhile, in bytes


class GpuMemory:
    """The memory in use on a node's GPUs, compared with that before its first workers.

    A GPU whose processes are all alive is used by other jobs, and is not waited for.

    Args:
        gpus: of the node, each known to NVML.
        pause: waits for so many seconds.
        clock: monotonic, in seconds.
    """

    def __init__(
        self,
        gpus: Sequence[Gpu],
        *,
        pause: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gpus, self._pause, self._clock = gpus, pause, clock
        self._before: dict[Gpu, int] | None = None

    def await_free(self, is_hurried: Callable[[], bool]) -> None:
        """Wait until no more memory is in use than before the first workers; the first call reads how much that is.

        Args:
            is_hurried: whether to give up now.
        """
        if self._before is None:
            self._before = self._read()
            return
        until, held = self._clock() + FREE_TIMEOUT, self._held()
        if held and not is_hurried():
            log.info("Waiting up to %g s for the memory of earlier workers, on %s.", FREE_TIMEOUT, held)
        while held and not is_hurried():
            if self._clock() >= until:
                log.warning("The memory of earlier workers is not free after %g s, on %s.", FREE_TIMEOUT, held)
                return
            self._pause(POLL_INTERVAL)
            held = self._held()

    def _held(self) -> str:
        """Which GPUs have how much more memory in use."""
        before = self._before or {}
        more = {gpu: used - before[gpu] for gpu, used in self._read().items() if gpu in before}
        return ", ".join(f"GPU {gpu.index} ({size >> 20:,} MiB)" for gpu, size in more.items() if size > SLACK)

    def _read(self) -> dict[Gpu, int]:
        """The memory in use by GPU, in bytes; without GPUs of which NVML does not say it."""
        if not self._gpus:
            return {}
        answers: queue.SimpleQueue[dict[Gpu, int]] = queue.SimpleQueue()
        asked = threading.Thread(target=_ask, args=(self._gpus, answers.put), name="redelastic-gpu-memory", daemon=True)
        asked.start()
        try:
            return answers.get(timeout=FREE_TIMEOUT)
        except queue.Empty:
            log.warning("NVML has not answered for %g s: new workers no longer wait for free GPU memory.", FREE_TIMEOUT)
            self._gpus = ()
            return {}


def _ask(gpus: Sequence[Gpu], answer: Callable[[dict[Gpu, int]], None]) -> None:
    nvml: Any = open_nvml()
    used: dict[Gpu, int] = {}
    for gpu in gpus if nvml is not None else ():
        try:
            handle = handle_of(nvml, gpu.index, gpu.uuid)
            if not _is_of_the_living(nvml, handle):
                used[gpu] = int(nvml.nvmlDeviceGetMemoryInfo(handle).used)
        except nvml.NVMLError:  # noqa: PERF203
            continue  # it is lost, or its model does not say
    answer(used)


def _is_of_the_living(nvml: Any, handle: Any) -> bool:
    """Whether a GPU has processes, and all are alive; to a container, which does not know them, none seems so."""
    try:
        users = [process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)]
        return bool(users) and all(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in users)
    except (nvml.NVMLError, psutil.Error):
        return False
