"""Why a round failed: one cause, what only followed, and what was done, from events whose truth is known."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from redelastic.dashboard import view
from redelastic.monitoring.events import Event, decode
from redelastic.monitoring.failure import document, last_failure, last_fault, lines
from redelastic.monitoring.history import replay
from redelastic.monitoring.report import describe
from redelastic.redis.server import RedisServer
from tests.support.agent_job import AgentJob
from tests.support.torchrun_job import LIMIT, LONGEST_LEASES

A, B, C = (f"{name}-7-0123456789ab" for name in "abc")
PEER = "RuntimeError: Connection closed by peer"


def event(seconds: float, kind: str, node: str = "", epoch: int = 1, **more: Any) -> Event:
    values = {"event": kind, "epoch": str(epoch), "size": "3", "node": node}
    return decode(f"{round(1000 * (1_700_000_000 + seconds))}-0", values | {k: str(v) for k, v in more.items()})


def completed(seconds: float, epoch: int = 1, members: Sequence[str] = (A, B, C)) -> Event:
    return event(seconds, "completed", members[0], epoch, members=" ".join(members))


def worker(rank: int, message: str = "", code: int = 1, **more: Any) -> dict[str, Any]:
    return {"local_rank": 0, "rank": rank, "pid": 9, "exit_code": code, "message": message} | more


RAISED = event(13, "failed", A, age_ms=3000, **worker(0, "ValueError: bad"))
FOLLOWED = event(13.2, "failed", B, age_ms=0, follows=1, **worker(1, PEER))


def card(*events: Event) -> dict[str, str]:
    failure = last_failure([completed(0), *events])
    assert failure is not None
    return dict(lines(failure))


def test_the_worker_that_raised_first_is_the_cause() -> None:
    log = event(13.1, "log", A, rank=0, path="/logs/0.log")
    found = card(RAISED, log, FOLLOWED, completed(14, 2))
    assert found == {
        "cause": "a-7: worker 0 (rank 0, pid 9) exited with 1: ValueError: bad",
        "log": "/logs/0.log",
        "others": f"workers failed because of it on b-7 (rank 1): {PEER}; the workers of 1 more node ended with it",
        "then": "one restart of the job was charged; round 2 followed 4.0 s later",
    }


def test_the_order_is_that_of_the_failures_and_not_of_the_reports() -> None:
    late = event(14, "failed", C, age_ms=3500, **worker(2, "KeyError: 1"))
    assert card(RAISED, late)["cause"].startswith("a-7: ")
    assert card(RAISED, event(14, "failed", C, age_ms=4500, **worker(2)))["cause"].startswith("c-7: ")


def test_the_last_fault_is_no_failure_that_followed() -> None:
    assert last_fault([completed(0)]) is None
    assert last_fault([completed(0), RAISED, FOLLOWED, completed(14, 2)]) == RAISED
    lost = event(13, "lost", C, cause="roll_call", silent_ms=500, breaks=1)
    assert last_fault([completed(0), lost]) == lost, "the workers of the others did not fail"
    assert last_fault([completed(0), lost, event(13.1, "failed", B, age_ms=0, **worker(1))]) == lost
    hung = event(20, "hung", A, epoch=2, idle_ms=6000)
    assert last_fault([completed(0), RAISED, completed(14, 2), hung]) == hung
    assert last_fault([completed(0), FOLLOWED]) == FOLLOWED, "nobody knows more"


def test_without_the_peers_failure_the_cause_is_not_known() -> None:
    found = card(FOLLOWED)
    assert found["cause"].startswith("not known: every worker that failed says that a peer is gone")
    assert found["others"] == f"workers failed on b-7 (rank 1): {PEER}"
    assert "log" not in found


@pytest.mark.parametrize(
    ("lost", "cause"),
    [
        ({"cause": "roll_call", "silent_ms": 500, "asked_by": B}, "c-7 did not answer the roll call of b-7"),
        ({"cause": "lease", "silent_ms": 6000}, "c-7 lost its lease after 6.0 s"),
    ],
)
def test_a_lost_node_is_the_cause_of_what_fails_after_it(lost: dict[str, Any], cause: str) -> None:
    failed = event(13, "failed", B, age_ms=200, **worker(1, "RuntimeError: step failed"))
    found = card(failed, event(14, "lost", C, breaks=1, **lost), completed(15, 2, [A, B]))
    assert found["cause"].startswith(cause)
    assert found["cause"].endswith("; why is not known")
    assert "b-7 (rank 1): RuntimeError: step failed" in found["others"]
    assert found["then"].startswith("no restart was charged; round 2 followed ")


def test_a_failure_that_names_no_peer_may_have_a_cause_of_its_own() -> None:
    own = event(13.1, "failed", C, age_ms=0, **worker(2, "KeyError: 2"))
    others = f"workers failed because of it on b-7 (rank 1): {PEER}; workers also failed on c-7 (rank 2): KeyError: 2"
    assert card(RAISED, FOLLOWED, own)["others"] == others


def test_workers_that_have_parked_did_not_end_with_the_round() -> None:
    lost = event(13, "lost", A, cause="lease", silent_ms=6000, breaks=1)
    assert card(lost)["others"] == "the workers of 2 more nodes ended with it"
    parked = event(13.1, "regrouped", B, parked=1)
    assert (
        card(lost, parked)["others"]
        == "the workers of 1 more node ended with it; the workers of 1 more node survived it"
    )
    both = card(RAISED, parked, event(13.1, "regrouped", C, parked=1), completed(13.2, 2, [B, C]))
    assert both["others"] == "the workers of 2 more nodes survived it"


def test_a_spare_that_is_lost_is_no_cause() -> None:
    assert last_failure([completed(0, members=[A, B]), event(13, "lost", C, cause="lease", silent_ms=6000)]) is None


def test_a_node_that_is_lost_later_is_no_cause() -> None:
    found = card(RAISED, event(30, "lost", C, cause="lease", silent_ms=6000))
    assert found["cause"].startswith("a-7: worker 0")
    assert "no restart was charged" in found["then"], "as the script that counts has it"


def test_a_round_that_was_left_on_purpose_has_not_failed() -> None:
    left = event(12, "left", C, cause="drained", breaks=1)
    assert last_failure([completed(0), left, FOLLOWED, completed(14, 2, [A, B])]) is None
    assert last_failure([completed(0), event(12, "left", C, cause="finished", breaks=1)]) is None


def test_the_card_says_what_was_done() -> None:
    barred = event(13.3, "barred", A, failures=2)
    assert "the host was excluded; the next round is not complete yet" in card(RAISED, barred)["then"]
    ended = event(13.4, "stopped", A, cause="restarts", restarts=1, **worker(0))
    assert card(RAISED, ended)["then"] == "the run was stopped: the job had used up its 1 restart", "it had no other"


def test_the_card_says_how_a_worker_ended() -> None:
    hung = event(20, "failed", A, age_ms=9000, local_rank=0, rank=0, pid=9, idle_ms=9000, step=7)
    assert card(hung)["cause"].endswith("made no progress for 9.0 s, since step 7")
    killed = event(20, "failed", A, local_rank=0, rank=0, pid=9, signal="SIGKILL")
    assert card(killed)["cause"].endswith("was ended by SIGKILL")
    assert card(killed)["log"] == "no file: the output went to a terminal or a pipe"
    aborted = event(20, "failed", A, local_rank=0, rank=0, pid=9, signal="SIGABRT", message="what():  watchdog")
    assert card(aborted)["cause"].endswith("was ended by SIGABRT: what():  watchdog")


def test_a_hang_is_explained_by_what_all_nodes_say() -> None:
    hung = event(20, "failed", A, age_ms=9000, local_rank=0, rank=0, pid=9, idle_ms=9000, step=7)
    waits = event(20, "collectives", A, last='{"0": [["0", "default_pg", 9, "all_reduce", "", false]]}')
    late = event(20.1, "collectives", B, last='{"1": [["0", "default_pg", 8, "all_reduce", "", true]]}')
    why = "rank 0 waits in all_reduce, collective 9 of default_pg, rank 1 has not come to it"
    assert card(hung, waits, late)["waits"] == why
    assert "waits" not in card(RAISED, waits, late), "of a failure that is no hang, it is not the cause"


def test_of_hung_workers_none_is_the_cause_unless_one_is_seen_to_be() -> None:
    def hung(node: str, rank: int, **more: Any) -> Event:
        return event(20, "failed", node, age_ms=9000, local_rank=0, rank=rank, pid=9, idle_ms=9000, step=7, **more)

    both = card(hung(A, 0, follows=1), hung(B, 1, follows=1))
    assert both["cause"].startswith("not known: workers make no progress")
    assert both["others"].startswith("workers failed on a-7 (rank 0): worker 0 (rank 0, pid 9) made no progress")
    assert card(hung(A, 0, follows=1), hung(B, 1))["cause"].startswith("b-7: worker 0 (rank 1")
    ended = event(21, "left", A, cause="failed", breaks=1, local_rank=0, rank=0, pid=9, idle_ms=9000, step=7)
    assert card(hung(A, 0, follows=1), ended)["cause"].startswith("not known"), "it is the same failure"
    left = event(21, "left", C, cause="drained", breaks=1)
    assert "cause" in card(hung(A, 0, follows=1), left), "a hang does not follow from a drain"


def test_the_last_round_that_failed_counts() -> None:
    again = event(23, "failed", B, 2, **worker(1, "KeyError: 2"))
    failure = last_failure([completed(0), RAISED, completed(14, 2), again])
    assert failure is not None
    assert (failure.epoch, document(failure)["message"]) == (2, "KeyError: 2")  # type: ignore[index]
    assert last_failure([completed(0)]) is None


def test_every_place_says_the_same(server: RedisServer, tmp_path: Path) -> None:
    """The agents' last lines, `status`, `logs --failed` and the dashboard, about a job that fails for good."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, time\nif os.environ['TEST_NODE'] == 'b':\n    time.sleep(600)\nraise ValueError('bad batch')\n"
    )
    with AgentJob(server, tmp_path, "2:2", conf=LONGEST_LEASES) as job:
        logs = (f"--log-dir={tmp_path / 'logs'}", "--redirects=3")
        job.start("a", "b", script=script, max_restarts=0, may_end=True, options=logs)
        codes = [job.wait_end(name) for name in "ab"]
        run, events = job.control.state(), job.control.events()
        failure = last_failure(events)
        assert failure is not None, job.report()
        said = lines(failure)
        card = dict(said)
        assert codes == [1, 76]
        assert "exited with 1: ValueError: bad batch" in card["cause"]
        assert card["log"].endswith("stderr.log")
        assert card["others"] == "the workers of 1 more node ended with it"
        assert "the run was stopped: a-" in card["then"]
        history = replay(events)
        report = describe(run, events, history.end, history)
        page = view.details(run, report, history, history.start)
        assert page["failure"]["lines"] == [list(line) for line in said]

        def command(*words: str) -> str:
            full = [sys.executable, "-m", "redelastic", *words, "--endpoint", server.url]
            return subprocess.run(full, capture_output=True, text=True, timeout=LIMIT, check=False).stdout

        shown = {"status": command("status", job.run_id), "logs": command("logs", job.run_id, "--failed")}
        shown |= {name: job.nodes[name].stderr for name in "ab"}
        for place, text in shown.items():
            for name, line in said:
                assert f"  {name:<6} {line}" in text, (place, text)
        assert "ValueError: bad batch" in json.loads(command("logs", job.run_id, "--json"))["failure"]["message"]
