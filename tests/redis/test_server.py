"""RedisServer with real servers: private, reachable, restartable, and gone when its process is gone."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
import redis

from redelastic.redis import server as server_module
from redelastic.redis.server import RedisServer, find_binary, installed_binaries
from tests.support.shell_scripts import make_script
from tests.support.temporary import make_temporary_files_in

if TYPE_CHECKING:
    from collections.abc import Iterator

# Every server on this machine: each must behave the same.
BINARIES = list(dict.fromkeys([find_binary(), *installed_binaries()]))

# The module is loaded by its path: the package's own import brings torch, seconds for each process.
LOAD_MODULE = f"""
import importlib.util, os, signal, sys, threading
spec = importlib.util.spec_from_file_location("server", {server_module.__file__!r})
sys.modules["server"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
server = module.RedisServer(unix_socket=True)
"""


@pytest.fixture(params=BINARIES)
def binary(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@contextlib.contextmanager
def watch(pid: int) -> Iterator[select.poll]:
    """Polls readable once the process has ended, reaped or not, and never for a successor with the same id."""
    pidfd = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    try:
        yield poll
    finally:
        os.close(pidfd)


@contextlib.contextmanager
def run_parent(program: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", LOAD_MODULE + program]
    # A short TMPDIR of its own: what a killed parent leaves there goes with it.
    with tempfile.TemporaryDirectory() as tmpdir:
        env = {**os.environ, "TMPDIR": tmpdir}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as parent:
            yield parent


def read_words(parent: subprocess.Popen[str]) -> list[str]:
    assert parent.stdout is not None
    return parent.stdout.readline().split()


# ---- what it serves


@pytest.mark.parametrize("unix_socket", [False, True])
def test_answers_only_with_the_password(binary: str, unix_socket: bool) -> None:
    with RedisServer(binary, unix_socket=unix_socket) as server:
        with server.get_client() as client:
            assert client.ping()
        without_password = server.url.replace(f":{server.password}@", "")
        with redis.Redis.from_url(without_password) as stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()
        assert server.pid is not None
        listening = [c for c in psutil.Process(server.pid).net_connections("tcp") if c.status == psutil.CONN_LISTEN]
        expected = [] if unix_socket else [server.endpoint]
        assert [f"{c.laddr.ip}:{c.laddr.port}" for c in listening] == expected


def test_password_is_in_no_place_that_others_read(binary: str, tmp_path: Path) -> None:
    # Redis writes over its arguments and environment once it runs, so what it was started with counts too.
    started, data = tmp_path / "started", tmp_path / "data"
    wrapper = make_script(tmp_path / "redis-server", f'{{ echo "$0 $*"; env; }} > {started}', f'exec {binary} "$@"')
    with RedisServer(wrapper, data_dir=data, unix_socket=True) as server, server.get_client() as client:
        client.set("key", "value")
        password = server.password
        assert len(password) == 64
        assert password not in repr(server)
        assert server.endpoint in repr(server)
        assert str(wrapper) in started.read_text()
        assert password not in started.read_text()
        for name in ("cmdline", "environ"):
            assert password.encode() not in Path(f"/proc/{server.pid}/{name}").read_bytes()
        private_dir = Path(server.endpoint).parent
        assert private_dir.stat().st_mode & 0o777 == 0o700
        files = [path for folder in (private_dir, data) for path in folder.rglob("*") if path.is_file()]
        assert {path.name for path in files} > {"redis.log"}
        assert not [path for path in files if password.encode() in path.read_bytes()]


def test_servers_share_nothing() -> None:
    with RedisServer() as one, RedisServer() as two, one.get_client() as first, two.get_client() as second:
        first.set("key", "one")
        assert second.get("key") is None
        assert one.endpoint != two.endpoint
        assert one.password != two.password


def test_eight_start_at_the_same_moment() -> None:
    together = threading.Barrier(8)
    servers = [RedisServer() for _ in range(8)]

    def start(server: RedisServer) -> int | None:
        together.wait(60)
        server.start()
        return server.pid

    try:
        with ThreadPoolExecutor(8) as threads:
            pids = set(threads.map(start, servers))
        assert len(pids) == len({server.endpoint for server in servers}) == 8
        for server in servers:
            with server.get_client() as client:
                assert client.info("server")["process_id"] == server.pid
    finally:
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(RedisServer.stop, servers))


def test_config_may_add_but_not_open_the_server(binary: str) -> None:
    extra = {"maxmemory": "100mb", "SAVE": "3600 1"}
    with RedisServer(binary, config=extra) as server, server.get_client(decode_responses=True) as client:
        assert client.config_get("maxmemory") == {"maxmemory": str(100 * 1024**2)}
        assert client.config_get("save") == {"save": "3600 1"}
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
    with pytest.raises(ValueError, match="config sets bind, which RedisServer sets itself"):
        RedisServer(binary, config={"Bind": "0.0.0.0"}).start()  # noqa: S104


def test_runs_in_a_locale_that_every_machine_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "xx_XX.UTF-8")
    with pytest.raises(RuntimeError, match=r"the locale is C$"):
        RedisServer(make_script(tmp_path / "redis-server", "echo the locale is $LC_ALL", "exit 1")).start()


# ---- start, kill, stop


def test_start_while_it_runs_changes_nothing() -> None:
    with RedisServer() as server:
        before = server.pid, server.url
        server.start()
        assert (server.pid, server.url) == before


def test_stop_leaves_nothing_and_may_be_repeated(binary: str) -> None:
    server = RedisServer(binary, unix_socket=True)
    server.stop()
    server.start()
    pid, private_dir = server.pid, Path(server.endpoint).parent
    assert pid is not None
    assert private_dir.exists()
    server.stop()
    assert not psutil.pid_exists(pid)  # Ended and reaped: a zombie would exist.
    assert not private_dir.exists()
    server.stop()
    assert server.pid is None
    for ask in (lambda: server.url, lambda: server.endpoint, server.get_client):
        with pytest.raises(RuntimeError, match="call start"):
            ask()
    with server, server.get_client() as client:  # It may start anew.
        assert client.ping()


def test_kill_then_start_comes_back_empty_at_the_same_url(binary: str) -> None:
    with RedisServer(binary) as server, server.get_client() as client:
        url, pid = server.url, server.pid
        client.set("key", "value")
        server.kill()
        assert server.pid is None
        assert pid is not None
        assert not psutil.pid_exists(pid)
        server.kill()
        server.start()
        assert server.url == url
        assert client.get("key") is None


def test_kill_then_start_comes_back_with_its_data(binary: str, tmp_path: Path) -> None:
    data_dir = tmp_path / 'a "quoted" name' / "data"
    with RedisServer(binary, data_dir=data_dir) as server, server.get_client() as client:
        for count in range(1, 4):
            assert client.incr("count") == count
            server.kill()
            server.start()
    with RedisServer(binary, data_dir=data_dir) as server, server.get_client() as client:
        assert client.get("count") == b"3"


def test_port_stays_reserved_while_the_server_is_down() -> None:
    with RedisServer() as server:
        server.kill()
        host, port = server.endpoint.split(":")
        with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
            other.bind((host, int(port)))


def test_serves_the_port_asked_for() -> None:
    with socket.socket() as keep:
        # As RedisServer reserves its own: nobody else is offered the port between here and there.
        keep.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keep.bind(("127.0.0.1", 0))
        port = keep.getsockname()[1]
        with RedisServer(port=port) as server:
            assert server.endpoint == f"127.0.0.1:{port}"
            with pytest.raises(OSError, match=f"port {port} .*choose another"):
                RedisServer(port=port).start()


def test_terminal_signals_do_not_reach_it() -> None:
    with RedisServer() as server:
        assert server.pid is not None
        assert os.getsid(server.pid) == os.getpgid(server.pid) == server.pid


@pytest.mark.fault("all processes of a --standalone job get SIGTERM, as from systemd", "its Redis serves to the end")
def test_sigterm_to_all_processes_of_a_job_does_not_end_it(binary: str) -> None:
    """As systemd and batch systems send it: the job needs its server to save and to end."""
    with RedisServer(binary) as server, server.get_client() as client:
        assert server.pid is not None
        os.kill(server.pid, signal.SIGTERM)
        assert client.blpop(["nothing"], 0.5) is None  # meanwhile it would have ended
        private_dir = Path(f"/proc/{server.pid}/cwd").readlink()
        log = (private_dir / "redis.log").open()
        server.stop()
        assert "ready to exit" in log.read(), "it has shut down"
        log.close()


# ---- gone when its process is gone, and only then


@pytest.mark.parametrize("start", ["server.start()", "t = threading.Thread(target=server.start); t.start(); t.join()"])
def test_gone_after_sigkill_of_its_parent(start: str) -> None:
    with run_parent(f"{start}\nprint(server.pid, flush=True)\nsignal.pause()") as parent:
        try:
            with watch(int(read_words(parent)[0])) as server:
                assert not server.poll(0)
                parent.kill()
                assert server.poll(60_000), "the server outlived its parent"
        finally:
            parent.kill()


def test_gone_after_sigkill_of_a_parent_whose_forked_child_lives_on() -> None:
    program = """
server.start()
child = os.fork() or signal.pause()
print(server.pid, child, flush=True)
signal.pause()
"""
    with run_parent(program) as parent:
        server_pid, child_pid = map(int, read_words(parent))
        try:
            with watch(server_pid) as server, watch(child_pid) as child:
                parent.kill()
                assert server.poll(60_000), "the server outlived its parent"
                assert not child.poll(0), "this test needs a child that lives on"
        finally:
            parent.kill()
            os.kill(child_pid, signal.SIGKILL)


@pytest.mark.parametrize("end", ["", "sys.exit(3)", "raise SystemError"])
def test_a_parent_that_forgets_stop_leaves_nothing(end: str) -> None:
    with run_parent(f"sys.stderr = None\nserver.start()\nprint(server.pid, server.endpoint)\n{end}") as parent:
        pid, endpoint = read_words(parent)
        parent.wait(60)
        assert not psutil.pid_exists(int(pid))
        assert not Path(endpoint).parent.exists()


def test_outlives_the_thread_that_started_it() -> None:
    server = RedisServer()
    pids: list[int] = []

    def start_and_end() -> None:
        server.start()
        pids.append(server.pid or 0)

    thread = threading.Thread(target=start_and_end)
    thread.start()
    thread.join()
    try:
        with watch(pids[0]) as process, server.get_client() as client:
            assert not process.poll(300), "the server ended with the thread"
            assert client.ping()
    finally:
        server.stop()


def test_outlives_a_forked_child_that_inherits_it() -> None:
    # The child ends by sys.exit, so that it goes through atexit as a program does.
    program = """
server.start()
child = os.fork()
if child == 0:
    server.stop()
    server.kill()
    try:
        server.start()
    except RuntimeError:
        sys.exit(7)
    sys.exit("a child started its parent's server")
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(code, server.get_client().ping(), os.path.exists(server.endpoint), flush=True)
"""
    with run_parent(program) as parent:
        assert read_words(parent) == ["7", "True", "True"]


# ---- a start that fails


def test_server_that_ends_shows_its_log(tmp_path: Path) -> None:
    server = RedisServer(make_script(tmp_path / "redis-server", "echo no memory for me >&2", "exit 3"))
    with pytest.raises(RuntimeError, match=r"(?s)ended with status 3 before .*no memory for me"):
        server.start()
    assert repr(server) == "<RedisServer not started>"


def test_config_that_the_server_refuses_shows_in_the_error(binary: str) -> None:
    with pytest.raises(RuntimeError, match="no-such-directive"):
        RedisServer(binary, config={"no-such-directive": "1"}).start()


def test_server_that_never_answers_is_killed_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_TERMINATE_S", 0.2)
    make_temporary_files_in(tmp_path, monkeypatch)
    # An ignored signal stays ignored through exec.
    script = make_script(tmp_path / "redis-server", "trap '' INT", "exec sleep 60")
    before = psutil.Process().children()
    with pytest.raises(TimeoutError, match=r"did not answer at 127.0.0.1:\d+ within 0.5 s"):
        RedisServer(script, startup_timeout=0.5).start()
    assert {*psutil.Process().children()} <= {*before}
    assert list(tmp_path.iterdir()) == [script]


def test_too_few_open_files_say_what_to_do() -> None:
    program = LOAD_MODULE + "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))\nserver.start()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    message = "redis-server needs 96 open files or more, and the limit is 32: raise it with ulimit -n."
    assert done.stderr.splitlines()[-1].endswith(message)


def test_socket_path_too_long_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    make_temporary_files_in(long, monkeypatch)
    with pytest.raises(ValueError, match="set TMPDIR to a shorter directory"):
        RedisServer(unix_socket=True).start()
    assert not list(long.iterdir())


def test_port_and_socket_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="port=7000 with unix_socket=True"):
        RedisServer(port=7000, unix_socket=True)
