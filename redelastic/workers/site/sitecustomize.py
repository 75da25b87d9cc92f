"""The template's program: import modules once, then fork a worker for each request.

The agent starts the template with a worker's exact command line, and with this folder on ``PYTHONPATH``. So Python runs
this file at startup, before the script. It returns only in the forked workers: in each of them Python goes on to run
the script as usual. The template itself never gets there.

A worker must be a child of the agent. So the template forks a process that forks the worker and ends, and the agent
adopts the orphan.

Standard library only: anything imported here is imported in every worker.
"""

from __future__ import annotations

import gc
import marshal
import os
import shutil
import signal
import socket
import sys
import tempfile
import traceback
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

VARIABLE = "REDELASTIC_TEMPLATE"  # <file descriptor of the agent's socket>:<module>,<module>,…
GPU_FILES = frozenset({"/dev/nvidia-uvm", "/dev/kfd"})  # open once CUDA or ROCm is initialised
ADOPTED, RUN = b"\1", b"\2"


class Request(NamedTuple):
    """A worker, as the agent requests it."""

    arguments: list[str]  # the command line, as long as the template's own
    environment: dict[str, str]
    streams: list[int]  # which of stdout and stderr are redirected
    handled: list[int]  # signals that the agent has handlers for: a new process would have their defaults


# -- messages, as redelastic.workers.template writes and reads them


def send(connection: socket.socket, message: Any, files: list[int] | None = None) -> None:
    """Send a message, with file descriptors."""
    content = marshal.dumps(message)
    socket.send_fds(connection, [len(content).to_bytes(8, "big")], files or [])
    connection.sendall(content)


def receive(connection: socket.socket) -> tuple[Any, list[int]]:
    """Receive a message.

    Raises:
        EOFError: the other side is gone.
    """
    head, files, _, _ = socket.recv_fds(connection, 8, 8)
    content = b""
    length = int.from_bytes(head + _read(connection, 8 - len(head)), "big")
    content = _read(connection, length)
    return marshal.loads(content), files  # noqa: S302  # between the agent and its own child


def _read(connection: socket.socket, length: int) -> bytes:
    content = bytearray()
    while len(content) < length:
        part = connection.recv(length - len(content))
        if not part:
            raise EOFError
        content += part
    return bytes(content)


# -- the imports


def preload(modules: list[str]) -> str:
    """Import modules; returns why workers cannot be forked afterwards, or an empty string."""
    folders = _first_on_path()
    sys.path[:0] = folders
    made, make = list[str](), tempfile.mkdtemp

    def noting(*arguments: Any, **more: Any) -> Any:
        made.append(make(*arguments, **more))
        return made[-1]

    tempfile.mkdtemp = noting
    try:
        for name in modules:
            try:
                import_module(name)
            except BaseException as e:  # noqa: BLE001  # SystemExit too
                return f"{name} could not be imported: {type(e).__name__}: {e}"
            temporary = [folder for folder in made if os.path.isdir(folder)]  # noqa: PTH112  # faster
            for folder in temporary:
                shutil.rmtree(folder, ignore_errors=True)
            if problem := "makes a temporary folder, which workers would share," if temporary else unfit():
                return f"{name} {problem} when it is imported"
    finally:
        tempfile.mkdtemp = make
        for folder in folders:
            sys.path.remove(folder)
    return ""


def _first_on_path() -> list[str]:
    """The entry that Python will put first on the path: the script's folder, or with -m the working directory."""
    if getattr(sys.flags, "safe_path", False):
        return []
    return [str(Path.cwd() if sys.argv[0] == "-m" else Path(sys.argv[0]).resolve().parent)]


def unfit() -> str:
    """Why this process must no longer be forked, or an empty string."""
    if threads() > 1:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about threads at a fork
            if (child := os.fork()) == 0:
                os._exit(0)
        os.waitpid(child, 0)
        if (left := threads() - 1) > 0:  # OpenBLAS's do not count: its fork handler has ended them
            return f"starts {left} thread{'s' * (left > 1)}, which a fork would lose,"
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        pass
    else:
        return "starts a process, which each worker would need for itself,"
    torch = sys.modules.get("torch")
    if (torch is not None and torch.cuda.is_initialized()) or GPU_FILES & set(open_files()):
        return "initialises the GPU, which cannot be used after a fork,"
    return ""


def threads() -> int:
    """The number of this process' threads."""
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208


