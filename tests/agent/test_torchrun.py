"""Real torchrun over the plugin: data-parallel scripts, and every way in which a node can leave or join.

Each test prints how long recovery from a fault took (`pytest -s`); none asserts it.
"""

from __future__ import annotations

import re
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from redelastic.monitoring.events import Left, Lost, decode_cause
from redelastic.redis.server import RedisServer
from tests.support.liveness import lives
from tests.support.long_tests import quick_rows
from tests.support.nodes import NodeFactory
from tests.support.torchrun_job import LONG_LEASES, Job

pytestmark = pytest.mark.timeout(400)


@pytest.mark.fault(
    "torchrun: the node of each role is killed in turn", "I7: the others train on, whichever rank it had"
)
def test_any_node_may_be_killed(server: RedisServer, tmp_path: Path) -> None:
    with Job(server, tmp_path, "1:4", conf=LONG_LEASES) as job:
        names = set("abcd")
        job.start(*names)
        epoch = job.wait_round(names)
        for victim_rank, what in ((1, "one in the middle"), (0, "rank 0"), (-1, "the last rank")):
            victim = job.by_rank(epoch)[victim_rank]
            fault = job.note(f"SIGKILL of {what} of {len(names)} nodes")
            victim.kill()
            names.remove(victim.name)
            epoch = job.wait_round(names, epoch, fault=fault)
            assert job.redis("run")["size"] == str(len(names))
        job.finish(*names)


@pytest.mark.fault(
    "torchrun: a node is killed, its peers' workers fail", "I7: with `--max-restarts=0` the others train on"
)
@pytest.mark.parametrize(("nodes", "victims"), quick_rows([("ab", (0,)), ("abc", (0, -1))]))
def test_a_lost_node_costs_the_others_no_restart(
    nodes: str, victims: tuple[int, ...], server: RedisServer, tmp_path: Path
) -> None:
    """torchrun's default is no restart, and gloo's workers fail before the dead node's lease has run out."""
    with Job(server, tmp_path, f"1:{len(nodes)}", conf={"keep_alive_interval": 1}, gloo=True) as job:
        names = set(nodes)
        job.start(*names, max_restarts=0)
        epoch = job.wait_round(names)
        for victim_rank in victims:
            victim = job.by_rank(epoch)[victim_rank]
            fault = job.note(f"SIGKILL of rank {victim_rank} of {len(names)} nodes that may not restart")
            victim.kill()
            names.remove(victim.name)
            epoch = job.wait_round(names, epoch, fault=fault)
        job.finish(*names)


@pytest.mark.fault(
    "torchrun: nodes join, die and get SIGTERM; the job falls below its minimum",
    "I1, I3, I6: the remaining nodes train on, or wait for others",
)
def test_nodes_come_and_go(server: RedisServer, tmp_path: Path) -> None:
    with Job(server, tmp_path, "2:4", conf={"last_call_timeout": 1, "keep_alive_max_attempt": 12}) as job:
        job.start("a", "b")
        epoch = job.wait_round("ab")

        started = job.note("two more nodes")
        job.start("c", "d")
        epoch = job.wait_round("abcd", epoch, fault=started)

        victim = job.by_rank(epoch)[2]
        fault = job.note("SIGKILL of an agent whose worker lives on")
        orphans = victim.kill_agent_alone()
        assert any(orphan.is_running() for orphan in orphans)
        names = set("abcd") - {victim.name}
        epoch = job.wait_round(names, epoch, fault=fault)
        job.wait("the orphaned worker has ended, cut off from its peers", lambda: not any(map(lives, orphans)))

        leaver = job.by_rank(epoch)[0]
        fault = job.note("SIGTERM of rank 0's node")
        leaver.terminate()
        names -= {leaver.name}
        epoch = job.wait_round(names, epoch, fault=fault)
        assert job.wait_end(leaver.name) != 0
        assert "closed" not in job.redis("run")
        assert _lost_leases(job) == [victim.name], "a node that gets SIGTERM announces that it leaves" + job.report()

        kept, lost = (job.nodes[name] for name in names)
        fault = job.note("below the minimum, then a replacement")
        lost.kill()
        job.wait("the survivor waits for others", lambda: job.redis("candidates") and not job.redis("members"))
        job.start("e", conf={"join_timeout": 8})
        epoch = job.wait_round({kept.name, "e"}, epoch, fault=fault)

        job.note("below the minimum for longer than the join_timeout")
        kept.kill()
        assert job.wait_end("e") != 0
        assert "RendezvousTimeoutError" in job.nodes["e"].stderr
        assert "within the join_timeout of 8 s" in job.nodes["e"].stderr
        assert "closed" not in job.redis("run"), "a node that gave up waiting does not close the run"
        job.check()


