"""Servers, runs and nodes for the tests: each test has a run id of its own, on a server that the tests started."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import tempfile
import threading
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import redis
from torch.distributed.elastic.rendezvous import RendezvousParameters

from redelastic.redis.connection import Connection
from redelastic.redis.keys import RunKeys
from redelastic.redis.server import RedisServer
from redelastic.rendezvous.backend import create_backend
from redelastic.rendezvous.handler import RedisRendezvousHandler, create_handler
from tests.support import forked_python, launchers
from tests.support.commands import until
from tests.support.long_tests import examples, quick_first
from tests.support.nodes import NodeFactory
from tests.support.processes import Processes
from tests.support.servers import reserved_port, server_binaries

pytest_plugins = [f"tests.support.{name}" for name in ("fault_matrix", "folder_times", "left_out")]
# Speed is judged by benchmarks: here a draw or a test may take as long as a busy machine needs.
hypothesis.settings.register_profile(
    "suite", max_examples=examples(100), deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("suite")
# TCPStore looks up the names of its sockets' ends, even for a line of its log: one lost answer would cost 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
# As benchmarks.harness, which some tests import: the environment of launchers is fixed from here.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
# Folders whose tests take the longest
_SLOW = ("agent", "faults", "integrations", "proofs", "project", "survival", "workers")
_HERE = Path(__file__).parent
_MEMORY = "/dev/shm"
_ROOM = 4e9  # bytes


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and so would ours
    for number in (signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:  # under nohup, in the background: what tests start would, too
            signal.signal(number, lambda *_: None)
    gc.freeze()  # else each collection of garbage, while thousands of tests are made, would visit all of torch
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or each process that a test starts would compile the package anew
    _keep_files_in_memory()
    if getattr(config.option, "numprocesses", None) and launchers.ADDRESS_VARIABLE not in os.environ:
        launchers.start_template_maker()  # with the processes of xdist, which inherit the address


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: Sequence[Any]) -> None:
    for spec in specs:  # of execnet's class XSpec
        spec.python = forked_python.PYTHON


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Have each process of xdist import the test modules in another order: who is the first to compile one keeps it."""
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if processes == 1 or session.config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    modules = sorted(_HERE.glob("*/test_*.py"))
    start = len(modules) * int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")) // processes
    for path in modules[start:] + modules[:start]:
        with contextlib.suppress(Exception, pytest.skip.Exception):  # it is raised again when they are collected
            importlib.import_module(".".join(path.relative_to(_HERE.parent).with_suffix("").parts))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Have each process of xdist begin with its slowest tests: of this order, worksteal gives each a stretch."""
    modules: dict[Path, list[pytest.Item]] = {}
    for item in items:
        modules.setdefault(item.path, []).append(item)
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    stretches: list[list[pytest.Item]] = [[] for _ in range(processes)]
    limits = {path: max(map(_limit, tests)) for path, tests in modules.items()}
    for path in sorted(modules, key=lambda path: (path.parent.name not in _SLOW, -limits[path])):
        min(stretches, key=len).extend(modules[path])
    items[:] = [item for stretch in stretches for item in stretch]


def _limit(item: pytest.Item) -> float:
    """The time limit of a test, in seconds, or 0 for the default: what may take the longest begins first."""
    mark = item.get_closest_marker("timeout")
    return float(mark.args[0]) if mark else 0


def _keep_files_in_memory() -> None:
    """On a busy disk a server waits to write its log, and its replica takes over."""
    if "TMPDIR" in os.environ or not Path(_MEMORY).is_dir():
        return
    found = os.statvfs(_MEMORY)
    if found.f_bavail * found.f_frsize >= _ROOM and not found.f_flag & os.ST_NOEXEC:
        os.environ["TMPDIR"] = tempfile.tempdir = _MEMORY


@pytest.fixture(autouse=True)
def _own_signal_handlers_and_variables() -> Iterator[None]:
    """Torch's launcher leaves its own behind in the process that it ran in."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    environment = dict(os.environ)
    yield
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    for number, handler in before.items():
        if handler is not None:
            signal.signal(number, handler)


def _keepers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("redelastic-keepalive")}


@pytest.fixture(autouse=True)
def _leaves_no_node() -> Iterator[None]:
    """A node that a test forgets renews its lease until the process ends, and later tests find its thread."""
    before = _keepers()
    yield
    until(lambda: _keepers() <= before, "all nodes have been shut down")


@pytest.fixture(scope="session")
def server() -> Iterator[RedisServer]:
    """The server that most tests share."""
    with RedisServer() as started:
        yield started


@pytest.fixture(
    scope="session",
    params=quick_first(server_binaries()),
    ids=lambda path: Path(path).parts[-3] + "-" + Path(path).name,
)
def every_server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    """The server that all tests use; with REDELASTIC_LONG=1, one of each version at hand."""
    with RedisServer(request.param) as started:
        yield started


@pytest.fixture
def own_server() -> Iterator[RedisServer]:
    """A server that the test may kill, freeze or reconfigure."""
    with RedisServer() as started:
        yield started


@pytest.fixture
def processes() -> Iterator[Processes]:
    """Starts the members of process groups, and kills those that have not ended."""
    started = Processes()
    yield started
    started.kill()


@pytest.fixture
def run_id() -> str:
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def client(server: RedisServer) -> Iterator[redis.Redis]:
    with server.get_client() as opened:
        yield opened


@pytest.fixture
def connection(server: RedisServer) -> Iterator[Connection]:
    opened = Connection.open(server.url)
    yield opened
    opened.close()


@pytest.fixture
def keys(run_id: str) -> RunKeys:
    return RunKeys(run_id)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Threads for what blocks."""
    with ThreadPoolExecutor(16) as executor:
        yield executor


@pytest.fixture
def free_ports() -> Iterator[list[int]]:
    """Four ports that nobody gets but servers of the test, which set SO_REUSEADDR."""
    with contextlib.ExitStack() as opened:
        yield [opened.enter_context(reserved_port()) for _ in range(4)]


@pytest.fixture
def new_node(server: RedisServer, run_id: str) -> Iterator[NodeFactory]:
    """Makes handlers, each a node of the test's run, and shuts them down afterwards.

    Unless a test says otherwise, they outlive a machine that stands still for some seconds, and a round waits for nodes
    until it has all that it may have, or 60 s.
    """
    made: list[RedisRendezvousHandler] = []

    def make(
        min_nodes: int = 1, max_nodes: int = 4, *, url: str | None = None, **config: Any
    ) -> RedisRendezvousHandler:
        lease = {} if "keep_alive_interval" in config else {"keep_alive_interval": 0.3, "keep_alive_max_attempt": 20}
        config = {"last_call_timeout": 60, "join_timeout": 100} | lease | config
        params = RendezvousParameters(
            "redis", url or server.url, config.pop("run_id", run_id), min_nodes, max_nodes, **config
        )
        backend, store = create_backend(params)
        store.close()
        handler = create_handler(backend, params)
        assert isinstance(handler, RedisRendezvousHandler)
        made.append(handler)
        return handler

    yield make
    for handler in made:
        handler.shutdown()
