"""`redelastic logs`: the paths of real workers' logs, the end of the first failed worker's log, and no secrets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import redis

from redelastic.monitoring.events import Log, Lost, Started, decode
from redelastic.monitoring.logs import first_failure, places
from redelastic.monitoring.records import Node
from redelastic.redis.server import RedisServer
from redelastic.workers.logs import HIDDEN, TAIL, command_line, last_lines, log_files, redacted, tail
from tests.support.agent_job import AgentJob
from tests.support.commands import run_command
from tests.support.crowds import Crowd


@pytest.mark.timeout(300)
@pytest.mark.fault("a worker fails", "`redelastic logs --failed` shows the end of its log, without secrets")
def test_the_log_of_the_worker_that_failed_first(server: RedisServer, tmp_path: Path) -> None:
    with AgentJob(server, tmp_path, "2:2") as job:
        options = (f"--log-dir={tmp_path / 'logs'}", "--redirects=3")
        job.tell("patient")  # a worker that loses its peer waits, so b always fails first
        job.begin("a", "b", options=options, env={"SOME_API_KEY": "told to fail"})  # it stands in the log
        epoch = job.wait_round("ab")
        found = run_command("logs", job.run_id, "--json", "--endpoint", server.url).json
        by_rank = {log["rank"]: log for log in found["logs"]}
        assert sorted(by_rank) == [0, 1]
        assert found["failed"] is None
        for log in by_rank.values():
            assert log["epoch"] == epoch
            assert Path(log["path"]).is_file()
            assert log["path"].startswith(str(tmp_path / "logs"))
        nothing = run_command("logs", job.run_id, "--failed", "--endpoint", server.url)
        assert (nothing.code, nothing.out) == (1, "")
        as_json = run_command("logs", job.run_id, "--failed", "--json", "--endpoint", server.url)
        assert (as_json.code, as_json.json) == (1, found)

        victim = job.id_of("b")
        job.tell("fail-b")
        job.wait_round("ab", epoch)
        job.wait("its log is recorded", lambda: [event for event in job.events(Log) if event.node == victim])
        failed = run_command("logs", job.run_id, "--json", "--endpoint", server.url).json["failed"]
        assert (failed["node"], failed["epoch"]) == (victim, epoch)
        assert failed["path"] == by_rank[failed["rank"]]["path"]
        assert f"the worker of node b was {HIDDEN} at step" in failed["tail"]
        assert "told to fail" in Path(failed["path"]).read_text()
        done = run_command("logs", job.run_id, "--failed", "--endpoint", server.url)
        assert done.code == 0
        assert done.out.startswith(f"round {epoch} failed at ")
        assert f"\nrank {failed['rank']} on b-" in done.out
        assert "told to fail" not in done.out
        assert f"was {HIDDEN} at step" in done.out
        of_rank = run_command("logs", job.run_id, f"--rank={failed['rank']}", "--endpoint", server.url)
        assert failed["path"] in of_rank.out
        unknown = run_command("logs", job.run_id, "--rank=7", "--endpoint", server.url)
        assert (unknown.code, unknown.out, unknown.err.count("\n")) == (4, "", 1)
        as_json = run_command("logs", job.run_id, "--rank=7", "--json", "--endpoint", server.url)
        assert (as_json.code, as_json.json["logs"], as_json.err) == (4, [], "")
        job.tell("finish")
        assert job.wait_end("a") == job.wait_end("b") == 0


def test_no_such_run_and_no_such_rank(server: RedisServer) -> None:
    assert run_command("logs", "not-there", "--endpoint", server.url).code == 4
    assert run_command("logs", "x", "--rank=-1", "--endpoint", server.url).code == 2


def test_the_first_failure_is_the_earliest_not_the_first_report() -> None:
    def log(time: float, rank: int, ago: float, epoch: int = 2) -> Log:
        of_worker: dict[str, Any] = {"rank": rank, "age_ms": round(1000 * ago), "path": f"/{rank}"}
        return Log(time=time, epoch=epoch, node=f"n{rank}", **of_worker, lines="the end")

    found = first_failure([log(50, 9, 3, 1), log(100, 0, 0.1), log(101, 1, 1.5)])
    assert found
    assert (found["rank"], found["node"], found["path"], found["tail"]) == (1, "n1", "/1", "the end")
    assert found["time"] == pytest.approx(99.5)
    lost = Lost(time=102.0, epoch=3, node="n5", cause="lease", silent_ms=6000)
    assert first_failure([log(100, 0, 0.1), log(101, 4, 0.1, 3), lost]) == first_failure([log(100, 0, 0.1)])
    assert first_failure([log(101, 4, 0.1, 3), lost]) is not None
    assert first_failure([decode("1-0", {"event": "log", "rank": "somebody wrote this"})]) is None


def test_why_is_of_the_last_round_that_failed(server: RedisServer) -> None:
    """So the first lines are those of `redelastic status`, even if the last lines of a log are of an earlier round."""
    with redis.Redis.from_url(server.url) as client:
        crowd = Crowd(client, "why-1", 2)
        crowd.add(Log(epoch=4, size=2, node=crowd.members[0], rank=0, path="/0", lines="the end"))
        crowd.add(Lost(epoch=5, size=2, node=crowd.members[1], cause="lease", silent_ms=6000, breaks=True))
    found = run_command("logs", "why-1", "--failed", "--json", "--endpoint", server.url).json
    assert (found["failed"]["tail"], found["failure"]["cause"]) == ("the end", "lost")


def test_logs_are_those_of_the_last_round() -> None:
    def started(epoch: int, node: str, paths: dict[int, str]) -> Started:
        return Started(epoch=epoch, node=node, logs=paths)

    found = places(
        [started(1, "a", {0: "/1/0", 1: "/1/1"}), started(2, "b", {1: "/2/1: x"}), started(2, "a", {0: "/2/0"})]
    )
    assert [tuple(one.values()) for one in found] == [(0, "a", 2, "/2/0"), (1, "b", 2, "/2/1: x")]


def test_log_paths_of_merged_starts_are_read_from_statuses() -> None:
    def node(name: str, epoch: int, workers: list[dict[str, Any]]) -> Node:
        return Node(name, "member", 0, 1.0, 0.0, "", {"name": name, "epoch": epoch, "workers": workers})

    alone = Started(epoch=2, node="a", logs={0: "/a/0"})
    together = Started(epoch=2, node="b", nodes=("b", "c"))
    nodes = [
        node("b", 2, [{"rank": 1, "log": "/b/0"}, {"rank": 2}]),
        node("c", 1, [{"rank": 3, "log": "of an older round"}]),
        node("d", 2, [{"rank": "4", "log": 5}]),
    ]
    found = places([alone, together], nodes)
    assert [tuple(one.values()) for one in found] == [(0, "a", 2, "/a/0"), (1, "b", 2, "/b/0")]


def test_log_paths_of_the_last_round_may_be_in_statuses_only() -> None:
    """The round's events are gone, or had no room for the paths."""
    old = Started(epoch=2, node="a", logs={0: "/2/0", 1: "/2/1"})
    workers = [{"rank": 0, "log": "/3/0"}]
    nodes = [Node("b", "member", 0, 1.0, 0.0, "", {"name": "b", "epoch": 3, "workers": workers})]
    assert [tuple(one.values()) for one in places([old], nodes)] == [(0, "b", 3, "/3/0")]
    silent = [Node("b", "member", 0, 1.0, 0.0, "", {"name": "b", "epoch": 3, "workers": [{"rank": 0}]})]
    assert [one["path"] for one in places([old], silent)] == ["/2/0", "/2/1"]
    assert places([], [Node("b", "member", 0, 1.0, 0.0, "", {"name": "b", "epoch": "3", "workers": workers})]) == []