@pytest.mark.fault(
    "torchrun: the node of rank 0 is frozen, and thawed", "I4, I7: the others train on; it comes back as a new node"
)
def test_frozen_node_is_fenced_and_comes_back(server: RedisServer, tmp_path: Path) -> None:
    with Job(server, tmp_path, "2:3") as job:
        job.start(*"abc")
        epoch = job.wait_round("abc")
        frozen = job.by_rank(epoch)[0]
        survivors = set("abc") - {frozen.name}
        first, identities = job.ranks(epoch), _members(job)

        fault = job.note("SIGSTOP of rank 0's node")
        frozen.freeze()
        second = job.wait_round(survivors, epoch, fault=fault)
        assert {line.restart for line in job.lines("start")} == {0}, "no worker failed, so no node's budget is touched"
        assert [n for n in survivors if first[n] == 1 == job.ranks(second)[n]], "rank 1 of three stays rank 1 of two"

        thawed = job.note("SIGCONT of it")
        frozen.thaw()
        third = job.wait_round("abc", second, fault=thawed)
        assert job.ranks(third)[frozen.name] == 2, "it is a new node: the others keep their ranks"
        assert {name: rank for name, rank in job.ranks(third).items() if name in survivors} == job.ranks(second)
        assert len(_members(job) - identities) == 1, "the fenced one has a new identity, the others keep theirs"
        job.finish(*"abc")


@pytest.mark.long
def test_spares_wait_and_step_in(server: RedisServer, tmp_path: Path) -> None:
    with Job(server, tmp_path, "2:2") as job:
        job.start(*"abc")
        epoch = job.wait("two of three train", lambda: job.epoch)
        members = set(job.ranks(epoch))
        [spare] = set("abc") - members
        job.wait("the third is a spare", lambda: len(job.redis("candidates") or []) == 1)

        victim = job.by_rank(epoch)[0]
        fault = job.note("SIGKILL of a member: the spare is promoted")
        victim.kill()
        members = members - {victim.name} | {spare}
        epoch = job.wait_round(members, epoch, fault=fault)

        job.start("d")  # a spare again
        job.start("wrong", nnodes="1:2", may_end=True)
        job.wait("the new one is a spare", lambda: len(job.redis("candidates") or []) == 1)
        assert job.wait_end("wrong") != 0
        err = job.nodes["wrong"].stderr
        assert "1 to 2" in err, err
        assert "2 to 2" in err, err
        assert "same --nnodes" in err, err
        assert job.epoch == epoch, "a node with other --nnodes does not disturb the others"

        frozen = job.by_rank(epoch)[1]
        fault = job.note("SIGSTOP of a member: the spare is promoted")
        frozen.freeze()
        members = members - {frozen.name} | {"d"}
        epoch = job.wait_round(members, epoch, fault=fault)
        assert not job.redis("candidates")
        frozen.thaw()
        job.wait("the frozen node is back, as a spare", lambda: len(job.redis("candidates") or []) == 1)
        steps = len(job.lines("step"))
        job.wait("training goes on", lambda: len(job.lines("step")) > steps + 20)
        assert job.epoch == epoch, "a spare does not make the others regroup"

        job.finish(*members)
        assert job.wait_end(frozen.name) == 0, "a spare has nothing left to do" + job.report()

        job.start("late", may_end=True)
        assert job.wait_end("late") != 0
        assert "RendezvousClosedError" in job.nodes["late"].stderr
        assert "use a new run id" in job.nodes["late"].stderr


@pytest.mark.long
def test_two_jobs_on_one_redis_do_not_disturb_each_other(server: RedisServer, tmp_path: Path) -> None:
    with Job(server, tmp_path / "1", "2:2") as failing, Job(server, tmp_path / "2", "2:2") as quiet:
        quiet.tell("linger-b")
        failing.start(*"ab", max_restarts=1)
        quiet.start(*"ab", max_restarts=0)
        assert quiet.wait_round("ab", 0) == 1
        assert failing.wait_round("ab", 0) == 1

        fault = failing.note("a worker fails by itself")
        failing.tell("fail-a")
        assert failing.wait_round("ab", 1, fault=fault) == 2
        # b's worker fails too: one agent sees a failure first, and the other regroups, which is no restart
        assert max(line.restart for line in failing.lines("start")) == 1
        assert "node a was told to fail" in failing.nodes["a"].stderr

        quiet.note("a worker ends before the others")
        quiet.tell("finish")
        quiet.wait("the worker of a has ended", lambda: "a" in {line.node for line in quiet.lines("end")})
        quiet.wait("b's worker goes on for longer than a lease", lambda: len(quiet.lines("linger")) > 40)
        quiet.tell("release")
        quiet.finish(*"ab")
        assert {line.epoch for line in quiet.lines()} == {1}
        assert len(quiet.lines("start")) == 2

        failing.finish(*"ab")
        assert {line.epoch for line in failing.lines()} == {1, 2}


