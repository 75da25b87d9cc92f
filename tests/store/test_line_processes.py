"""Writes that nobody waits for, in processes that fork or end."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from multiprocessing import util
from types import SimpleNamespace
from typing import Any

import pytest
import test_line
import torch.distributed as dist
from test_line import through, under_way

from redelastic.redis.server import RedisServer
from redelastic.store import RedisStore
from redelastic.store import line as line_module
from tests.support import stores
from tests.support.faulty_proxy import Fault, FaultyProxy
from tests.support.stores import SOON, in_thread, opened

store, proxy, unlucky = stores.store, test_line.proxy, test_line.unlucky


def test_a_forked_child_finds_what_its_parent_has_written(
    unlucky: RedisStore, server: RedisServer, proxy: FaultyProxy, run_id: str
) -> None:
    fault = proxy.add(Fault(b"lost", lose_request=True))
    unlucky.set("lost", "v")
    child = os.fork()
    if child == 0:
        with opened(server, run_id) as direct:
            found = direct.check(["lost"]) and under_way(unlucky) == 0
            unlucky.append("log", "child's")
            os._exit(0 if found and unlucky.get("log") == b"child's" else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert fault.fired.is_set()
    assert unlucky.get("log") == b"child's"


def test_a_failure_that_a_fork_has_met_is_told_by_the_parents_next_call(own_server: RedisServer, run_id: str) -> None:
    with opened(own_server, run_id, acknowledge=False) as store, own_server.get_client() as client:
        store.set("there", "v")
        store.check(["there"])
        client.config_set("maxmemory", 1)
        store.set("k", "v")
        child = os.fork()
        if child == 0:
            os._exit(0 if store.get("there") == b"v" else 1)
        assert os.waitpid(child, 0)[1] == 0, "it is not the child's"
        with pytest.raises(dist.DistNetworkError, match="An earlier set of the key b'k' has failed"):
            store.get("there")
        assert store.get("there") == b"v"


def test_no_thread_of_a_child_gets_at_what_is_still_its_parents(
    server: RedisServer, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(server, run_id, acknowledge=False) as store:
        store.set("k", "v")
        line, free = store._line, []
        assert line is not None
        child = os.fork()
        if child == 0:

            def meanwhile(*_: object, **__: object) -> None:
                free.append(in_thread(lambda: line._lock.acquire(blocking=False)).result(SOON))

            monkeypatch.setattr(util, "Finalize", meanwhile)
            store.set("k", "child's")
            os._exit(0 if store.get("k") == b"child's" and free == [False] else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert store.get("k") == b"child's"


def test_a_child_can_write_though_a_thread_of_its_parent_wrote_when_it_was_forked(
    server: RedisServer, run_id: str
) -> None:
    with opened(server, run_id, acknowledge=False) as store:
        line, entered, forked = store._line, threading.Event(), threading.Event()
        assert line is not None

        def write() -> None:
            held = line._enter(1)
            entered.set()
            assert forked.wait(SOON)
            line._leave(held)

        writing = in_thread(write)
        assert entered.wait(SOON)
        child = os.fork()
        if child == 0:
            store.set("k", "child's")
            os._exit(0 if under_way(store) == 1 and store.get("k") == b"child's" else 1)
        assert os.waitpid(child, 0)[1] == 0
        forked.set()
        writing.result(SOON)


def test_all_stores_together_have_five_seconds_at_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    now, given = [100.0], []

    class Away:
        under_way = (1,)

        def settle(self, timeout: float) -> None:
            given.append(timeout)
            now[0] += 3

    monkeypatch.setattr(line_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(line_module, "_lines", [Away(), Away(), Away()])
    line_module._settle_all()
    assert given == [5, 2, 0]


ENDS = """
import os, sys
from redelastic.store import RedisStore
store = RedisStore(sys.argv[1], sys.argv[2], acknowledge=False)
store.set("lost", "v")
"""


def _end(url: str, run_id: str) -> None:
    RedisStore(url, run_id, acknowledge=False).set("lost", "v")


@pytest.mark.parametrize("how", ["a script", "fork", "spawn"])
def test_a_process_that_ends_has_written_all(
    server: RedisServer, store: RedisStore, proxy: FaultyProxy, run_id: str, how: str
) -> None:
    fault = proxy.add(Fault(b"lost", lose_request=True))
    if how == "a script":
        subprocess.run([sys.executable, "-c", ENDS, through(proxy, server), run_id], check=True, timeout=60)
    else:
        context: Any = multiprocessing.get_context(how)
        child = context.Process(target=_end, args=(through(proxy, server), run_id))
        child.start()
        child.join(60)
        assert child.exitcode == 0
    assert fault.fired.is_set()
    assert store.get("lost") == b"v"
