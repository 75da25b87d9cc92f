"""`redelastic status`: the truth about real runs."""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from redelastic.monitoring.control import RunControl
from redelastic.monitoring.events import Ending, Failed, Left, Progressed, Stopped
from redelastic.monitoring.report import describe
from redelastic.redis.connection import Connection
from redelastic.redis.keys import RunKeys
from redelastic.redis.server import RedisServer
from redelastic.rendezvous.handler import RedisRendezvousHandler
from redelastic.rendezvous.node import News
from tests.support.commands import Cli, CommandResult, run_command, running_command, until
from tests.support.nodes import NodeFactory
from tests.support.rounds import join_all
from tests.support.status_screens import node_of, run_of, shown, workers

GIB = 2**30


@pytest.fixture
def cli(server: RedisServer) -> Cli:
    def run(*argv: str) -> CommandResult:
        return run_command("status", *argv, "--endpoint", server.url)

    return run


def tell(node: RedisRendezvousHandler, **status: Any) -> RedisRendezvousHandler:
    """Have a node say more of itself, as our agent does."""
    node.node.describe = lambda base: json.dumps(base | {"agent": "redelastic"} | status)
    return node


class TestPhases:
    def test_running(self, cli: Cli, new_node: NodeFactory, pool: ThreadPoolExecutor, run_id: str) -> None:
        slow = {"keep_alive_interval": 2}  # if the machine stands still for a moment, no event follows the round's
        nodes = [tell(new_node(2, 2, node_name=f"host-{i}", **slow), restarts=i) for i in range(2)]
        join_all(pool, *nodes)
        done = cli(run_id, "--json")
        assert done.code == 0
        report = done.json
        assert re.fullmatch(r"running: round 1, 2 nodes, up \d.*", report["verdict"])
        assert [report[k] for k in ("phase", "epoch", "size", "waits_for", "problems")] == ["running", 1, 2, "", []]
        assert [node["rank"] for node in report["nodes"]] == [0, 1]
        assert {node["name"]: node["restarts"] for node in report["nodes"]} == {"host-0": 0, "host-1": 1}
        assert {node["state"] for node in report["nodes"]} == {"running"}
        assert all(0 <= node["heard"] <= node["lease"] + node["heard"] <= 6.01 for node in report["nodes"])
        assert report["events"][-1]["event"] == "completed"
        lines = cli(run_id).out.splitlines()
        assert lines[0].startswith("running: round 1, 2 nodes, up ")
        assert lines[1].startswith(f"run {run_id} · epoch 1 · 2 members of 2")
        assert lines[-1].endswith("max_nodes joined")

    def test_forming(self, cli: Cli, new_node: NodeFactory, pool: ThreadPoolExecutor, run_id: str) -> None:
        joining = pool.submit(new_node(2, 2).next_rendezvous)
        until(lambda: cli(run_id, "--json").code == 0, "it has joined")
        done = cli(run_id)
        assert done.code == 0
        assert done.out.splitlines()[0] == "forming round 1"
        assert "not complete: 1 of at least 2 nodes have joined." in done.out
        assert "waiting" in done.out
        join_all(pool, new_node(2, 2))
        joining.result(60)

    def test_regrouping(self, cli: Cli, new_node: NodeFactory, pool: ThreadPoolExecutor, run_id: str) -> None:
        first, late = new_node(1, 2, last_call_timeout=0.1), new_node(1, 2)
        first.next_rendezvous()
        joining = pool.submit(late.next_rendezvous)
        until(first.num_nodes_waiting, "its round is broken")
        done = cli(run_id)
        assert done.code == 0
        assert re.match(r"regrouping: round 1 is broken: \S+ waits to join\n", done.out)
        assert "not complete: 1 of 1 members still hold round 1" in done.out
        join_all(pool, first)
        joining.result(60)

    def test_spares_are_distinguished_from_candidates(
        self, cli: Cli, new_node: NodeFactory, pool: ThreadPoolExecutor, run_id: str
    ) -> None:
        new_node(1, 1).next_rendezvous()
        spare = new_node(1, 1)
        joining = pool.submit(spare.next_rendezvous)
        until(lambda: "1 spare" in cli(run_id).out, "a spare is shown")
        assert [node["state"] for node in cli(run_id, "--json").json["nodes"]] == ["running", "spare"]
        spare.set_closed()
        assert joining.exception(20)

    def test_closed(self, cli: Cli, new_node: NodeFactory, run_id: str) -> None:
        node = new_node(1, 1)
        node.next_rendezvous()
        node.set_closed()
        done = cli(run_id)
        assert done.code == 0
        assert done.out.startswith("closed: by ")
        assert done.out.splitlines()[0].endswith("; 1 node is still there")

    def test_stopped(self, cli: Cli, new_node: NodeFactory, connection: Connection, keys: RunKeys) -> None:
        new_node(1, 1).next_rendezvous()
        RunControl(connection, keys).close("by hand", stop=True, ttl=60)
        done = cli(keys.run_id, "--json")
        assert (done.code, done.json["phase"]) == (1, "stopped")
        assert done.json["verdict"].startswith("stopped: by hand")

    @pytest.mark.parametrize(("cause", "red"), [("asked", False), ("failed", True), ("restarts", True)])
    def test_only_a_run_that_a_fault_ended_is_red(self, cause: Ending, red: bool) -> None:
        closed = Stopped(cause=cause, node="a", reason="by ops")
        out = shown(run_of(closed=closed, stopped=True), closed, force_terminal=True, color_system="standard")
        assert ("\x1b[1;31mstopped: " in out) == red
        assert ("\x1b[31mstopped\x1b[0m" in out) == red
        assert "\x1b[31m" in out or not red

    def test_a_restart_counts_once_it_is_made(self, cli: Cli, new_node: NodeFactory, run_id: str) -> None:
        node = new_node(1, 1)
        for restarts in (0, 1):
            node.next_rendezvous()
            assert cli(run_id, "--json").json["restarts"] == restarts
            node.node.charge(time.monotonic(), 7, News.STEP, Failed(local_rank=0), (-1, -1, -1), final=True)
            assert cli(run_id, "--json").json["restarts"] == restarts

    def test_empty(self, cli: Cli, new_node: NodeFactory, run_id: str) -> None:
        node = new_node(1, 1)
        node.next_rendezvous()
        node.end(Left(cause="exited"), "goes on")
        done = cli(run_id)
        assert done.code == 1
        assert done.out.startswith("empty: no nodes in the run; its last round was 1")

    def test_dead(self, cli: Cli, server: RedisServer, new_node: NodeFactory, run_id: str) -> None:
        """The last node of a run leaves nobody who could notice: only the clock tells."""

        def is_listed_as_failed() -> bool:
            runs = run_command("list", "--json", "--endpoint", server.url).json["runs"]
            return any(run["failed"] for run in runs if run["run"] == run_id)

        def logs(*options: str) -> CommandResult:
            return run_command("logs", run_id, "--failed", *options, "--endpoint", server.url)

        node = new_node(1, 1, keep_alive_interval=0.5)
        node.next_rendezvous()
        assert cli(run_id).code == 0
        assert logs().code == 1
        assert not is_listed_as_failed()
        node.node.stop()
        until(lambda: cli(run_id).code == 1, "its lease is over")
        assert is_listed_as_failed()
        why = logs()
        assert (why.code, why.out.splitlines()[1:]) == (0, ["  cause  not known: all nodes fell silent"])
        assert why.out.startswith("round 1 failed at ")
        assert "  cause  not known: all nodes fell silent\n" in cli(run_id).out
        failure = cli(run_id, "--json").json["failure"]
        assert failure == logs("--json").json["failure"]
        assert (failure["epoch"], failure["cause"], failure["node"]) == (1, None, None)
        assert abs(failure["time"] - time.time()) < 60
        done = cli(run_id)
        assert done.out.startswith("dead: no heartbeat for ")
        assert "! " in done.out
        assert "its lease has expired, and no other node has noticed yet" in done.out


