"""Whether this node is fit to join: checks, each of which can refuse with a reason.

A check is a callable ``(node: Node) -> str | None``: None or an empty string says that the node is fit, any other
string why it is not. Checks are found by name, as entry points of the group ``redelastic.health_checks``; redelastic's
own (``gpu``, ``disk``, ``memory``) are registered there like any other. A user's shell command can be the last one.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Final

import psutil

from .cgroups import memory_room
from .devices import has_driver
from .gpus import VISIBLE, visible_names
from .limited import KILL_TIMEOUT, run_within

GROUP: Final = "redelastic.health_checks"
MEMORY_PER_WORKER: Final = 256 << 20  # about what a worker needs to get as far as `import torch`, in bytes
DISK_SPACE: Final = 100 << 20  # room for logs and a few temporary files, in bytes
FREE_FILES: Final = 100  # inodes
GRACE: Final = 2 * KILL_TIMEOUT  # beyond its time, for a check that must end a process of its own, in seconds
POLL_INTERVAL: Final = 0.2  # of one wait for a check's answer, in seconds
REASON_LENGTH: Final = 300  # limit for a reason, in characters
PROBE: Final = (sys.executable, "-m", "redelastic.host.gpu_probe")


@dataclass(frozen=True)
class Node:
    """What a check knows about the node.

    Attributes:
        log_dir: where the workers' logs go.
        local_world_size: number of workers on this node.
        timeout: how long one check may take, in seconds.
    """

    log_dir: Path
    local_world_size: int
    timeout: float = 60.0


Check = Callable[[Node], "str | None"]


def known_checks() -> dict[str, EntryPoint]:
    """All installed checks, by name."""
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=GROUP):
        found.setdefault(entry.name, entry)  # as with modules, the first on sys.path wins
    return found


def run_checks(
    names: Iterable[str], command: str | None, node: Node, is_hurried: Callable[[], bool] = lambda: False
) -> str | None:
    """Run the named checks one by one, then ``command``; the first refusal decides.

    An exception counts as a refusal, and so does silence: a check that has not answered within ``node.timeout`` is left
    behind in its daemon thread.

    Args:
        names: of installed checks.
        command: for ``/bin/sh -c``; an exit status other than 0 refuses, with the last line of its output.
        node: what the checks get.
        is_hurried: whether to give up now; called several times a second.

    Returns:
        Why this node is not fit to join, beginning with the check's name; None if it is fit, or if this gave up.

    Raises:
        ValueError: there is no check of that name.
    """
    known = known_checks()
    names = list(names)
    for name in names:
        if name not in known:
            raise ValueError(
                f"Unknown health check {name!r}; known checks: {', '.join(sorted(known)) or 'none'}. Packages can "
                f"add others, as entry points of the group {GROUP!r}."
            )
    checks: list[tuple[str, Callable[[], Check]]] = [(name, known[name].load) for name in names]
    if command:
        checks.append(("command", lambda: functools.partial(_command, command)))
    for name, load in checks:
        if reason := _answer(load, node, is_hurried):
            return f"{name}: {reason}"
    return None


def _answer(load: Callable[[], Check], node: Node, is_hurried: Callable[[], bool]) -> str:
    answers: queue.SimpleQueue[str] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answer: object = load()(node)
            unclear = answer is not None and not isinstance(answer, str)
            answers.put(f"returned {answer!r}, which is neither a string nor None" if unclear else str(answer or ""))
        except BaseException as e:  # noqa: BLE001 - sys.exit() refuses too, and must not be missed
            answers.put(f"{type(e).__name__}: {e}")

    threading.Thread(target=ask, name="redelastic-health-check", daemon=True).start()
    deadline = time.monotonic() + node.timeout + GRACE
    while not is_hurried():
        with contextlib.suppress(queue.Empty):
            return _one_line(answers.get(timeout=min(POLL_INTERVAL, max(0.0, deadline - time.monotonic()))))
        if time.monotonic() >= deadline:
            return f"did not finish within {node.timeout:g} s"
    return ""


# -- redelastic's own checks


def gpu(node: Node) -> str | None:
    """Whether every visible GPU computes a small matmul correctly, and NVML recommends no recovery of it.

    A separate process asks them: a CUDA context in the agent would hold GPU memory for as long as it lives, and a GPU
    that hangs would take the agent with it. ``CUDA_VISIBLE_DEVICES`` says which GPUs must be there; without it, at
    least one must answer if a driver is installed. A node with no GPU, and none expected, is fit.
    """
    visible = os.environ.get(VISIBLE)
    if visible is None:
        return _probe({}, 0, node.timeout) if has_driver() else None
    names = visible_names(visible)
    if not any(name.startswith("MIG-") for name in names):
        return _probe({}, len(names), node.timeout) if names else None
    with ThreadPoolExecutor(len(names)) as pool:  # CUDA shows a process one MIG instance only
        answers = pool.map(lambda name: _probe({VISIBLE: name}, 1, node.timeout), names)
        return next((f"{name}: {answer}" for name, answer in zip(names, answers, strict=True) if answer), None)


def disk(node: Node) -> str | None:
    """Whether a file can be written where logs and temporary files go, and enough space and inodes are left.

    Enough means ``REDELASTIC_MIN_DISK`` bytes (such as ``4G``; default: 100 MiB). The log directory is created if
    missing.
    """
    needed = _bytes_from_environment("REDELASTIC_MIN_DISK", DISK_SPACE)
    with contextlib.suppress(OSError):  # the write below finds out
        node.log_dir.mkdir(parents=True, exist_ok=True)
    # Python silently ignores a bad TMPDIR, but the workers' libraries may not.
    for role, folder in (("log", node.log_dir), ("temporary", Path(os.environ.get("TMPDIR") or tempfile.gettempdir()))):
        if reason := _room_in(folder, needed):
            return f"the {role} directory {folder} {reason}"
    return None


def _room_in(folder: Path, needed: int) -> str:
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".redelastic-", buffering=0) as file:
            file.write(bytes(4096))
            os.fsync(file.fileno())  # a network file system, or a quota, fails only here
        room = os.statvfs(folder)
    except OSError as e:
        return f"cannot be written: {e.strerror or e}"
    if (free := room.f_bavail * room.f_frsize) < needed:
        return f"has {_mib(free)} left, less than {_mib(needed)}: free some space, or set REDELASTIC_MIN_DISK"
    if room.f_files > 0 and room.f_favail < FREE_FILES:  # some file systems do not count inodes, and report 0
        return f"has {room.f_favail} inodes left, fewer than {FREE_FILES}: remove some files"
    return ""


def memory(node: Node) -> str | None:
    """Whether enough memory is available, to the machine and to this process's cgroup (v1 or v2).

    Enough means ``REDELASTIC_MIN_MEMORY`` bytes for the whole node (such as ``4G``); by default 256 MiB per worker:
    with less, one hardly reaches its first step. What the kernel can reclaim (the page cache) counts as available.
    """
    needed = _bytes_from_environment("REDELASTIC_MIN_MEMORY", MEMORY_PER_WORKER * max(1, node.local_world_size))
    available, place = min([(psutil.virtual_memory().available, "the machine"), *memory_room()])
    if available < needed:
        return (
            f"{_mib(available)} of memory is available to {place}, less than {_mib(needed)}: free some, or set "
            "REDELASTIC_MIN_MEMORY"
        )
    return None


def _bytes_from_environment(variable: str, default: int) -> int:
    value = os.environ.get(variable)
    if not value:
        return default
    matched = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*(?:([KMGT])i?)?B?\s*", value, re.IGNORECASE)
    if not matched:
        raise ValueError(f"{variable}={value!r} is not a number of bytes; use 4G, 512M or 1073741824.")
    return int(float(matched[1]) * 1024 ** (" KMGT".index(matched[2].upper()) if matched[2] else 0))


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= REASON_LENGTH else line[: REASON_LENGTH - 1] + "…"


# -- processes that run a check


def _command(command: str, node: Node) -> str | None:
    ended = run_within(node.timeout, ("/bin/sh", "-c", command))
    if ended.status == 0:
        return None
    return ended.lines[-1] if ended.lines and (ended.status or 0) > 0 else ended.how


def _probe(environment: Mapping[str, str], expected: int, timeout: float) -> str | None:
    ended = run_within(timeout, (*PROBE, "cuda", str(expected)), environment)
    if ended.status == 0:
        return None
    of_devices = [line for line in ended.lines if line.startswith("device ")]
    last = (of_devices or ended.lines or ["no device was asked yet"])[-1]
    return last if ended.status == 1 else f"{last}; the probe {ended.how}"