@pytest.mark.parametrize(
    ("line", "secret"),
    [
        ("connecting to redis://user:hunter2hunter2@redis.example:6379", "hunter2hunter2"),
        ("postgres://u:p%40ss@db/x", "p%40ss"),
        ('config = {"api_key": "abc-123-def", "lr": 0.1}', "abc-123-def"),
        ("password='correct horse battery'", "correct horse battery"),
        ("AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7MDENG", "wJalrXUtnFEMI/K7MDENG"),
        ("Authorization: Bearer abc.def.ghi", "abc.def.ghi"),
        ("using AKIAIOSFODNN7EXAMPLE for s3", "AKIAIOSFODNN7EXAMPLE"),
        ("hf_abcdefghijklmnopqrstuvwxyz", "hf_abcdefghijklmnopqrstuvwxyz"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIEow\n-----END RSA PRIVATE KEY-----", "MIIEow"),
        ("MIIEowcut\n-----END PRIVATE KEY-----", "MIIEowcut"),
        ("wandb: logged in with 0123456789abcdef", "0123456789abcdef"),
    ],
)
def test_secrets_are_hidden(line: str, secret: str) -> None:
    environ = {
        "WANDB_API_KEY": "0123456789abcdef",
        "GIT_AUTHOR_NAME": "before",
        "SSH_KEY_FILE": "/etc/key",
        "AUTH": "on",
    }
    text = redacted(f"before\n{line} at step 3\nand after, on /etc/key", environ)
    assert text.startswith(HIDDEN if secret == "MIIEowcut" else "before")
    assert secret not in text
    assert HIDDEN in text
    assert text.endswith("and after, on /etc/key")


def test_text_without_secrets_is_not_redacted() -> None:
    text = "step 3: loss 0.1, 4096 tokens/s, keys: 12, https://user@host/path, author: me\nKeyError: 'weights'"
    assert redacted(text, {"MY_KEY": "1", "KEYS": ""}) == text
    environ = {
        "REDELASTIC_KEY_PREFIX": "redelastic",
        "SSH_KEY_NAME": "training",
        "GOOGLE_AUTH_TYPE": "service",
        "TOKEN_COUNT": "100000",
        "API_KEY_ID": "primary",
    }
    text = (
        'File "/redelastic/training/service.py", line 100000, in primary\n'
        "    tokenizer.pad_token = tokenizer.eos_token\n"
        "ValueError: pad_token='<|endoftext|>', eos_token: </s>, max_token=100000"
    )
    assert redacted(text, environ) == text


def test_a_tail_is_bounded_and_of_whole_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("".join(f"line {i}\n" for i in range(10_000)))
    end = tail(str(log))
    assert len(end) <= TAIL
    assert end.startswith("line ")
    assert end.endswith("line 9999")
    log.write_text("before\n" + "".join(f"\r{i:4}/5000 [{'=' * 90}]" for i in range(1234)))
    assert tail(str(log)) == f"before\n1233/5000 [{'=' * 90}]", "a progress bar as a terminal shows it"
    log.write_text("begins\n" + "x" * 10 * TAIL + " at the end\n")
    assert tail(str(log)) == "…" + ("x" * TAIL + " at the end")[1 - TAIL :]
    log.write_bytes(b"\xff\xfe broken\n")
    assert tail(str(log)).endswith("broken")
    assert tail(str(tmp_path / "gone")) == ""
    assert tail(str(tmp_path)) == ""


def test_only_output_that_goes_to_a_file_has_a_log() -> None:
    assert log_files({0: "", 1: "/o"}, {0: "/dev/null", 1: "/e"}) == {1: "/e"}
    assert log_files({0: "/o"}, {0: "/dev/null"}) == {0: "/o"}


def test_the_last_lines_include_those_of_stdout(tmp_path: Path) -> None:
    out, err = tmp_path / "stdout.log", tmp_path / "stderr.log"
    assert last_lines(str(err)) == "", "there is neither file"
    err.write_text("Traceback\n")
    assert last_lines(str(err)) == "Traceback"
    out.write_text("step 3\nERROR: out of tokens\n")
    assert last_lines(str(err)) == "stdout.log:\nstep 3\nERROR: out of tokens\nstderr.log:\nTraceback"
    assert last_lines(str(out)) == "step 3\nERROR: out of tokens"


SPACED = {"my data", "x y", "--password=two words"}


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("train.py --lr 3e-4|my data", "train.py --lr 3e-4 'my data'"),
        ("train.py --api-key abcdef --wandb_token|x y", f"train.py --api-key {HIDDEN} --wandb_token {HIDDEN}"),
        ("train.py --wandb-key=abc --seed 7", f"train.py --wandb-key={HIDDEN} --seed 7"),
        ("train.py|--password=two words|db.auth=a", f"train.py --password={HIDDEN} db.auth={HIDDEN}"),
        ("train.py --token -x1 --resume", f"train.py --token {HIDDEN} --resume"),
        ("train.py --token --resume", "train.py --token --resume"),
        ("train.py --tokenizer gpt2 --key-name a", "train.py --tokenizer gpt2 --key-name a"),
        ("train.py it's-of-env redis://u:p@h", f"train.py {HIDDEN} redis://u:{HIDDEN}@h"),
    ],
)
def test_a_command_is_shown_without_secrets(words: str, shown: str) -> None:
    """Words that hold a space are set off by bars."""
    each = [word for part in words.split("|") for word in ([part] if part in SPACED else part.split())]
    assert command_line(each, {"DB_PASSWORD": "it's-of-env"}) == shown
