"""What somebody with access to Redis can do and cannot, and who hears the secrets."""

from __future__ import annotations

import ast
import json
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import psutil
import pytest
import redis
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousStateError

from redelastic import RedisStore, create_backend, create_handler
from redelastic.monitoring.control import RunControl
from redelastic.monitoring.events import MAX_REASON, Closed, Left, decode_cause
from redelastic.redis.connection import Connection
from redelastic.redis.endpoint import parse_endpoint
from redelastic.redis.keys import RunKeys
from redelastic.redis.server import RedisServer
from tests.support.commands import run_command
from tests.support.job_user import CANARY, PACKAGE, as_user_of, command_line
from tests.support.nodes import NodeFactory

pytest_plugins = ["tests.support.cli_fixtures"]
pytestmark = pytest.mark.timeout(300)


# -- what Redis holds is anybody's

HOSTILE: Final = "\x1b[2J\x1b]0;owned\x07[red]\n\r\u202e<script>alert(1)</script>"


@pytest.mark.fault("escapes, markup and scripts in a node's name or an event", "no terminal or browser obeys them")
def test_nothing_from_redis_is_obeyed(  # noqa: PLR0917  (fixtures)
    server: RedisServer, client: redis.Redis, new_node: NodeFactory, keys: RunKeys, run_id: str, tmp_path: Path
) -> None:
    node = new_node(1, 2, keep_alive_interval=20, last_call_timeout=0)
    node.next_rendezvous()
    name = f"{HOSTILE}-1-0123456789ab"
    client.zadd(keys.candidates, {name: 5})
    client.zadd(keys.leases, {name: 2**52})
    broken = Left(node=HOSTILE, reason=HOSTILE).as_cause()
    client.hset(keys.run, mapping={"broken": broken, f"draining {name}": f"1 {HOSTILE}"})
    client.hset(keys.failures, HOSTILE, "3")
    client.set(keys.status(name), json.dumps(dict.fromkeys(("name", "host", "state", "agent"), HOSTILE)))
    texts: dict[Any, Any] = dict.fromkeys(
        ("node", "reason", "message", "signal", "stacks", "path", "lines", "address"), HOSTILE
    )
    for kind in ("hung", "left", "log", "unreached", HOSTILE):
        client.xadd(keys.events, {**texts, "event": kind, "epoch": "1"})
    client.set(f"redelastic:{{{HOSTILE}}}:run", "x")
    page = tmp_path / "page.html"
    asked = [
        f"{line} --endpoint {server.url}".split()
        for line in (
            f"status {run_id} --workers --all",
            f"status {run_id} --json",
            f"events {run_id} --detail",
            f"events {run_id} --json",
            f"timeline {run_id} --out {page}",
            f"timeline {run_id} --json",
            f"drain {run_id} nobody",
            f"readmit {run_id} nobody",
            "list",
            "list --json",
            f"close {run_id}",
            f"status {run_id}",
        )
    ]
    said = [done.out + done.err for done in (run_command(*argv) for argv in asked)]
    client.delete(f"redelastic:{{{HOSTILE}}}:run")
    for argv, out in zip(asked, said, strict=True):
        obeyed = {sign for sign in out.replace("\n", "") if sign in "\x1b\x07\r\u202e" or sign < " "}
        assert not obeyed, (argv[0], obeyed)
        assert "Traceback" not in out
    assert "\\x1b[2J" in said[0]
    assert "[red]" in said[0]
    assert page.read_text().count("<script") == 2, "the page's own"
    assert "\x1b" not in page.read_text()


@pytest.mark.fault("a status of 10 MB, a reason of 10 MB", "people see what is ours, and a beginning of the rest")
def test_what_is_far_too_long_is_cut(
    server: RedisServer, client: redis.Redis, new_node: NodeFactory, keys: RunKeys, run_id: str
) -> None:
    node = new_node(1, 1, keep_alive_interval=20)
    node.next_rendezvous()
    huge = "x" * 10_000_000
    client.set(keys.status(node.node.id), json.dumps({"name": huge, "workers": [huge]}))
    client.hset(keys.run, "broken", Left(reason=huge).as_cause())
    client.xadd(keys.events, {"event": "hung", "node": huge, "message": huge, "stacks": huge})
    client.xadd(keys.events, {"event": huge})
    for name in ("status", "events"):
        done = run_command(name, run_id, "--endpoint", server.url)
        assert done.code == 0
        assert len(done.out) < 200_000
    control = RunControl(Connection.open(server.url), keys)
    control.drain(node.node.id, huge, 1)
    assert len(client.hget(keys.run, f"draining {node.node.id}") or b"") < MAX_REASON + 20
    assert run_command("close", run_id, "--reason", "y" * 3000, "--endpoint", server.url).out.endswith("may finish.\n")
    record: Any = client.hget(keys.run, "closed")
    assert len(record) < MAX_REASON + 100
    closed = decode_cause(record.decode())
    assert isinstance(closed, Closed)
    assert len(closed.reason) == MAX_REASON


# -- pickle