class TestLastStep:
    EVENTS = (Progressed(node="a", step=30), Left(node="a", last_step=37), Failed(node="b", step=41))

    @pytest.mark.parametrize(
        ("steps", "progress", "last"), [((), 0, 41), ((), 61, 60), ((45, 38), 0, 45), ((45, 38), 61, 60)]
    )
    @pytest.mark.parametrize("closed", [None, Stopped(cause="asked")], ids=["dead", "stopped"])
    def test_of_a_run_that_has_ended_it_is_the_highest_known(
        self, steps: tuple[int, ...], progress: int, last: int, closed: Stopped | None
    ) -> None:
        """The statuses of nodes that fell silent may have expired."""
        nodes = [node_of(i, silence=9, workers=workers(step)) for i, step in enumerate(steps)] or [
            node_of(0, silence=9)
        ]
        for there in (nodes, []):
            run = run_of(*there, closed=closed, progress=progress)
            expected = last if there else max(41, progress - 1)
            assert describe(run, self.EVENTS, 1.7e9)["step"] == expected

    def test_of_a_running_one_it_is_that_of_its_workers(self) -> None:
        assert describe(run_of(node_of(0, workers=workers(12))), self.EVENTS, 1.7e9)["step"] == 12
        assert describe(run_of(node_of(0)), self.EVENTS, 1.7e9)["step"] is None, "they have made none yet"
        assert describe(run_of(), (), 1.7e9)["step"] is None