def open_files() -> list[str]:
    """The files that this process has open."""
    return [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]  # noqa: PTH208


def files() -> dict[str, tuple[int, int]]:
    """The files of all modules imported so far: size and time of the last change in ns."""
    found = {}
    for module in list(sys.modules.values()):
        path = getattr(module, "__dict__", {}).get("__file__")
        if isinstance(path, str) and os.path.isabs(path):  # noqa: PTH117  # some modules have no file, and make one up
            try:
                status = os.stat(path)  # noqa: PTH116
            except OSError:
                continue
            found[path] = status.st_mtime_ns, status.st_size
    return found


# -- forking


def serve(agent: socket.socket) -> tuple[Request, list[int], socket.socket]:
    """Fork a worker for each request, and return only there: with the request, its files and its own connection."""
    while True:
        message, received = receive(agent)
        connection, *streams = received
        child = os.fork()
        if child == 0:
            agent.close()
            if os.fork():
                os._exit(0)
            os.setsid()
            return Request(*message), streams, socket.socket(fileno=connection)
        os.waitpid(child, 0)  # from now on the agent is the worker's parent
        for file in received:
            os.close(file)
        agent.sendall(ADOPTED)


def changed(given: dict[str, str], before: dict[str, str], after: dict[str, str]) -> dict[str, str]:
    """The environment ``given``, with the changes from ``before`` to ``after``, unless it differed from ``before``."""
    names = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    names = {name for name in names if given.get(name) == before.get(name)}
    kept = {name: value for name, value in given.items() if name not in names}
    return kept | {name: after[name] for name in names if name in after}


def become(request: Request, streams: list[int], agent: socket.socket) -> None:
    """Make this fork look like a new process, and wait for the agent's go-ahead."""
    agent.sendall(os.getpid().to_bytes(8, "big"))
    for number, file in zip(request.streams, streams, strict=True):
        os.dup2(file, number)
        os.close(file)
        stdout: Any = sys.stdout
        if number == 1 and not stdout.write_through:  # with -u it is never buffered
            stdout.reconfigure(line_buffering=os.isatty(1))
    for signum in request.handled:  # the template may be older than the handlers, and ignore them as under nohup
        if signal.getsignal(signum) is signal.SIG_IGN:
            signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(request.environment)
    own = len(sys.argv) - 1
    sys.argv[1:] = request.arguments[len(request.arguments) - own :]
    sys.orig_argv[:] = request.arguments
    # Random state set at import must differ between processes; `random` itself has a fork handler.
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "multiprocessing.process" in sys.modules:
        sys.modules["multiprocessing.process"].current_process().authkey = os.urandom(32)
    if "redelastic.worker" in sys.modules:
        sys.modules["redelastic.worker"]._open()  # noqa: SLF001  # the file that the environment names now
    if agent.recv(1) != RUN:
        raise EOFError  # the agent is gone, or has started another worker meanwhile
    agent.close()


def be_template() -> None:
    """Import the modules, and fork workers; returns in each worker, and never in the template."""
    file, _, modules = os.environ.pop(VARIABLE).partition(":")
    agent = socket.socket(fileno=int(file))
    agent.set_inheritable(False)
    before = dict(os.environ)
    problem = preload(modules.split(","))
    send(agent, (problem, {} if problem else files()))
    if problem:
        os._exit(0)
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    gc.collect()
    gc.freeze()  # a collection in a worker would copy every page it looks at
    request, streams, own = serve(agent)
    become(request._replace(environment=changed(request.environment, before, dict(os.environ))), streams, own)


def customize() -> None:
    """Run the `sitecustomize` that this one shadows: the next one on the path, if any."""
    here = str(Path(__file__).parent)
    sys.path.remove(here)
    sys.path_importer_cache.pop(here, None)
    path = os.environ["PYTHONPATH"].partition(os.pathsep)[2]
    os.environ["PYTHONPATH"] = path
    if not path:
        del os.environ["PYTHONPATH"]
    del sys.modules["sitecustomize"]
    import_module("sitecustomize")


if VARIABLE in os.environ:
    raised: Exception | None = None
    try:
        try:
            customize()
        except Exception as e:  # noqa: BLE001  # usually because there is none
            raised = e
        be_template()
    except (EOFError, ConnectionError):
        os._exit(0)  # the agent is gone
    except BaseException:  # noqa: BLE001  # the script must not run now
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    if raised is not None:
        raise raised  # Python reports what is wrong with a `sitecustomize`, and goes on
