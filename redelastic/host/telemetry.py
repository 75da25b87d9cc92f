"""The usage of a node's processes and GPUs, for its heartbeat: cheap, small, and never in the way of training."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import psutil

from redelastic.monitoring.records import APPLICATION_XIDS

from .amd import AmdGpu, list_amd_gpus
from .devices import handle_of, open_nvml
from .gpus import Gpu

STATUS_LIMIT: Final = 8192  # of a node's status, in bytes
CUT_TEXT_LENGTH: Final = 64  # of a text that is cut to fit the limit, in characters
XIDS_AT_ONCE: Final = 100  # the most that one sample reads from a GPU: one that keeps failing must not delay it

Times = dict[tuple[int, float], tuple[float, float]]  # process -> its own CPU seconds, and its reaped children's


class Telemetry:
    """Samples what a node uses.

    Use it from one thread, which nothing waits for: NVML has been seen to hang for seconds, and ``sample`` hangs with
    it, without holding a lock.

    Args:
        gpus: to watch: ``Assignment.visible``; if NVML knows none of them, all of the host that AMD's driver shows.
        clock: monotonic, in seconds.
    """

    def __init__(self, gpus: Sequence[Gpu] = (), *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sampled_at: float | None = None
        self._workers: dict[int, Times] = {}
        self._gpus = gpus
        self._watched: Sequence[_WatchedGpu | AmdGpu] | None = None  # None until the first sample: a driver may be slow

    def sample(self, trees: Mapping[int, Sequence[psutil.Process]]) -> dict[str, Any]:
        """Sample what is used now.

        Args:
            trees: local rank -> the worker's process and all its descendants.

        Returns:
            A dict for JSON. A key whose value is unknown is absent: ``cpu`` in the first sample, for example.

            - ``cpu``: of all workers since the last sample, in percent of one core;
            - ``memory``: of all workers, in bytes; see below;
            - ``memory_available``, ``memory_total``: of the host (not of a container's limit), in bytes;
            - ``workers``: local rank as a string -> ``{"cpu", "memory"}`` of that worker and its descendants;
            - ``gpus``, if there are any to watch: each ``{"index", "uuid", "name", "memory_used", "memory_total"
              (bytes), "utilization" (percent), "temperature" (°C), "ecc" (uncorrected errors since the driver was
              loaded), "xid" (critical errors of GPU or driver since the first sample; with MIG, of the whole GPU),
              "xids" (Xid number as a string -> how many, including an application's)}``, or ``{"index", "lost": true}``
              for one that has fallen off the bus.

        The memory of a tree is the sum of what each process has resident for itself (RSS without files and shared
        memory), plus, once, the largest amount that any of them shares. A plain sum of RSS would count torch's
        libraries once per DataLoader worker. Memory that forked processes still share unwritten is counted for each:
        only PSS could tell, but reading it walks a process' page tables under a lock that the process itself needs.
        """
        now, last = self._clock(), self._sampled_at
        elapsed = now - last if last is not None else 0.0
        limit = 100.0 * (os.cpu_count() or 1)  # times come in ticks of 10 ms: a short interval could exceed it
        workers: dict[str, dict[str, Any]] = {}
        times: dict[int, Times] = {}
        for rank, tree in trees.items():
            times[rank], memory = _read(tree)
            workers[str(rank)] = {"memory": memory}
            if elapsed > 0:
                used = _used(times[rank], self._workers.get(rank, {}))
                workers[str(rank)]["cpu"] = round(min(limit, 100 * used / elapsed), 1)
        self._workers, self._sampled_at = times, now
        sample: dict[str, Any] = {"memory": sum(worker["memory"] for worker in workers.values()), "workers": workers}
        if elapsed > 0:
            sample["cpu"] = round(min(limit, sum(worker["cpu"] for worker in workers.values())), 1)
        with contextlib.suppress(psutil.Error, OSError, ValueError):  # /proc may be hidden from this user
            host = psutil.virtual_memory()
            sample.update(memory_available=host.available, memory_total=host.total)
        if self._watched is None:
            self._watched = _watch(self._gpus)
        if self._watched:
            sample["gpus"] = [gpu.sample() for gpu in self._watched]
        return sample


# -- processes


def trees(processes: Sequence[psutil.Process], pids: Mapping[int, int]) -> dict[int, list[psutil.Process]]:
    """Each worker's process, and after it all its descendants, by local rank.

    Args:
        processes: of all workers.
        pids: of each worker, by local rank.
    """
    parents: dict[int, int] = {}
    for process in processes:
        with contextlib.suppress(psutil.Error):
            parents[process.pid] = process.ppid()
    rank_of = {pid: local_rank for local_rank, pid in pids.items()}
    found: dict[int, list[psutil.Process]] = {local_rank: [] for local_rank in pids}
    for process in processes:
        pid = process.pid
        while pid not in rank_of and pid in parents:
            pid = parents[pid]
        if pid in rank_of:
            tree = found[rank_of[pid]]
            tree.insert(0 if process.pid == pid else len(tree), process)
    return found


def _read(tree: Sequence[psutil.Process]) -> tuple[Times, int]:
    """The CPU times of a tree's processes, and its memory in bytes, without processes that are gone or hidden."""
    times: Times = {}
    own, shared = 0, 0
    for process in tree:
        try:
            used, memory = process.cpu_times(), process.memory_info()
            times[process.pid, process.create_time()] = (
                used.user + used.system,
                used.children_user + used.children_system,
            )
        except (psutil.Error, OSError, ValueError):  # ValueError: /proc read while the process ends
            continue
        own += memory.rss - memory.shared
        shared = max(shared, memory.shared)
    return times, own + shared


def _used(now: Times, last: Times) -> float:
    """CPU seconds that a tree used between two readings, including processes that lived only in between.

    A reaped process hands all its time to its parent, including what was already counted: that is subtracted. A process
    reaped outside the tree hands over nothing here, so what is subtracted never exceeds what was handed over.
    """
    if not now.keys() & last.keys():
        last = {}  # a new worker: all it has used, it used since
    own = sum(max(0.0, o - last.get(process, (0.0, 0.0))[0]) for process, (o, _) in now.items())
    handed_over = sum(max(0.0, c - last.get(process, (0.0, 0.0))[1]) for process, (_, c) in now.items())
    counted = sum(o + c for process, (o, c) in last.items() if process not in now)
    return own + max(0.0, handed_over - counted)


# -- GPUs


def _watch(gpus: Sequence[Gpu]) -> Sequence[_WatchedGpu | AmdGpu]:
    known = [gpu for gpu in gpus if gpu.index is not None]
    nvml = open_nvml() if known else None
    if nvml is not None:
        return [_WatchedGpu(nvml, gpu) for gpu in known]
    return list_amd_gpus() if gpus else []


class _WatchedGpu:
    """One GPU or MIG device; an error of NVML costs the one field that it concerns, since many models lack some.

    Its handle is kept: a lookup can fail because of another GPU.
    """

    def __init__(self, nvml: Any, gpu: Gpu) -> None:
        self._nvml = nvml
        self._gpu = gpu
        self._handle: Any = None
        self._xids: Counter[int] = Counter()
        self._events: Any = None
        self._lost = False
        with self._errors():
            self._events = self._register()

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except self._nvml.NVMLError as e:
            self._lost = self._lost or e.value == self._nvml.NVML_ERROR_GPU_IS_LOST
        except AttributeError:
            pass  # this release of pynvml has no such function

    def _register(self) -> Any:
        """Register an event set for this GPU's Xids only: once a GPU is lost, NVML cannot say whose an event is."""
        nvml = self._nvml
        whole = nvml.nvmlDeviceGetHandleByIndex(self._gpu.index)  # a MIG device has no events
        events = nvml.nvmlEventSetCreate()
        try:
            nvml.nvmlDeviceRegisterEvents(whole, nvml.nvmlEventTypeXidCriticalError, events)
        except nvml.NVMLError:
            nvml.nvmlEventSetFree(events)
            raise
        return events

    def sample(self) -> dict[str, Any]:
        nvml, gpu = self._nvml, self._gpu
        if self._lost:  # to NVML, a GPU that comes back is another one
            self._handle = None
        self._lost = False
        found: dict[str, Any] = {"index": gpu.index}
        found.update({key: value for key, value in (("uuid", gpu.uuid), ("name", gpu.model)) if value is not None})
        with self._errors():
            handle = self._handle = self._handle or handle_of(nvml, gpu.index, gpu.uuid)
            with self._errors():
                memory = nvml.nvmlDeviceGetMemoryInfo(handle)
                found.update(memory_used=memory.used, memory_total=memory.total)
            with self._errors():
                found["utilization"] = nvml.nvmlDeviceGetUtilizationRates(handle).gpu
            with self._errors():
                found["temperature"] = nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
            with self._errors():
                found["ecc"] = nvml.nvmlDeviceGetTotalEccErrors(
                    handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
                )
        if self._events is not None:
            with self._errors():
                for _ in range(XIDS_AT_ONCE):
                    event = nvml.nvmlEventSetWait(self._events, 0)  # raises an error, timeout, if there is none
                    self._xids[int(event.eventData)] += 1
            found["xid"] = sum(n for xid, n in self._xids.items() if xid not in APPLICATION_XIDS)
            if self._xids:
                found["xids"] = {str(xid): n for xid, n in sorted(self._xids.items())}
        return {"index": gpu.index, "lost": True} if self._lost else found


# -- within a limit


def bounded(status: Mapping[str, Any], limit: int = STATUS_LIMIT) -> str:
    """A node's status as compact JSON of at most ``limit`` bytes; never raises.

    If it is too long, ``"cut": true`` says so, and these are left out, one after another, until it fits: the names,
    UUIDs and Xid numbers of ``gpus``; of each of ``workers`` its ``log``, then ``cpu`` and ``memory``; ``gpus``;
    ``workers``. If the node's own fields alone are too long, they are cut too, the longest first: a text to its
    beginning, anything else entirely.
    """
    kept = dict(status)
    cuts: tuple[Callable[[dict[str, Any]], None], ...] = (
        lambda s: _strip(s, "gpus", ("name", "uuid", "xids")),
        lambda s: _strip(s, "workers", ("log",)),
        lambda s: _strip(s, "workers", ("cpu", "memory")),
        lambda s: s.pop("gpus", None),
        lambda s: s.pop("workers", None),
    )
    text = _dump(kept)
    for cut in cuts:
        if len(text) <= limit:
            return text
        cut(kept)
        kept["cut"] = True
        text = _dump(kept)
    while len(text) > limit and kept:
        key = max(kept, key=lambda name: len(_dump({name: kept[name]})))
        value = kept.pop(key)
        if isinstance(value, str) and len(value) > CUT_TEXT_LENGTH:
            kept[key] = value[: CUT_TEXT_LENGTH - 1] + "…"
        text = _dump(kept)
    return text


def _strip(status: dict[str, Any], name: str, keys: tuple[str, ...]) -> None:
    """Leave ``keys`` out of each dict in a list, or among a dict's values; the caller's dicts are not changed."""

    def stripped(item: Any) -> Any:
        return {k: v for k, v in item.items() if k not in keys} if isinstance(item, Mapping) else item

    group = status.get(name)
    if isinstance(group, Mapping):
        status[name] = {key: stripped(item) for key, item in group.items()}
    elif isinstance(group, (list, tuple)):
        status[name] = [stripped(item) for item in group]


def _dump(value: Any) -> str:
    """Compact JSON in ASCII only, so that its length is its size in bytes."""
    return json.dumps(value, separators=(",", ":"), skipkeys=True, default=str)
