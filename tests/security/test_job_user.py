"""What a job's user may do, and what it cannot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final, cast

import pytest
import redis

from redelastic.doctor.rights import PROBES
from redelastic.monitoring.control import RunControl
from redelastic.monitoring.events import Barred
from redelastic.monitoring.records import Node
from redelastic.redis.connection import Connection
from redelastic.redis.errors import ACL_RULES
from redelastic.redis.keys import RunKeys
from redelastic.redis.server import RedisServer
from tests.support import servers
from tests.support.agent_job import DRAINED, STOPPED, AgentJob
from tests.support.job_user import CANARY, as_user_of, command_line, job_rules, output_of
from tests.support.lifecycle import live_through_a_run
from tests.support.nodes import NodeFactory

pytestmark = pytest.mark.timeout(300)


def test_the_rules_are_the_commands_that_a_run_sends() -> None:
    """`test_doctor_users.py` holds the probes against all that the scripts and the code send."""
    sent = {f"+{probe.split()[0].lower()}" for probe in PROBES}
    rules = job_rules("my-job")
    assert rules[:4] == ["reset", "on", f">{CANARY}", "~redelastic:{my-job*}:*"]
    assert set(rules[4:]) == sent
    assert {rule for rule in ACL_RULES.split() if rule.startswith("+")} == sent, "what errors and `doctor` advise"


@pytest.mark.fault("a user with SECURITY.md's rules", "every feature works")
def test_every_feature_works_for_the_user_of_one_run(every_server: RedisServer, tmp_path: Path) -> None:
    """A job of our agent with telemetry, what fails in it, all commands; and nobody is told the password."""
    with every_server.get_client() as admin:
        user = as_user_of(every_server, "job-x")  # the job's id is known only to the job
        job = AgentJob(cast("RedisServer", user), tmp_path, "1:2")
        as_user_of(every_server, job.run_id)
        user.url = user.url.replace("job-x", job.run_id)
        admin.execute_command("ACL DELUSER", "job-x")
        with job:
            job.control = RunControl(Connection.open(user.url), RunKeys(job.run_id))
            job.tell("patient")  # only the worker that is told to fails, so that its host is barred
            job.begin("a", "b", options=("--max-failed-rounds=1", "--max-job-restarts=9", "--hang-timeout=60"))
            epoch = job.wait_round("ab")
            shown = [line for node in job.nodes.values() for p in node.tree() for line in [command_line(p)]]
            job.tell("fail-b")
            job.wait_event(Barred)
            epoch = job.wait_round("a", epoch)
            said = [output_of("readmit", job.run_id, "b", url=user.url)]
            epoch = job.wait_round("ab", epoch)
            job.wait(
                "both tell how far they are, and what they use", lambda: all(map(tells, job.control.state().nodes))
            )
            for line in ("status", "status --workers --json", "events --detail", "events --json", "timeline --json"):
                name, *options = line.split()
                said.append(output_of(name, job.run_id, *options, url=user.url))
            assert {node["name"] for node in json.loads(said[2])["nodes"]} == {"a", "b"}
            said.append(output_of("doctor", "--run", job.run_id, url=user.url))
            job.nodes["b"].may_end = True
            said.append(output_of("drain", job.run_id, "b", "--wait", url=user.url))
            assert job.wait_end("b") == DRAINED
            job.wait_round("a", epoch)
            job.nodes["a"].may_end = True
            said.append(output_of("close", job.run_id, "--stop", url=user.url))
            assert job.wait_end("a") == STOPPED
            refused = output_of("list", url=user.url, code=3)
            assert "needs ~redelastic:* and +scan" in refused, "what this user needs beside its rules"
            said += [refused, *shown]
            said += [node.log_tail(10_000) for node in job.nodes.values()]
            assert "denies" not in "".join(node.stderr for node in job.nodes.values())
        kept = [str(admin.dump(key)) + str(key) for key in admin.keys(f"*{job.run_id}*")]
    assert CANARY not in "\n".join(said + kept)
    assert kept


def tells(node: Node) -> bool:
    return node.step is not None and bool(node.status.get("memory"))


def test_what_more_a_cluster_and_another_database_need(run_id: str) -> None:
    """As SECURITY.md says."""
    with servers.redis_cluster() as cluster:
        for server in cluster.servers:
            url = as_user_of(server, run_id, "+cluster|slots", "+command").url
        url = cluster.url.replace(f":{cluster.password}@", f"{run_id}:{CANARY}@")
        live_through_a_run(url, run_id, 2)
        assert json.loads(output_of("status", run_id, "--json", url=url, code=0))["run"] == run_id


def test_listing_runs_takes_a_user_for_that(every_server: RedisServer, new_node: NodeFactory, run_id: str) -> None:
    with every_server.get_client() as admin:
        node = new_node(1, 1, url=every_server.url)
        node.next_rendezvous()
        rules = ("~redelastic:*", "+ping", "+scan", "+evalsha", "+eval", "+time", "+mget", "+hmget", "+hgetall")
        more = ("+zrange", "+smembers")
        admin.execute_command("ACL SETUSER", f"{run_id}-lists", "reset", "on", f">{CANARY}", *rules, *more)
        url = f"redis://{run_id}-lists:{CANARY}@{every_server.endpoint}"
        assert run_id in output_of("list", url=url)
        admin.execute_command("ACL DELUSER", f"{run_id}-lists")


OTHERS: Final = "redelastic:{another}:run"
REFUSED: Final = (
    *(
        f"GET {OTHERS}",
        f"HGETALL {OTHERS}",
        f"SET {OTHERS} x",
        f"DEL {OTHERS}",
        "XADD redelastic:{another}:wake * a b",
    ),
    *("XREAD STREAMS redelastic:{another}:wake 0", f"TYPE {OTHERS}", f"PTTL {OTHERS}", f"MGET MINE {OTHERS}"),
    *("KEYS *", "SCAN 0", "RANDOMKEY", "DBSIZE", "FLUSHALL", "FLUSHDB", "SWAPDB 0 1", "SELECT 1", "MOVE MINE 1"),
    *(
        f"RENAME MINE {OTHERS}",
        f"COPY MINE {OTHERS}",
        "MIGRATE h 1 MINE 0 1",
        "DUMP MINE",
        "RESTORE MINE 0 x",
        f"SORT MINE GET {OTHERS}",
    ),
    *(
        f"OBJECT ENCODING {OTHERS}",
        f"MEMORY USAGE {OTHERS}",
        "CONFIG GET *",
        "INFO",
        "ACL LIST",
        "ACL WHOAMI",
        "MONITOR",
    ),
    *(
        "CLIENT LIST",
        "CLIENT KILL TYPE normal",
        "CLIENT PAUSE 1",
        "SHUTDOWN NOSAVE",
        "SAVE",
        "BGREWRITEAOF",
        "SLOWLOG GET",
    ),
    *("PUBLISH c x", "SUBSCRIBE c", "PSUBSCRIBE *", "PUBSUB CHANNELS", "SCRIPT FLUSH", "SCRIPT KILL", "MODULE LIST"),
    *("REPLICAOF h 1", "CLUSTER NODES", "LATENCY LATEST", "SETRANGE MINE 400000000 x", "LOLWUT", "COMMAND"),
)
OF_REDIS_7: Final = ("FUNCTION FLUSH", "FUNCTION LOAD x", "FUNCTION LIST", "FCALL f 0")
IN_SCRIPTS: Final = (
    *(f"'GET','{OTHERS}'", f"'HSET','{OTHERS}','epoch','9'", f"'DEL','{OTHERS}'", f"'SORT','MINE','GET','{OTHERS}'"),
    *("'KEYS','*'", "'SCAN','0'", "'RANDOMKEY'", "'FLUSHALL'", "'CONFIG','GET','*'", "'PUBLISH','c','x'", "'INFO'"),
)


@pytest.mark.fault("a user with SECURITY.md's rules", "reaches no other job's keys and nothing of the server")
def test_that_user_can_do_nothing_else(every_server: RedisServer, run_id: str) -> None:
    user = as_user_of(every_server, run_id)
    own = RunKeys(run_id).run
    with every_server.get_client() as admin, redis.Redis.from_url(user.url) as client:
        admin.delete(OTHERS)
        admin.hset(OTHERS, "epoch", "1")
        before = admin.dump(OTHERS)
        functions = OF_REDIS_7 if not admin.info("server")["redis_version"].startswith("6.") else ()
        for line in (*REFUSED, *functions):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*line.replace("MINE", own).split())
        for call in IN_SCRIPTS:  # keys that a script does not declare are checked as well
            with pytest.raises(redis.ResponseError, match=r"can't|permission|NOPERM|not allowed from script"):
                client.execute_command("EVAL", f"return redis.call({call.replace('MINE', own)})", 0)
        assert admin.dump(OTHERS) == before
        admin.delete(OTHERS)
        assert client.hset(own, "epoch", "1") == 1


@pytest.mark.fault("a user with SECURITY.md's rules", "can write lines into Redis' log that look like Redis' own")
def test_that_user_can_forge_lines_of_the_log(every_server: RedisServer, run_id: str) -> None:
    """As SECURITY.md says: no rule takes `redis.log` from who may run scripts. Once a server can, the row has to go."""
    user = as_user_of(every_server, run_id)
    forged = f"1:M 01 Jan 2030 00:00:00.000 * DB saved on disk by {run_id}"
    with redis.Redis.from_url(user.url) as client:
        client.eval("redis.log(redis.LOG_WARNING, ARGV[1])", 0, f"a script's\n{forged}")
    log = Path(f"/proc/{every_server.pid}/cwd/redis.log").read_text()
    assert forged in log.splitlines()