class TestProblems:
    def test_what_is_wrong_comes_first(
        self, cli: Cli, new_node: NodeFactory, pool: ThreadPoolExecutor, run_id: str
    ) -> None:
        gpus = [
            {"index": 0, "utilization": 98, "memory_used": 70 * GIB, "memory_total": 80 * GIB, "temperature": 66},
            {"index": 1, "utilization": 0, "temperature": 71, "ecc": 0, "xid": 2, "xids": {"31": 5, "79": 2}},
            {"index": 2, "lost": True},
        ]
        hung = [*workers(400, 400), {"local_rank": 2, "rank": 10, "state": "hung", "step": 388, "idle": 312.4}]
        tell(
            slow := new_node(2, 2, node_name="slow", topology="a"), workers=hung, gpus=gpus, cpu=780.4, memory=31 * GIB
        )
        tell(fast := new_node(2, 2, node_name="fast", topology="b"), workers=workers(400, 412))
        join_all(pool, slow, fast)
        done = cli(run_id)
        assert done.code == 0  # it runs
        lines = done.out.splitlines()
        assert lines[0].endswith("step 412, last progress 0.5 s ago")
        assert [line for line in lines if line.startswith("!")] == [
            "! slow (rank 0) worker 2 (rank 10) hangs at step 388 for 5 min",
            "! slow (rank 0) GPU 1 has 2 Xid errors (79)",
            "! slow (rank 0) GPU 2 has fallen off the bus",
        ]
        [row] = [line for line in lines if line.split()[:2] == ["0", "slow"]]
        assert " ".join(row.split()).endswith(" 388 5 min 780% 31.0G 3: 0-98% 70.0G/80.0G 71°C !")
        assert " running " in row
        assert "  2: rank 10" in cli(run_id, "--workers").out

    @pytest.mark.parametrize(("own", "slow"), [(0.31, True), (0.25, False), (0.0, False), (None, False)])
    def test_a_worker_that_the_others_wait_for_is_named(self, own: float | None, slow: bool) -> None:
        times = [own, 0.2, 0.21, 0.19]
        nodes = [
            node_of(i, workers=[{"local_rank": 0, "rank": i, "step_time": 0.4, "own_time": time}])
            for i, time in enumerate(times)
        ]
        line = "worker 0 (rank 0) is slow: of each step it spends 310 ms outside collectives; the median is 200 ms"
        out = shown(run_of(*nodes), width=140)
        assert ("is slow" in out) == slow
        assert (line in out) == slow

    def test_a_small_difference_of_a_long_step_makes_nobody_slow(self) -> None:
        nodes = [
            node_of(i, workers=[{"rank": i, "step_time": 1, "own_time": own}]) for i, own in enumerate([0.1, 0.05])
        ]
        assert "is slow" not in shown(run_of(*nodes))

    def test_a_drain_and_a_host_that_is_kept_out(
        self, cli: Cli, new_node: NodeFactory, connection: Connection, keys: RunKeys
    ) -> None:
        node = tell(new_node(1, 1, node_name="host-1"))
        node.next_rendezvous()
        node.node.charge(time.monotonic(), 7, News.STEP, Failed(local_rank=0), (-1, -1, 1), final=True)
        RunControl(connection, keys).drain(node.node.id, "by spot", 10)
        out = cli(keys.run_id).out
        assert "! host host-1 is excluded" in out
        assert f"`redelastic readmit {keys.run_id} host-1` readmits it" in out
        assert "- host-1 is draining, by spot" in out
        assert "draining" in out

    def test_gpus_that_cannot_be_shown_are_mentioned(self, cli: Cli, new_node: NodeFactory, run_id: str) -> None:
        tell(new_node(1, 1), gpus_hidden="redelastic[gpu] is not installed").next_rendezvous()
        assert "GPUs of 1 node are not shown: redelastic[gpu] is not installed" in cli(run_id).out
        [node] = cli(run_id, "--json").json["nodes"]
        assert node["gpus_hidden"] == "redelastic[gpu] is not installed"

    def test_effective_training_time(
        self, cli: Cli, new_node: NodeFactory, connection: Connection, keys: RunKeys
    ) -> None:
        node = new_node(1, 1)
        node.next_rendezvous()
        assert cli(keys.run_id, "--json").json["ettr"] is None
        assert "effective training time not known: no worker has called redelastic.progress()" in cli(keys.run_id).out
        RunControl(connection, keys).note(Progressed(node=node.node.id, step=1, last_step=5))
        until(lambda: cli(keys.run_id, "--json").json["redone"], "steps are made again")
        RunControl(connection, keys).note(Progressed(node=node.node.id, step=6, last_step=5))
        until(lambda: 0 < (cli(keys.run_id, "--json").json["ettr"] or 0) <= 1, "new steps are made")
        assert re.search(r"effective training time [0-9.]+% \([0-9.]+% redone\)", cli(keys.run_id).out)

    def test_events_of_a_regroup_hide_no_loss(
        self, cli: Cli, new_node: NodeFactory, pool: ThreadPoolExecutor, run_id: str
    ) -> None:
        nodes = [new_node(1, 8, last_call_timeout=60) for i in range(8)]
        join_all(pool, *nodes)
        nodes.pop().node.stop()
        until(nodes[0].num_nodes_waiting, "the loss is known")
        join_all(pool, *nodes)
        kinds = [event["event"] for event in cli(run_id, "--json").json["events"]]
        told = [kind for kind in kinds if kind != "outage"]  # of a machine that stands still
        assert told[-3:] == ["completed", "lost", "completed"]