class Payload:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.fault("a pickle planted in the run's state", "protocol=native never runs it")
def test_a_planted_pickle(server: RedisServer, client: redis.Redis, keys: RunKeys, run_id: str, tmp_path: Path) -> None:
    """torch's own state machine unpickles it: whoever writes there runs code on every node. Ours does not."""
    ran = tmp_path / "ran"
    blob = pickle.dumps(Payload(ran))

    def start(protocol: str) -> None:
        params = RendezvousParameters(
            "redis", server.url, run_id, 1, 1, protocol=protocol, join_timeout=2, last_call_timeout=1
        )
        backend, store = create_backend(params)
        handler = create_handler(backend, params)
        try:
            handler.next_rendezvous()
        finally:
            handler.shutdown()
            store.close()

    client.hset(keys.state, mapping={"state": blob, "token": "1"})
    start("native")
    assert client.hget(keys.state, "state") == blob
    client.delete(*keys.types)
    client.hset(keys.run, mapping={"epoch": blob, "master": blob, "closed": blob})
    with pytest.raises(RendezvousStateError, match="field epoch is not a number"):
        start("native")
    store = RedisStore(server.url, run_id)
    store.set("k", blob)
    assert store.get("k") == blob
    store.close()
    assert not ran.exists()

    client.delete(*keys.types)
    with pytest.raises(Exception):  # noqa: B017, PT011  (torch finds that it is no state, too late)
        start("dynamic")
    assert ran.is_dir()


UNSAFE: Final = frozenset(
    {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "yaml", "jsonpickle", "joblib"}
)
RUNS: Final = frozenset({"eval", "exec", "compile", "__import__", "os.system", "os.popen"})


def unsafe_parts(tree: ast.AST) -> Iterator[str]:
    for part in ast.walk(tree):
        if isinstance(part, ast.Import):
            yield from (alias.name for alias in part.names if alias.name.split(".")[0] in UNSAFE)
        elif isinstance(part, ast.ImportFrom) and (part.module or "").split(".")[0] in UNSAFE:
            yield str(part.module)
        elif isinstance(part, ast.Call):
            called = ast.unparse(part.func)
            if called in RUNS:
                yield called
            arguments = {word.arg: ast.unparse(word.value) for word in part.keywords}
            if called.endswith("torch.load") and arguments.get("weights_only") != "True":
                yield called
            if arguments.get("shell") == "True" or called.endswith(("object_list", "gather_object")):
                yield called


def test_nothing_of_ours_unpickles_or_runs_what_it_reads() -> None:
    files = {str(file.relative_to(PACKAGE)): ast.parse(file.read_text()) for file in PACKAGE.rglob("*.py")}
    found = {(file, what) for file, tree in files.items() for what in unsafe_parts(tree)}
    assert found == {
        # workers of one job, among themselves
        ("integrations/transformers.py", "dist.broadcast_object_list"),
        *(("survival/state.py", f"dist.{what}") for what in ("broadcast_object_list", "all_gather_object")),
        ("workers/site/sitecustomize.py", "marshal"),  # an agent and its child, over a socket pair
    }


# -- secrets


@pytest.mark.usefixtures("short_timeout")
def test_no_command_tells_the_password(server: RedisServer, run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither where it is right, nor where it is not, nor where the rest of the URL is not."""
    with server.get_client() as admin:
        user = as_user_of(server, run_id)
        admin.execute_command("ACL SETUSER", f"{run_id}-off", "reset", "off", f">{CANARY}")
    place = f"{run_id}:{CANARY}@{server.endpoint}"
    urls = [user.url, user.url.replace(run_id, f"{run_id}-off"), f"redis://{run_id}:{CANARY}@127.0.0.1:1"]
    urls += [f"redis://{place}/x", f"http://{place}", place, f"redis+sentinel://{place}", f"redis+cluster://{place}"]
    urls += [f"rediss://{place}", f"unix://u:{CANARY}@/nowhere.sock", f"redis://{place}?no={CANARY}"]
    commands = [
        ("status", run_id),
        ("events", run_id),
        ("timeline", run_id, "--json"),
        ("list",),
        ("drain", run_id, "x"),
    ]
    commands += [("close", run_id), ("readmit", run_id, "x")]
    for url in urls:
        monkeypatch.setenv("REDELASTIC_REDIS_URL", url)
        for argv in commands if url == user.url else commands[:1]:
            for more in ((), ("--endpoint", url)):
                done = run_command(*argv, *more)
                assert done.code, (argv, url)
                assert CANARY not in done.out + done.err, (argv, url)
                assert "Traceback" not in done.err
    monkeypatch.setenv("REDELASTIC_REDIS_URL", urls[1])
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGINT")  # as it was, afterwards
    done = run_command("run", "--rdzv-id=x", "--nnodes=1", __file__)
    assert done.code == 3
    assert CANARY not in done.out + done.err


def test_objects_do_not_show_the_password(server: RedisServer, run_id: str) -> None:
    url = as_user_of(server, run_id).url
    params = RendezvousParameters("redis", url, run_id, 1, 1)
    backend, store = create_backend(params)
    handler = create_handler(backend, params)
    shown = [repr(thing) for thing in (backend, store, handler, backend.connection, parse_endpoint(url), server)]
    store.close()
    handler.shutdown()
    assert CANARY not in "".join(shown)
    assert server.pid is not None
    assert server.password not in command_line(psutil.Process(server.pid))
    assert server.password not in "".join(shown)
