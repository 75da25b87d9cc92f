"""Starts torchrun and `redelastic run` as forks of a process that has imported torch, which takes more than a second.

Each launcher is a process of its own, in a session of its own, as one that is started anew. It is started anew where
that makes a difference: in a long run, in other namespaces, with other variables that are read at the start, and where
its output goes into a pipe.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import json
import os
import re
import runpy
import select
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tests.support.long_tests import LONG

PREPARED: Final = ("torch.distributed.run", "redelastic.cli.run", "redelastic.agent.agent", "redelastic.plugin")
READ_AT_THE_START: Final = re.compile("PYTHON|LD_|MALLOC|TORCH(?!ELASTIC_)|OMP_|LOGLEVEL|TZ|LANG|LC_")
NAMESPACES: Final = ("net", "mnt", "uts")
_STREAMS: Final = (0, 1, 2)


class Launcher:
    """A process that was forked, with what tests use of ``subprocess.Popen``."""

    def __init__(self, template: Template, pid: int) -> None:
        self._template, self.pid = template, pid

    def poll(self) -> int | None:
        return self._template.status_of(self.pid, 0)

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def wait(self, timeout: float | None = None) -> int:
        status = self._template.status_of(self.pid, timeout)
        if status is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Template:
    """The process that launchers are forked from; it ends with this one, and they end with it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._statuses: dict[int, int] = {}
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket = ours
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._variables = read_at_the_start(environment)
        command = [sys.executable, "-m", "tests.support.launchers", str(theirs.fileno())]
        root = Path(__file__).parents[2]
        with theirs:
            self._process = subprocess.Popen(
                command, cwd=root, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )

    def fits(self, command: list[str], environment: Mapping[str, str]) -> bool:
        """Whether a launcher that is forked differs in nothing from one that is started anew."""
        here = [Path(f"/proc/thread-self/ns/{name}").stat().st_ino for name in NAMESPACES]
        there = [Path(f"/proc/{self._process.pid}/ns/{name}").stat().st_ino for name in NAMESPACES]
        is_module = command[:2] == [sys.executable, "-m"]
        return is_module and read_at_the_start(environment) == self._variables and here == there

    def start(self, command: list[str], environment: Mapping[str, str], streams: list[int], cwd: Path) -> Launcher:
        request = {"module": command[2], "arguments": command[3:], "environment": dict(environment), "cwd": str(cwd)}
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], streams)
            while "pid" not in (told := self._receive()):
                pass
        return Launcher(self, told["pid"])

    def status_of(self, pid: int, timeout: float | None) -> int | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._lock:
                while select.select([self._socket], [], [], 0)[0]:
                    self._receive()
                if pid in self._statuses:
                    return self._statuses[pid]
            left = 0.05 if deadline is None else deadline - time.monotonic()
            if left <= 0:
                return None
            select.select([self._socket], [], [], min(left, 0.05))

    def close(self) -> None:
        self._socket.close()
        self._process.wait()

    def _receive(self) -> dict[str, int]:
        message = self._socket.recv(1000)
        assert message, "the process that launchers are forked from has ended"
        told: dict[str, int] = json.loads(message)
        if "ended" in told:
            self._statuses[told["ended"]] = told["status"]
        return told


def read_at_the_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if READ_AT_THE_START.match(name)}


_template: Template | None = None


def start(
    command: list[str],
    environment: Mapping[str, str],
    out: Any,
    err: Any,
    *,
    stdin: Any = None,
    cwd: Path | None = None,
) -> subprocess.Popen[bytes] | Launcher:
    """Start a launcher in a session of its own, its output in these files; without a file for it, it has no input."""
    global _template  # noqa: PLW0603  # one for all tests of this process
    if not LONG and _template is None:
        _template = Template()
        atexit.register(_template.close)
    with contextlib.ExitStack() as opened:
        streams = [stdin or opened.enter_context(Path(os.devnull).open("rb")), out, err]
        into_files = not any(stat.S_ISFIFO(os.fstat(file.fileno()).st_mode) for file in streams)
        if _template is not None and into_files and _template.fits(command, environment):
            return _template.start(command, environment, [file.fileno() for file in streams], cwd or Path.cwd())
        named = dict(zip(("stdin", "stdout", "stderr"), streams, strict=True))
        return subprocess.Popen(command, env=environment, cwd=cwd, start_new_session=True, **named)


def run(
    command: list[str], environment: Mapping[str, str], limit: float, stdout: Any = None
) -> subprocess.CompletedProcess[str]:
    """Run a launcher to its end, as ``subprocess.run`` does; without a file for it, its standard output is kept."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        launcher = start(command, environment, stdout or out, err)
        try:
            code = launcher.wait(limit)
        finally:
            launcher.kill()
            launcher.wait(limit)
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(command, code, out.read().decode(), err.read().decode())


# -- in that process


def serve(ours: socket.socket) -> dict[str, Any]:
    """Fork what is asked for, until nobody asks any more; returns, in each fork, what it is to run."""
    woken, wake = os.pipe2(os.O_NONBLOCK)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    while True:
        watched: list[Any] = [ours, woken]
        ready, _, _ = select.select(watched, [], [])
        if woken in ready:
            os.read(woken, 1000)
            with contextlib.suppress(ChildProcessError):
                while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                    status = {"ended": ended[0], "status": os.waitstatus_to_exitcode(ended[1])}
                    ours.send(json.dumps(status).encode())
        if ours in ready:
            request, files, _, _ = socket.recv_fds(ours, 1_000_000, len(_STREAMS))
            if not request:
                os._exit(0)
            parent = os.getpid()
            if pid := os.fork():
                for file in files:
                    os.close(file)
                ours.send(json.dumps({"pid": pid}).encode())
                continue
            become(parent, files)
            told: dict[str, Any] = json.loads(request)
            return told


def become(parent: int, files: list[int]) -> None:
    """Make this fork what a new process is."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for file, number in zip(files, _STREAMS, strict=True):
        os.dup2(file, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))


def main() -> None:
    ours = socket.socket(fileno=int(sys.argv[1]))
    for name in PREPARED:
        importlib.import_module(name)
    told = serve(ours)
    ours.detach()
    os.environ.clear()
    os.environ.update(told["environment"])
    os.chdir(told["cwd"])
    sys.argv[:] = ["", *told["arguments"]]
    sys.orig_argv[:] = [sys.executable, "-m", told["module"], *told["arguments"]]
    sys.modules.pop(told["module"] if told["module"] in PREPARED else "", None)  # it is the main module now
    runpy.run_module(told["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
