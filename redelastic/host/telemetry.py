"""The usage of a node's processes, for its heartbeat: cheap, small, and never in the way of training."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import psutil

STATUS_LIMIT: Final = 8192  # of a node's status, in bytes
CUT_TEXT_LENGTH: Final = 64  # of a text that is cut to fit the limit, in characters

Times = dict[tuple[int, float], tuple[float, float]]  # process -> its own CPU seconds, and its reaped children's


class Telemetry:
    """Samples what a node's processes use; from one thread.

    Args:
        clock: monotonic, in seconds.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sampled_at: float | None = None
        self._workers: dict[int, Times] = {}

    def sample(self, trees: Mapping[int, Sequence[psutil.Process]]) -> dict[str, Any]:
        """Sample what is used now.

        Args:
            trees: local rank -> the worker's process and all its descendants.

        Returns:
            A dict for JSON. A key whose value is unknown is absent: ``cpu`` in the first sample, for example.

            - ``cpu``: of all workers since the last sample, in percent of one core;
            - ``memory``: of all workers, in bytes; see below;
            - ``memory_available``, ``memory_total``: of the host (not of a container's limit), in bytes;
            - ``workers``: local rank as a string -> ``{"cpu", "memory"}`` of that worker and its descendants.

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
    """Leave ``keys`` out of each dict in a list; the caller's dicts are not changed."""
    if isinstance(items := status.get(name), list):
        dicts = (item if isinstance(item, dict) else {} for item in items)
        status[name] = [{key: value for key, value in item.items() if key not in keys} for item in dicts]


def _dump(value: Any) -> str:
    """Compact JSON in ASCII only, so that its length is its size in bytes."""
    return json.dumps(value, separators=(",", ":"), skipkeys=True, default=str)