# -- whatever somebody wrote


# -- widths and sizes


# -- watching


class TestWatch:
    def test_nodes_come_and_go(
        self, server: RedisServer, new_node: NodeFactory, pool: ThreadPoolExecutor, run_id: str
    ) -> None:
        nodes = [new_node(1, 2, last_call_timeout=60) for _ in range(2)]
        join_all(pool, *nodes)
        with running_command("status", run_id, "--watch", "--endpoint", server.url, columns=80) as watching:
            watching.until("running: round 1, 2 nodes, up ")
            nodes.pop().node.stop()
            until(nodes[0].num_nodes_waiting, "the loss is known")
            watching.until("lost its lease after")
            join_all(pool, *nodes)
            watching.until("running: round 2, 1 node, up ")
            before = len(watching.out)
            assert watching.interrupt() == 0
        assert "running: round 2, 1 node, up " in watching.out[before:]  # the last picture stays
        assert watching.err == ""

    def test_redis_is_away(self, own_server: RedisServer, new_node: NodeFactory, run_id: str) -> None:
        new_node(1, 1, url=own_server.url).next_rendezvous()
        with running_command("status", run_id, "--watch", "--endpoint", own_server.url, columns=80) as watching:
            watching.until("running: round 1")
            own_server.kill()
            watching.until("Out of date")
            before = len(watching.out)
            own_server.start()  # without its data
            watching.until("running: round 1", after=before)  # the node has put it back
            watching.until("restored", after=before)
            RunControl(connection := Connection.open(own_server.url), RunKeys(run_id)).close(
                "by hand", stop=False, ttl=60
            )
            connection.close()
            watching.until("closed: by hand")
            assert watching.interrupt() == 0

    def test_as_json(self, server: RedisServer, new_node: NodeFactory, run_id: str) -> None:
        node = new_node(1, 1)
        node.next_rendezvous()
        with running_command("status", run_id, "--watch", "--json", "--endpoint", server.url) as watching:
            watching.until('"phase": "running"')
            node.set_closed()
            watching.until('"phase": "closed"')
            assert watching.interrupt() == 0
        documents = [json.loads(line) for line in watching.out.splitlines()]
        assert {document["trouble"] for document in documents} == {""}
        assert [documents[0]["phase"], documents[-1]["phase"]] == ["running", "closed"]
