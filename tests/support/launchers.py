"""Starts torchrun, `redelastic run` and other modules as forks of a process that has imported torch: that takes 2 s.

Each launcher is a process of its own, in a session of its own, as one that is started anew. It is started anew where
that makes a difference: in a long run, in other namespaces, with other variables that are read at the start, and where
its output goes into a pipe.

All processes of xdist share the one that imports. For each of them it forks a template, whose forks the launchers are.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from tests.support.long_tests import LONG

PREPARED: Final = (
    *("torch.distributed.run", "redelastic.cli.run", "redelastic.agent.agent", "redelastic.plugin"),
    *("torch.nn.parallel", "torch._dynamo", "hypothesis"),  # what functions of tests and their modules import
)
ADDRESS_VARIABLE: Final = "TEST_TEMPLATES"  # environment variable: of the socket of the process that forks templates
ROOT: Final = Path(__file__).parents[2]
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
        if ADDRESS_VARIABLE not in os.environ:
            start_template_maker()
        self._lock = threading.Lock()
        self._statuses: dict[int, int] = {}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        atexit.register(self._socket.close)
        self._socket.connect(os.environ[ADDRESS_VARIABLE])
        told = json.loads(self._socket.recv(100_000))
        self._pid: int = told["template"]
        self.variables: dict[str, str] = told["variables"]

    def fits(self, command: list[str], environment: Mapping[str, str]) -> bool:
        """Whether a launcher that is forked differs in nothing from one that is started anew."""
        here = [Path(f"/proc/thread-self/ns/{name}").stat().st_ino for name in NAMESPACES]
        there = [Path(f"/proc/{self._pid}/ns/{name}").stat().st_ino for name in NAMESPACES]
        is_module = command[:2] == [sys.executable, "-m"]
        return is_module and read_at_the_start(environment) == self.variables and here == there

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

    def _receive(self) -> dict[str, int]:
        message = self._socket.recv(1000)
        assert message, "the process that launchers are forked from has ended"
        told: dict[str, int] = json.loads(message)
        if "ended" in told:
            self._statuses[told["ended"]] = told["status"]
        return told


def read_at_the_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if READ_AT_THE_START.match(name)}


def start_template_maker() -> None:
    """Start the process that forks templates for this process and those that it starts; it ends with this one."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    os.environ[ADDRESS_VARIABLE] = f"{folder.name}/socket"
    lives, lifeline = os.pipe()  # nobody else has the end that this process keeps
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(os.environ[ADDRESS_VARIABLE])
    listener.listen(100)
    inherited = [listener.fileno(), lives]
    command = [sys.executable, "-m", __name__, *map(str, inherited)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, pass_fds=inherited, stdin=subprocess.DEVNULL)
    listener.close()
    os.close(lives)
    atexit.register(process.wait)
    atexit.register(os.close, lifeline)  # first


_template: Template | None = None


def template() -> Template:
    """The one of this process."""
    global _template  # noqa: PLW0603  # one for all tests of this process
    if _template is None:
        _template = Template()
    return _template


def start(
    command: list[str],
    environment: Mapping[str, str],
    out: Any,
    err: Any,
    *,
    stdin: Any = None,
    cwd: Path | None = None,
    fork: bool = not LONG,
) -> subprocess.Popen[bytes] | Launcher:
    """Start a launcher in a session of its own, its output in these files; without a file for it, it has no input."""
    with contextlib.ExitStack() as opened:
        streams = [stdin or opened.enter_context(Path(os.devnull).open("rb")), out, err]
        into_files = not any(stat.S_ISFIFO(os.fstat(file.fileno()).st_mode) for file in streams)
        if fork and into_files and template().fits(command, environment):
            return template().start(command, environment, [file.fileno() for file in streams], cwd or Path.cwd())
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
            if launcher.poll() is None:
                os.killpg(launcher.pid, signal.SIGKILL)
                launcher.wait(limit)
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(command, code, out.read().decode(), err.read().decode())


# -- in the process that imports, in templates, and in their forks


def make_templates(listener: socket.socket, lifeline: int) -> socket.socket:
    """Fork a template for each process that connects, until the first one ends; returns, in each, its connection."""
    watched: list[Any] = [listener, lifeline, woken := _watch_children()]
    variables = read_at_the_start(os.environ)
    while True:
        ready, _, _ = select.select(watched, [], [])
        if lifeline in ready:
            os._exit(0)
        if woken in ready:
            for _ in _ended_children(woken):
                pass
        if listener in ready:
            connection, _ = listener.accept()
            for name in PREPARED:  # once somebody needs them
                importlib.import_module(name)
            gc.freeze()  # a collection would write to all of it, in each fork
            parent = os.getpid()
            if os.fork() == 0:
                end_with(parent)
                listener.close()
                os.close(lifeline)
                connection.send(json.dumps({"template": os.getpid(), "variables": variables}).encode())
                return connection
            connection.close()


def serve(ours: socket.socket) -> dict[str, Any]:
    """Fork what is asked for, until nobody asks any more; returns, in each fork, what it is to run."""
    watched: list[Any] = [ours, woken := _watch_children()]
    while True:
        ready, _, _ = select.select(watched, [], [])
        if woken in ready:
            for pid, status in _ended_children(woken):
                ours.send(json.dumps({"ended": pid, "status": status}).encode())
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
            end_with(parent)
            become_new_process(files)
            told: dict[str, Any] = json.loads(request)
            return told


def _watch_children() -> int:
    """The end of a pipe that can be read from when a child has ended."""
    woken, wake = os.pipe2(os.O_NONBLOCK)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    return woken


def _ended_children(woken: int) -> Iterator[tuple[int, int]]:
    """The pid and the exit status of each child that has ended."""
    with contextlib.suppress(BlockingIOError):  # a template's first look at what woke its parent
        os.read(woken, 1000)
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            yield ended[0], os.waitstatus_to_exitcode(ended[1])


def end_with(parent: int) -> None:
    """Have the kernel end this fork with its parent."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def become_new_process(files: list[int]) -> None:
    """Make this fork what a new process is."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for file, number in zip(files, _STREAMS, strict=True):
        os.dup2(file, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))


def main() -> None:
    connection = make_templates(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
    told = serve(connection)
    connection.detach()
    os.environ.clear()
    os.environ.update(told["environment"])
    os.chdir(told["cwd"])
    sys.path[0] = told["cwd"]
    sys.argv[:] = ["", *told["arguments"]]
    sys.orig_argv[:] = [sys.executable, "-m", told["module"], *told["arguments"]]
    sys.modules.pop(told["module"] if told["module"] in PREPARED else "", None)  # it is the main module now
    code: Any = 0
    try:
        runpy.run_module(told["module"], run_name="__main__", alter_sys=True)
    except SystemExit as e:
        if not isinstance(e.code, int | None):
            raise
        code = e.code or 0
    # As an interpreter ends, but for its modules: to clear torch's takes a fork as long as it has to run, or longer.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
