"""Starts torchrun, `redelastic run` and other modules as forks of a process that has imported torch, which takes 2 s.

Such a launcher has a session of its own, like one that is started anew. A launcher is started anew where a fork would
differ: in a long run, in other namespaces, with other values of variables that are read at start-up, and where its
output goes into a pipe.

All processes of xdist share one process that imports, the template maker. It forks a template for each of them, and
each launcher is a fork of a template. So are the processes of xdist themselves (`forked_python.py`).
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
from types import ModuleType
from typing import Any, Final

from tests.support.long_tests import LONG

IMPORTED: Final = (  # before any fork
    *("torch.distributed.run", "redelastic.cli.run", "redelastic.agent.agent", "redelastic.plugin"),
    *("torch.nn.parallel", "torch._dynamo", "hypothesis"),  # by functions that tests run in processes
)
ADDRESS_VARIABLE: Final = "TEST_TEMPLATES"  # environment variable: path of the template maker's socket
ROOT: Final = Path(__file__).parents[2]
READ_AT_START: Final = re.compile(  # names of variables that matter before `main`
    "PYTHON|LD_|MALLOC|TORCH(?!ELASTIC_)|OMP_|LOGLEVEL|TZ|LANG|LC_"
)
NAMESPACES: Final = ("net", "mnt", "uts")
_STREAMS: Final = (0, 1, 2)


class Launcher:
    """A launcher that was forked, with the part of ``subprocess.Popen`` that tests use."""

    def __init__(self, template: Template, pid: int) -> None:
        self._template, self.pid = template, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        self._template.await_end(self, 0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._template.await_end(self, timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Template:
    """The process that forks this process's launchers; it ends with this process, and they end with it."""

    def __init__(self) -> None:
        if ADDRESS_VARIABLE not in os.environ:
            start_template_maker()
        self._lock = threading.Lock()
        self._running: dict[int, Launcher] = {}  # by pid, which a later one may have again
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        atexit.register(self._socket.close)
        self._socket.connect(os.environ[ADDRESS_VARIABLE])
        hello = json.loads(self._socket.recv(100_000))
        self._pid: int = hello["template"]
        self.variables: dict[str, str] = hello["variables"]

    def fits(self, command: list[str], environment: Mapping[str, str]) -> bool:
        """Whether a fork would not differ from a launcher that is started anew."""
        here = [Path(f"/proc/thread-self/ns/{name}").stat().st_ino for name in NAMESPACES]
        there = [Path(f"/proc/{self._pid}/ns/{name}").stat().st_ino for name in NAMESPACES]
        is_module = command[:2] == [sys.executable, "-m"]
        return is_module and read_at_start(environment) == self.variables and here == there

    def start(self, command: list[str], environment: Mapping[str, str], streams: list[int], cwd: Path) -> Launcher:
        request = {"command": command, "environment": dict(environment), "cwd": str(cwd)}
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], streams)
            while "pid" not in (reply := self._receive()):
                pass
            launcher = self._running[reply["pid"]] = Launcher(self, reply["pid"])
        return launcher

    def await_end(self, launcher: Launcher, timeout: float | None) -> None:
        """Wait until a launcher has ended, and has its exit status, for at most ``timeout`` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while launcher.returncode is None:
            with self._lock:
                while select.select([self._socket], [], [], 0)[0]:
                    self._receive()
            left = 0.05 if deadline is None else deadline - time.monotonic()
            if launcher.returncode is not None or left <= 0:
                return
            select.select([self._socket], [], [], min(left, 0.05))

    def _receive(self) -> dict[str, int]:
        message = self._socket.recv(1000)
        assert message, "the template has ended"
        reply: dict[str, int] = json.loads(message)
        if "ended" in reply:
            self._running.pop(reply["ended"]).returncode = reply["status"]
        return reply


def read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that an interpreter or a library reads at start-up, and that a fork therefore cannot change."""
    return {name: value for name, value in environment.items() if READ_AT_START.match(name)}


