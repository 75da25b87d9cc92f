"""The process that measures: it may hang in a collective, a driver or a file system, and is killed then.

It reads tasks from its standard input and writes figures to its standard output, a line of JSON each.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from redelastic.host.limited import KILL_TIMEOUT
from redelastic.workers.deaths import signal_name

IN_GROUPS: Final = ("link", "all_reduce")  # tasks
GROUPS: Final = "groups"  # name of the store in which groups are made
STORE_TTL: Final = 3600.0  # how long what a preflight keeps in Redis outlives its last use, in seconds


class Probe:
    """Starts the process, and another where it did not answer in time, has died, or has failed in a group.

    Args:
        setting: what it needs to know: ``backend``, and the endpoint and keys of the store in which groups are made.
    """

    def __init__(self, setting: Mapping[str, Any]) -> None:
        self._setting = dict(setting)
        self._process = self._start()
        self._is_ready = False  # it has imported torch

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        _write(process, self._setting)
        return process

    def wait_until_ready(self, timeout: float) -> str:
        """Wait until it has imported torch, which takes none of a measure's time; returns what is wrong, or ""."""
        if not self._is_ready:
            answer = self._answer(time.monotonic() + timeout)
            self._is_ready = not answer
            return str(answer.get("error", ""))
        return ""

    def ask(self, deadline: float, **task: Any) -> dict[str, Any]:
        """Have it do a task.

        Args:
            deadline: on the monotonic clock, in seconds; then it is killed.
            task: what to do, as ``do``, and what that needs.

        Returns:
            Its figures; or ``error``, in words.
        """
        if error := self.wait_until_ready(deadline - time.monotonic()):
            return {"error": error}
        _write(self._process, {**task, "timeout": max(1.0, deadline - time.monotonic())})
        answer = self._answer(deadline)
        if "error" in answer and task["do"] in IN_GROUPS:
            self._start_anew()
        return answer

    def _answer(self, deadline: float) -> dict[str, Any]:
        timeout = max(0.0, deadline - time.monotonic())
        line = _read_line(self._process, deadline)
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        status = self._process.poll()
        self._start_anew()
        if line is None:
            return {"error": f"it did not end within {timeout:.0f} s"}
        how = f"was killed by {signal_name(-status)}" if status is not None and status < 0 else f"exited with {status}"
        return {"error": f"the process that measures {how}"}

    def _start_anew(self) -> None:
        self.close()
        self._process, self._is_ready = self._start(), False

    def close(self) -> None:
        """Kill it; one that hangs in the kernel is left behind."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                if pipe:
                    pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_TIMEOUT)


def _write(process: subprocess.Popen[bytes], message: Mapping[str, Any]) -> None:
    assert process.stdin is not None  # noqa: S101 - stdin=PIPE
    with contextlib.suppress(BrokenPipeError):  # it has died, which its silence shows
        process.stdin.write(json.dumps(message).encode() + b"\n")
        process.stdin.flush()


def _read_line(process: subprocess.Popen[bytes], deadline: float) -> bytes | None:
    """A line of its output; empty if it has closed that, None if there was none until the deadline."""
    assert process.stdout is not None  # noqa: S101 - stdout=PIPE
    line = b""
    while not line.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
            return None
        more = os.read(process.stdout.fileno(), 65536)
        if not more:
            process.wait(KILL_TIMEOUT)
            return b""
        line += more
    return line


# -- in the process


def main() -> None:
    """Do tasks until the standard input is closed, which ends even a task that hangs."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what libraries print is no answer
    lines: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin.buffer:
            lines.put(json.loads(line))
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    setting = lines.get()

    from . import measures  # noqa: PLC0415  # it takes seconds, and the input has to be read

    devices = measures.devices(setting["backend"])
    answers.write(b"{}\n")
    while True:
        task, found = lines.get(), dict[str, Any]()
        with contextlib.ExitStack() as group:
            try:
                if task["do"] in IN_GROUPS:
                    group.enter_context(_group(setting, task))
                match task["do"]:
                    case "compute" | "memory" as name:
                        found = {"value": min(getattr(measures, name)(device) for device in devices)}
                    case "write":
                        found = {"value": measures.write(Path(task["folder"]))}
                    case "link":
                        found = measures.link(task["rank"], devices[0])
                    case _:
                        found = measures.all_reduce(task["bytes"], devices[0])
            except Exception as e:  # noqa: BLE001
                words = (e.strerror if isinstance(e, OSError) else None) or str(e)
                found = {"error": f"{type(e).__name__}: {' '.join(words.split())[:160]}"}
            answers.write(json.dumps(found).encode() + b"\n")  # before the end of the group, which may take long


@contextlib.contextmanager
def _group(setting: Mapping[str, Any], task: Mapping[str, Any]) -> Iterator[None]:
    """The default process group, of the hosts that have got the same task.

    A process that fails in it is not used again: the group is left as it is.
    """
    import torch.distributed as dist  # noqa: PLC0415

    from redelastic.redis.connection import Connection  # noqa: PLC0415
    from redelastic.redis.endpoint import parse_endpoint  # noqa: PLC0415
    from redelastic.store import RedisStore  # noqa: PLC0415

    timeout = float(task["timeout"])
    connection = Connection.open(parse_endpoint(setting["endpoint"], **setting["tls"]), connect_timeout=timeout)
    keys: Any = {"key_prefix": setting["key_prefix"], "timeout": timeout, "ttl": STORE_TTL}
    with contextlib.closing(RedisStore(connection, setting["run_id"], GROUPS, **keys)) as store:
        dist.init_process_group(
            setting["backend"],
            store=dist.PrefixStore(task["group"], store),
            rank=task["rank"],
            world_size=task["size"],
            timeout=timedelta(seconds=timeout),
        )
        yield
        dist.destroy_process_group()
    connection.close()


if __name__ == "__main__":
    main()
