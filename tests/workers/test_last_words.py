"""What a worker's last words say about the cause of its failure."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from redelastic.workers.deaths import error_in, last_exception, names_a_peer
from redelastic.workers.logs import tail


@pytest.mark.parametrize(
    "words",
    [
        "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:1",
        "RuntimeError: Application timeout caused pair closure: gloo/transport",
        "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error",
        "torch.distributed.DistNetworkError: failed to recv, got 0 bytes",
        "ConnectionResetError: [Errno 104] Connection reset by peer",
        "what():  [PG ID 0 Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)",
        "redelastic.store.requests.RoundBrokenError: round 3 is over",
    ],
)
def test_a_lost_peer_is_recognized(words: str) -> None:
    assert names_a_peer(words)


@pytest.mark.parametrize(
    "words", ["", "ValueError: bad batch", "torch.OutOfMemoryError: CUDA out of memory.", "KeyError: 'peer'"]
)
def test_other_failures_name_no_peer(words: str) -> None:
    assert not names_a_peer(words)


@pytest.mark.parametrize(
    ("log", "last"),
    [
        (
            "ValueError: first\nstep 7\n[rank1]: Traceback …\n[rank1]: RuntimeError: second\n  exit\n",
            "RuntimeError: second",
        ),
        ("terminate called after throwing an instance of 'c10::Error'\n  what():  third\n", "what():  third"),
        ("Error rate: 3\nstep 7\n", ""),
    ],
)
def test_the_last_exception_of_a_log_is_found(log: str, last: str) -> None:
    assert last_exception(log) == last


def test_other_ranks_exceptions_are_passed_over() -> None:
    assert last_exception("[rank1]: ValueError: own\n[rank2]: KeyError: other\n", 1) == "ValueError: own"


@pytest.mark.parametrize(
    ("changed", "at"), [(1000.25, 1000.25), (1000 - 1 / 64, 1000.0), (1003.5, 1001.0), (10.0, 1001.0)]
)
def test_an_error_file_tells_when_the_worker_raised(tmp_path: Path, changed: float, at: float) -> None:
    """To the file's own precision, if its time agrees with the full second that torch wrote into it."""
    file = tmp_path / "error.json"
    file.write_text(json.dumps({"message": {"message": "ValueError: bad", "extraInfo": {"timestamp": "1000"}}}))
    os.utime(file, (changed, changed))
    assert error_in(str(file)) == ("ValueError: bad", at)
    file.write_text('{"message": "bad"}')  # a program's own, in the form that torch reads too
    os.utime(file, (changed, changed))
    assert error_in(str(file)) == ("bad", changed)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"message": {"extraInfo": 1}}'])
def test_an_error_file_that_is_not_whole_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "error.json").write_text(content)
    assert error_in(str(tmp_path / "error.json")) is None
    assert error_in("") is None


def test_lines_of_an_earlier_round_do_not_count(tmp_path: Path) -> None:
    log = tmp_path / "agent.log"
    log.write_text("ValueError: of round 1\n")
    start = log.stat().st_size
    assert tail(str(log), start=start) == ""
    with log.open("a") as file:
        file.write("step 7\n")
    assert tail(str(log), start=start) == "step 7"
    log.write_text("cut\n")
    assert tail(str(log), start=start) == "cut"