def start_template_maker() -> None:
    """Start the template maker of this process and of the processes that inherit its address; it ends with this one."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    os.environ[ADDRESS_VARIABLE] = f"{folder.name}/socket"
    lifeline, held = os.pipe()  # only this process has the end that it keeps
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(os.environ[ADDRESS_VARIABLE])
    listener.listen(100)
    inherited = [listener.fileno(), lifeline]
    command = [sys.executable, "-m", __name__, *map(str, inherited)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, pass_fds=inherited, stdin=subprocess.DEVNULL, start_new_session=True
    )
    listener.close()
    os.close(lifeline)
    atexit.register(process.wait)
    atexit.register(os.close, held)  # runs before the wait


_template: Template | None = None


def template() -> Template:
    """This process's template."""
    global _template  # noqa: PLW0603  # for all tests of this process
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
    """Start a launcher in a session of its own, with its output in these files; without ``stdin`` it has no input."""
    with contextlib.ExitStack() as opened:
        streams = [stdin or opened.enter_context(Path(os.devnull).open("rb")), out, err]
        into_files = not any(stat.S_ISFIFO(os.fstat(file.fileno()).st_mode) for file in streams)
        if fork and into_files and template().fits(command, environment):
            return template().start(command, environment, [file.fileno() for file in streams], cwd or Path.cwd())
        named = dict(zip(("stdin", "stdout", "stderr"), streams, strict=True))
        return subprocess.Popen(command, env=environment, cwd=cwd, start_new_session=True, **named)


def run(
    command: list[str],
    environment: Mapping[str, str],
    limit: float,
    stdout: Any = None,
    *,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a launcher to its end, as ``subprocess.run`` does; the result has its stdout, unless that goes to a file."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        launcher = start(command, environment, stdout or out, err, cwd=cwd)
        try:
            code = launcher.wait(limit)
        finally:
            if launcher.poll() is None:
                os.killpg(launcher.pid, signal.SIGKILL)
                launcher.wait(limit)
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(command, code, out.read().decode(), err.read().decode())


# -- in the template maker, in templates and in launchers


def make_templates(listener: socket.socket, lifeline: int) -> socket.socket:
    """Fork a template for each process that connects, until the other end of ``lifeline`` is closed.

    Returns in each template, with its connection.
    """
    watched: list[Any] = [listener, lifeline, woken := _watch_children()]
    variables = read_at_start(os.environ)
    while True:
        ready, _, _ = select.select(watched, [], [])
        if lifeline in ready:
            os._exit(0)
        if woken in ready:
            for _ in _ended_children(woken):
                pass
        if listener in ready:
            connection, _ = listener.accept()
            for name in IMPORTED:  # not before a process needs them
                importlib.import_module(name)
            gc.freeze()  # else a collection in a fork would copy all of its pages
            parent = os.getpid()
            if os.fork() == 0:
                end_with(parent)
                listener.close()
                os.close(lifeline)
                connection.send(json.dumps({"template": os.getpid(), "variables": variables}).encode())
                return connection
            connection.close()


def serve(connection: socket.socket) -> dict[str, Any]:
    """Fork a launcher for each request, until the connection ends. Returns in each launcher, with its request."""
    watched: list[Any] = [connection, woken := _watch_children()]
    while True:
        ready, _, _ = select.select(watched, [], [])
        if woken in ready:
            for pid, status in _ended_children(woken):
                connection.send(json.dumps({"ended": pid, "status": status}).encode())
        if connection in ready:
            message, files, _, _ = socket.recv_fds(connection, 1_000_000, len(_STREAMS))
            if not message:
                os._exit(0)
            parent = os.getpid()
            if pid := os.fork():
                for file in files:
                    os.close(file)
                connection.send(json.dumps({"pid": pid}).encode())
                continue
            end_with(parent)
            become_new_process(files)
            request: dict[str, Any] = json.loads(message)
            return request


def _watch_children() -> int:
    """A file descriptor that becomes readable when a child has ended."""
    woken, wake = os.pipe2(os.O_NONBLOCK)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    return woken


def _ended_children(woken: int) -> Iterator[tuple[int, int]]:
    """Reap the children that have ended; their pids and exit statuses."""
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
    """Give this fork what a new process has: a session, signal handlers and open files."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for file, number in zip(files, _STREAMS, strict=True):
        os.dup2(file, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))


def main() -> None:
    connection = make_templates(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
    request = serve(connection)
    connection.detach()
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    sys.path[0] = request["cwd"]
    sys.orig_argv[:] = request["command"]
    _, option, program, *arguments = request["command"]
    sys.argv[:] = ["", *arguments]
    code: Any = 0
    try:
        if option == "-m":
            sys.modules.pop(program if program in IMPORTED else "", None)  # it becomes the main module
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:  # -c
            sys.modules["__main__"] = ModuleType("__main__")
            exec(program, vars(sys.modules["__main__"]))  # noqa: S102
    except SystemExit as e:
        if not isinstance(e.code, int | None):
            raise
        code = e.code or 0
    # As an interpreter ends, but without clearing its modules: torch's may take longer than the launcher's own work.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