@pytest.mark.long
def test_nodes_with_several_workers_recover(server: RedisServer, tmp_path: Path) -> None:
    with Job(server, tmp_path, "1:2", nproc=2, conf=LONG_LEASES) as job:
        job.start(*"ab")
        epoch = job.wait_round("ab")
        victim, survivor = job.by_rank(epoch)
        fault = job.note("SIGKILL of rank 0's node of two with two workers each")
        victim.kill()
        job.wait_round({survivor.name}, epoch, fault=fault)
        job.finish(survivor.name)


@pytest.mark.fault(
    "torchrun: a node is gone before the agents have exchanged their roles", "I7: the others do not wait for its keys"
)
def test_member_gone_before_the_roles_are_exchanged(server: RedisServer, tmp_path: Path, new_node: NodeFactory) -> None:
    """torch's agents wait for all members' keys in the round's store as soon as the round is complete."""
    with Job(server, tmp_path, "2:3") as job, ThreadPoolExecutor() as pool:
        settings = {"run_id": job.run_id, "join_timeout": 60, **job.conf}

        first = new_node(2, 3, **settings)
        joined = pool.submit(first.next_rendezvous)
        job.wait("the bare node is first", lambda: job.redis("candidates"))
        job.start(*"ab")
        assert joined.result(60).rank == 0
        _wait_for_role_info(job, 1, (1, 2))
        fault = job.note("rank 0 leaves during the exchange")
        first.end(Left(cause="exited"), "goes on", timeout=2)
        epoch = job.wait_round("ab", 0, fault=fault)
        assert epoch == 2

        silent = new_node(2, 3, **settings)
        joined = pool.submit(silent.next_rendezvous)
        assert joined.result(60).rank == 2
        _wait_for_role_info(job, 3, (0, 1))
        fault = job.note("the last rank falls silent during the exchange")
        silent.node.stop()
        epoch = job.wait_round("ab", 2, fault=fault)
        assert epoch == 4
        assert {line.epoch for line in job.lines("start")} == {2, 4}
        job.finish(*"ab")


@pytest.mark.fault("torchrun: Redis is unreachable, or refuses the login", "a readable error")
def test_unusable_redis_ends_the_agent_with_a_clear_error(server: RedisServer, tmp_path: Path) -> None:
    secret = "not-the-password"
    with Job(server, tmp_path, "1:1") as job, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, but not listening
        port = closed.getsockname()[1]
        host = server.endpoint
        refused = rf"Redis at redis://{host}\S* refused the login"
        job.start(
            "unreachable",
            env={"REDELASTIC_REDIS_URL": f"redis://:{secret}@127.0.0.1:{port}/0"},
            may_end=True,
            conf={"join_timeout": 3},
        )
        job.start("refused", env={"REDELASTIC_REDIS_URL": f"redis://:{secret}@{host}/0"}, may_end=True)
        job.start("anonymous", env={"REDELASTIC_REDIS_URL": f"redis://{host}/0"}, may_end=True)
        job.start("misspelt", options=["--rdzv-conf=keepalive_interval=2"], may_end=True)
        for node, expected in (
            ("unreachable", rf"Redis at redis://127.0.0.1:{port}\S* could not be reached"),
            ("refused", refused),
            ("anonymous", refused),
            ("misspelt", "Unknown rendezvous parameter 'keepalive_interval"),
        ):
            assert job.wait_end(node) != 0
            assert re.search(expected, job.nodes[node].stderr), job.report()
            assert secret not in job.nodes[node].stderr
        assert not job.lines()


def _members(job: Job) -> set[str]:
    return {node for node, _ in job.redis("ranks")}


def _lost_leases(job: Job) -> list[str]:
    """Names of the nodes that the others lost."""
    of_pid = {str(node.process.pid): node.name for node in job.nodes.values()}
    causes = [decode_cause(change.get("cause", "")) for _, change in job.redis("wake")]
    lost = [cause.node for cause in causes if isinstance(cause, Lost) and cause.cause in {"lease", "roll_call"}]
    return [of_pid[node.split("-")[-2]] for node in lost]


def _wait_for_role_info(job: Job, epoch: int, ranks: tuple[int, ...]) -> None:
    """Wait until these ranks' agents have written their part of the exchange, and wait for the rest."""
    wanted = {f"torchelastic/role_info/{rank}" for rank in ranks}
    exchanged = f"store:round:{epoch}"
    job.wait(f"the agents of ranks {ranks} exchange roles", lambda: wanted <= set(job.redis(exchanged) or ()))
