"""The commands that look after a run, on real nodes and a real Redis: all but `status` and `drain`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time

import pytest
import redis

import redelastic
from redelastic.monitoring.control import RunControl
from redelastic.monitoring.events import Event, Failed, Hung, Readmitted, Refused
from redelastic.redis.connection import Connection
from redelastic.redis.keys import RunKeys
from redelastic.redis.server import RedisServer
from redelastic.rendezvous.node import News
from tests.support.commands import Cli, run_command, running_command, until
from tests.support.nodes import NodeFactory

pytest_plugins = ["tests.support.cli_fixtures"]

HOSTILE = "\x1b[2J\x9b[red]bold[/red]\r\n\u202e\u2066"  # clears screens, reverses text, is markup


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (("statsu", "RUN"), "redelastic: unknown command 'statsu'; did you mean status? (see redelastic --help)"),
        (("xyz",), "redelastic: unknown command 'xyz'; commands: run, status, events"),
        (("run", "--hang-timout=5", "t.py"), "unrecognized arguments: --hang-timout=5; did you mean --hang-timeout?"),
        (("run",), "redelastic run: the following arguments are required: training_script"),
        (("run", "--max-restarts=x", "t.py"), "redelastic run: argument --max-restarts/--max_restarts: invalid int"),
        (("status", "--watch=often", "RUN"), "redelastic status: argument"),
        (("events", "r", "-n", "0"), "redelastic events: argument"),
        (("events", "r", "-n", "x"), "redelastic events: argument"),
        (("drain", "r", "0", "--timeout", "-1"), "redelastic drain: argument"),
    ],
)
def test_wrong_arguments_are_one_line_that_says_what_was_meant(argv: tuple[str, ...], expected: str) -> None:
    done = run_command(*argv)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert expected in done.err


def test_the_package_is_the_command() -> None:
    asked = [sys.executable, "-m", "redelastic", "--version"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"redelastic {redelastic.__version__}\n"
    done = subprocess.run([*asked[:3], "no-such-command"], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


class TestErrors:
    """Each is one line on stderr, and an exit code of its own."""

    COMMANDS = (
        ("status", "RUN"),
        ("events", "RUN"),
        ("drain", "RUN", "0"),
        ("close", "RUN"),
        ("readmit", "RUN", "host"),
    )

    @pytest.mark.parametrize("argv", COMMANDS, ids=lambda argv: argv[0])
    def test_a_bad_run_id(self, argv: tuple[str, ...]) -> None:
        name, _, *rest = argv
        done = run_command(name, "my job", *rest, "--endpoint", "nowhere.invalid")  # nobody is asked
        assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
        assert done.err.startswith(f"redelastic {name}: The run id 'my job' contains ' '")

    @pytest.mark.parametrize("argv", COMMANDS, ids=lambda argv: argv[0])
    def test_an_unknown_run(self, cli: Cli, client: redis.Redis, run_id: str, argv: tuple[str, ...]) -> None:
        name, _, *rest = argv
        done = cli(name, run_id, *rest)
        assert (done.code, done.out, done.err.count("\n")) == (4, "", 1)
        assert f"has no run '{run_id}'" in done.err
        assert list(client.scan_iter(f"*{run_id}*")) == []  # and none was made

    @pytest.mark.parametrize("argv", [*COMMANDS, ("list",)], ids=lambda argv: argv[0])
    def test_a_wrong_password(self, server: RedisServer, argv: tuple[str, ...]) -> None:
        host = server.url.rpartition("@")[2]
        done = run_command(*argv, "--endpoint", f"redis://:sesame@{host}")
        assert (done.code, done.out, done.err.count("\n")) == (3, "", 1)
        assert "refused the login" in done.err
        assert "sesame" not in done.err

    @pytest.mark.usefixtures("short_timeout")
    @pytest.mark.parametrize("argv", [*COMMANDS, ("list",)], ids=lambda argv: argv[0])
    def test_an_unreachable_server(self, argv: tuple[str, ...]) -> None:
        done = run_command(*argv, "--endpoint", "127.0.0.1:1")
        assert (done.code, done.out, done.err.count("\n")) == (3, "", 1)
        assert "127.0.0.1:1 could not be reached" in done.err
        assert "default" not in done.err

    @pytest.mark.usefixtures("short_timeout")
    def test_an_unreachable_server_that_nobody_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("redelastic.redis.endpoint.DEFAULT_PORT", 1)
        monkeypatch.delenv("REDELASTIC_REDIS_URL", raising=False)
        done = run_command("status", "RUN")
        assert (done.code, done.err.count("\n")) == (3, 1)
        default = r"redis://localhost:1 \(the default, .*REDELASTIC_REDIS_URL was given\) could not be reached"
        assert re.search(default, done.err)

    def test_no_command(self) -> None:
        done = run_command()
        assert (done.code, done.out) == (2, "")
        assert all(name in done.err for name in ("run", "status", "timeline", "demo"))

    def test_the_url_may_come_from_the_environment(
        self, server: RedisServer, run_id: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("REDELASTIC_REDIS_URL", server.url)
        assert run_command("status", run_id).code == 4


def test_help_needs_no_heavy_imports() -> None:
    code = "import sys, redelastic.cli; print([n for n in ('torch', 'rich', 'redis', 'shtab') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"


class TestList:
    def test_runs_of_the_prefix(self, cli: Cli, new_node: NodeFactory, run_id: str) -> None:
        prefix = f"p-{run_id}"
        assert "has no run with the key prefix" in cli("list", "--key-prefix", prefix).out
        assert cli("list", "--key-prefix", prefix, "--json").json == {"version": 1, "runs": []}
        for name in ("a", "b"):
            new_node(1, 1, run_id=name, key_prefix=prefix).next_rendezvous()
        command_line = ("list", "--key-prefix", prefix)
        runs = cli(*command_line, "--json").json["runs"]
        assert [(r["run"], r["phase"], r["epoch"], r["members"], r["spares"]) for r in runs] == [
            ("a", "running", 1, 1, 0),
            ("b", "running", 1, 1, 0),
        ]
        lines = cli(*command_line).out.splitlines()
        assert [line.split()[:2] for line in lines] == [["run", "phase"], ["a", "running"], ["b", "running"]]

    def test_a_corrupt_run_hides_no_other(
        self, cli: Cli, new_node: NodeFactory, client: redis.Redis, run_id: str
    ) -> None:
        prefix = f"p-{run_id}"
        new_node(1, 1, run_id="good", key_prefix=prefix).next_rendezvous()
        client.set(RunKeys("bad", prefix).run, "theirs")
        client.hset(f"{prefix}:{{not ours\x1b}}:run", "epoch", 1)
        done = cli("list", "--key-prefix", prefix, "--json")
        assert {r["run"]: r["phase"] for r in done.json["runs"]} == {"bad": "corrupt", "good": "running"}
        assert cli("list", "--key-prefix", prefix).out.count("\n") == 3


class TestEvents:
    def test_what_happened(self, cli: Cli, new_node: NodeFactory, run_id: str) -> None:
        node = new_node(1, 1, keep_alive_interval=10)  # a busy machine's pauses would be outages
        node.next_rendezvous()
        done = cli("events", run_id, "--json")
        assert done.code == 0
        events = done.json["events"]
        assert [(e["event"], e["epoch"], e["node"]) for e in events] == [
            ("joined", 0, node.node.id),
            ("completed", 1, node.node.id),
        ]
        assert 1.7e9 < events[0]["time"] <= events[1]["time"]
        lines = cli("events", run_id).out.splitlines()
        assert len(lines) == 2
        assert lines[1].split()[2:4] == ["completed", "1"]
        assert lines[1].endswith("max_nodes joined")

    def test_the_last_ones(self, cli: Cli, new_node: NodeFactory, control: RunControl, run_id: str) -> None:
        new_node(1, 1).next_rendezvous()
        for i in range(5):
            control.note(Refused(reason=f"number {i}"))
        done = cli("events", run_id, "-n", "2")
        assert [line.split()[-1] for line in done.out.splitlines()] == ["3", "4"]
        assert "older events" in done.err
        assert cli("events", run_id, "-n", "7").err == ""

    def test_detail(self, cli: Cli, new_node: NodeFactory, control: RunControl, run_id: str) -> None:
        new_node(1, 1).next_rendezvous()
        control.note(Hung(stacks="Thread 1:\n\tin train\x1b[2J\n" + 900 * "x"))
        assert "Thread" not in cli("events", run_id).out
        lines = cli("events", run_id, "--detail").out.splitlines()
        assert lines[-3:] == ["    Thread 1:", "            in train\\x1b[2J", "    " + 900 * "x"]

    def test_nothing_gets_to_the_terminal(
        self, cli: Cli, new_node: NodeFactory, control: RunControl, run_id: str
    ) -> None:
        new_node(1, 1).next_rendezvous()
        control.note(Event(event=HOSTILE, node=HOSTILE))
        control.note(Hung(node=HOSTILE, message=HOSTILE, stacks=HOSTILE))
        for argv in (["--detail"], [], ["--json"]):
            out = cli("events", run_id, *argv).out
            assert all(sign.isprintable() or sign == "\n" for sign in out)
        assert "[red]bold[/red]" in out  # nor is it taken for markup

    def test_follow(self, server: RedisServer, new_node: NodeFactory, control: RunControl, run_id: str) -> None:
        new_node(1, 1).next_rendezvous()
        with running_command("events", run_id, "--follow", "--json", "--endpoint", server.url) as following:
            following.until("max_nodes joined")
            control.note(Refused(reason="GPU 3 is gone"))
            following.until("GPU 3 is gone")
            assert following.interrupt() == 0
        assert [json.loads(line)["event"] for line in following.out.splitlines()] == ["joined", "completed", "refused"]

    def test_follow_through_an_outage(self, own_server: RedisServer, new_node: NodeFactory, run_id: str) -> None:
        new_node(1, 1, url=own_server.url).next_rendezvous()
        with running_command("events", run_id, "--follow", "--endpoint", own_server.url, columns=80) as following:
            following.until("max_nodes joined")
            own_server.kill()
            following.until("could not be reached", err=True)
            own_server.start()
            following.until("Redis is back", err=True)
            with Connection.open(own_server.url).client as client:
                client.xadd(RunKeys(run_id).events, {"event": "refused", "reason": "after the outage"})
            following.until("after the outage")
            assert following.interrupt() == 0
        assert following.err.count("could not be reached") == 1


class TestClose:
    def test_closed_once(self, cli: Cli, new_node: NodeFactory, run_id: str) -> None:
        node = new_node(1, 1)
        node.next_rendezvous()
        done = cli("close", run_id, "--reason", "enough", "--json")
        assert (done.code, done.json["before"], done.json["stopped"]) == (0, False, False)
        assert done.json["closed"]["reason"].endswith(": enough")
        until(lambda: node.node.view.closed, "the node hears of it")
        assert not node.node.view.is_stopped
        again = cli("close", run_id, "--reason", "enough", "--json")  # in the same words
        assert (again.code, again.json["before"]) == (0, True)

    def test_stop(self, cli: Cli, new_node: NodeFactory, run_id: str) -> None:
        node = new_node(1, 1)
        node.next_rendezvous()
        done = cli("close", run_id, "--stop", "--timeout=0")
        assert (done.code, done.out) == (0, f"Run {run_id!r} is closed: its nodes end their workers.\n")
        until(lambda: node.node.view.is_stopped, "the node hears of it")
        assert "was already closed (by" in cli("close", run_id, "--stop").out

    def test_stop_after_close(self, cli: Cli, new_node: NodeFactory, run_id: str) -> None:
        node = new_node(1, 1)
        node.next_rendezvous()
        cli("close", run_id, "--reason", "enough")
        done = cli("close", run_id, "--stop", "--json")
        assert (done.code, done.json["before"], done.json["stopped"]) == (0, True, True)
        assert done.json["closed"]["reason"].endswith(": enough")
        until(lambda: node.node.view.is_stopped, "the node hears of it")
        assert cli("close", run_id, "--json").json["stopped"]


class TestReadmit:
    def test_a_host_that_is_kept_out(
        self, cli: Cli, new_node: NodeFactory, keys: RunKeys, connection: Connection
    ) -> None:
        control, run_id = RunControl(connection, keys), keys.run_id
        node = new_node(1, 1, node_name="host-1")
        node.next_rendezvous()
        node.node.charge(time.monotonic(), 7, News.STEP, Failed(local_rank=0), (-1, -1, 1), final=True)
        assert control.state().barred == ["host-1"]
        woken: list[str] = []
        blocked = threading.Thread(target=lambda: woken.extend(_wake_ups(connection, keys)))
        blocked.start()
        done = cli("readmit", run_id, "host-1", "--reason", "new cable", "--json")
        assert (done.code, done.json["failures"], done.json["barred"]) == (0, 1, True)
        assert control.state().failures == {}
        last = control.events(count=1)[0]
        assert isinstance(last, Readmitted)
        assert last.node == "host-1"
        assert last.reason.endswith(": new cable")
        blocked.join(60)
        assert woken == ["readmit"]
        assert 0 < connection.client.pttl(keys.wake) <= node.settings.ttl * 1000
        again = cli("readmit", run_id, "host-1")
        assert (again.code, again.err.count("\n")) == (4, 1)
        assert control.events(count=1)[0].id == last.id

    def test_others_are_named(self, cli: Cli, new_node: NodeFactory, run_id: str) -> None:
        node = new_node(1, 1, node_name="host-1")
        node.next_rendezvous()
        node.node.charge(time.monotonic(), 7, News.STEP, Failed(local_rank=0), (-1, -1, 9), final=True)
        assert "hosts with failures: host-1 (1)" in cli("readmit", run_id, "host-2").err
        assert "was not excluded" in cli("readmit", run_id, "host-1").out


def _wake_ups(connection: Connection, keys: RunKeys) -> list[str]:
    """The next change that this run's nodes are woken for, and that is no round of theirs."""
    last, key = "0-0", keys.wake.encode()
    while True:
        for i, change in connection.read({key: last}, 1).get(key, []):
            last = i
            if change["event"] not in {"complete", "broken", "deadline"}:
                return [change["event"]]
