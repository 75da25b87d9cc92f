"""The Python stacks of hanging workers, from the workers themselves or from py-spy."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from redelastic.worker import STACK_SIGNAL

from .board import ProgressBoard

__all__ = ["catches", "dump_stacks", "merged", "state_of"]

MAX_BYTES: Final = 16 * 1024  # of the text for one worker, in bytes
POLL_INTERVAL: Final = 0.02  # between two looks at what was written, in seconds
SETTLE_TIME: Final = 0.3  # stacks that have not grown for this long are complete, in seconds
_ADDRESS: Final = re.compile("0x[0-9a-f]+")  # of a thread: different in each process
CUT: Final = "[the rest is cut off]"

STATES: Final = {
    "T": "is stopped (state T): SIGSTOP, or Ctrl-Z",
    "t": "is stopped by a debugger (state t)",
    "Z": "has ended and is a zombie (state Z)",
    "X": "has ended (state X)",
    "": "has ended",
}


def catches(pid: int, signum: int) -> bool:
    """Whether a process handles a signal, so that sending it will not end the process."""
    caught = _status(pid).get("SigCgt", "0")
    return bool(int(caught, 16) >> (signum - 1) & 1)


def speaker_of(board: ProgressBoard, local_rank: int, pid: int) -> int:
    """Pid of the process that reports to the agent for the worker ``pid``, which may be a shell that started it."""
    speaker = board.read(local_rank).pid
    return speaker if speaker and _status(speaker) else pid


def dump_stacks(board: ProgressBoard, pids: Mapping[int, int], timeout: float) -> dict[int, str]:
    """Find out where workers hang; never raises.

    A worker that has imported :mod:`redelastic` writes its stacks itself, even while it hangs in C. For any other
    worker py-spy reads them, if it is installed and may trace the worker.

    Args:
        board: of the workers.
        pids: process of each worker, by local rank.
        timeout: the longest this may take, in seconds.

    Returns:
        For each local rank its stacks, or one line that says why there are none, at most about 16 KiB.
    """
    now = time.monotonic()
    py_spy = find_py_spy()
    texts: dict[int, str] = {}
    hung: dict[int, int] = {}
    for local_rank, pid in pids.items():
        speaker = speaker_of(board, local_rank, pid)
        state = state_of(speaker)
        if state in STATES:
            texts[local_rank] = f"No stacks: process {speaker} {STATES[state]}."
        else:
            hung[local_rank] = speaker
    asked = {r: pid for r, pid in hung.items() if _ask(board, r, pid)}
    with contextlib.suppress(ValueError):  # the board is closed: the workers have been replaced meanwhile
        texts |= _answers(board, asked, now + (timeout / 2 if py_spy else timeout))
    silent = {r: pid for r, pid in hung.items() if r not in texts}
    with ThreadPoolExecutor(max(1, len(silent))) as pool:
        spied = pool.map(lambda pid: _spy(py_spy, pid, now + timeout), silent.values())
        for (local_rank, pid), (stacks, problem) in zip(silent.items(), spied, strict=True):
            texts[local_rank] = stacks or _explanation(pid, problem, asked=local_rank in asked)
    return texts


def merged(stacks: Mapping[int, str], limit: int) -> str:
    """The stacks of several workers as one text of at most ``limit`` characters; identical stacks appear once.

    Args:
        stacks: by local rank.
        limit: shared evenly; a text that is too long keeps its end, where faulthandler puts the main thread.
    """
    alike: dict[str, list[int]] = {}
    for local_rank, text in sorted(stacks.items()):
        alike.setdefault(_ADDRESS.sub("0x", text), []).append(local_rank)
    if len(stacks) == 1:
        [whole] = stacks.values()
        return whole[-limit:]
    parts = []
    for local_ranks in alike.values():
        heading = f"worker{'s' * (len(local_ranks) > 1)} {', '.join(map(str, local_ranks))}:\n"
        room = max(0, limit // len(alike) - len(heading) - 2)
        text = stacks[local_ranks[0]]
        parts.append(heading + (text if len(text) <= room else text[len(text) - room :]))
    return "\n\n".join(parts)[:limit]


def _explanation(pid: int, problem: str, *, asked: bool) -> str:
    advice = "import it in the script and call redelastic.progress(step)."
    why = "did not answer;" if asked else f"has not imported redelastic: {advice}"
    return f"No stacks: process {pid} (state {state_of(pid) or 'gone'}) {why} py-spy: {problem}."


# -- from the workers themselves


def _ask(board: ProgressBoard, local_rank: int, pid: int) -> bool:
    if not catches(pid, STACK_SIGNAL):  # it would end the process
        return False
    try:
        board.clear_stacks(local_rank)
        os.kill(pid, STACK_SIGNAL)
    except (OSError, ValueError):  # ended just now; the board is closed
        return False
    return True


def _answers(board: ProgressBoard, asked: Mapping[int, int], deadline: float) -> dict[int, str]:
    """The stacks of workers that write any before the deadline, on the monotonic clock in seconds."""
    grown: dict[int, tuple[int, float]] = {}  # size, and since when
    waiting = set(asked)
    while waiting and time.monotonic() < deadline:
        time.sleep(POLL_INTERVAL)
        for local_rank in list(waiting):
            now = time.monotonic()
            size = board.stacks_size(local_rank)
            last, since = grown.get(local_rank, (0, now))
            if size != last:
                grown[local_rank] = size, now
            elif size and now - since >= SETTLE_TIME:
                waiting.remove(local_rank)
    return {r: _end_of(board.stacks(r, MAX_BYTES), size) for r, (size, _) in grown.items()}


def _end_of(stacks: bytes, size: int) -> str:
    """The end of faulthandler's output, where the main thread comes last."""
    text = stacks.decode(errors="replace").strip()
    return text if size <= MAX_BYTES else f"{CUT}\n{text.partition(chr(10))[2]}"


# -- from py-spy


def find_py_spy() -> str | None:
    """The path of py-spy on PATH or beside this Python; None if it is not installed."""
    return shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))


def _spy(py_spy: str | None, pid: int, deadline: float) -> tuple[str, str]:
    """The stacks of a process, or what went wrong."""
    if py_spy is None:
        return "", "not installed (pip install redelastic[stacks])"
    command = [py_spy, "dump", "--full-filenames", "--pid", str(pid)]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=max(0.0, deadline - time.monotonic()),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "", "took too long"
    except OSError as e:
        return "", str(e)
    problem = done.stderr.decode(errors="replace").partition("\n")[0].removeprefix("Error: ").rstrip(".")
    return _beginning_of(done.stdout), problem or f"exit status {done.returncode}"


def _beginning_of(out: bytes) -> str:
    """The start of py-spy's output, main thread first, without the command line, which may hold a password."""
    _, thread, threads = out.decode(errors="replace").partition("\nThread ")
    text = (thread + threads).strip()
    return text if len(text) <= MAX_BYTES else f"{text[:MAX_BYTES].rpartition(chr(10))[0]}\n{CUT}"


# -- from the kernel


def _status(pid: int) -> dict[str, str]:
    """The fields of a process' ``/proc/PID/status``; empty if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def state_of(pid: int) -> str:
    """The kernel's letter for a process' state; empty if it is gone."""
    return _status(pid).get("State", "")[:1]
