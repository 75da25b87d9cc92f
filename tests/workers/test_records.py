"""What flight recorders hold, and why ranks wait: dumps of three ranks that hang.

Those of gloo are of torch 2.13, those of NCCL of torch 2.11 and NCCL 2.28.9, with three ranks on one H200.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest

from redelastic.monitoring.collectives import Collective, decode, explain, may_wait
from redelastic.workers.board import ProgressBoard
from redelastic.workers.records import last_collectives, reduce_records
from tests.support import worker_processes
from tests.support.worker_processes import StartOnBoard

DUMPS = Path(__file__).with_name("flight_records")
TIMEOUT = 60.0


def of_case(name: str) -> dict[int, tuple[Collective, ...]]:
    dumps = json.loads((DUMPS / f"{name}.json").read_text())
    return {int(rank): tuple(reduce_records(json.dumps(found).encode(), 0)) for rank, found in dumps.items()}


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("late", "rank 0 waits in broadcast(Float[7]), collective 5 of default_pg, rank 1 has not come to it"),
        ("shape", "in all_reduce(Float[4]), collective 5 of default_pg, rank 2 came with all_reduce(Float[5])"),
        (
            "operation",
            "ranks 1-2 wait in all_reduce(Float[4]), collective 5 of default_pg, rank 0 came with broadcast(Float[4])",
        ),
        (
            "pair",
            (
                "ranks 1-2 wait in all_gather, collective 5 of default_pg, rank 0 has not come to it; "
                "rank 0 waits in all_reduce(Float[3]), collective 2 of pair, rank 1 has not come to it"
            ),
        ),
    ],
)
def test_a_real_hang_is_explained(case: str, why: str) -> None:
    last = of_case(case)
    assert explain(last) == why
    assert explain(decode(json.dumps(last))) == why, "as it comes from Redis"


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("late", "rank 2 waits in broadcast(Float[7]), collective 31 of default_pg, rank 1 has not come to it"),
        (
            "shape",
            (
                "ranks 0-1 wait in all_reduce(Float[4]), collective 31 of default_pg, "
                "rank 2 came with all_reduce(Float[4194304])"
            ),
        ),
        (
            "operation",
            "ranks 1-2 wait in all_reduce(Float[4]), collective 31 of default_pg, rank 0 came with broadcast(Float[4])",
        ),
        (
            "pair",
            (
                "ranks 1-2 wait in all_gather, collective 31 of default_pg, rank 0 has not come to it; "
                "rank 0 waits in all_reduce(Float[3]), collective 2 of pair, rank 1 has not come to it"
            ),
        ),
    ],
)
def test_a_real_hang_of_nccl_is_explained(case: str, why: str) -> None:
    assert explain(of_case(f"nccl_{case}")) == why


def entry(number: int, **more: Any) -> dict[str, Any]:
    """A collective as NCCL's recorder writes it."""
    fields = {"collective_seq_id": number, "profiling_name": "nccl:all_reduce", "process_group": ["0", "default_pg"]}
    kind = {"input_dtypes": ["Float"], "input_sizes": [[4]], "is_p2p": False}
    return fields | kind | {"retired": False, "state": "started", "time_created_ns": number * 10**9} | more


def reduced(*entries: dict[str, Any], since: float = 0) -> list[Collective]:
    return list(reduce_records(json.dumps([{"entries": []}, {"entries": entries}]).encode(), since))


def test_nccls_states_are_known() -> None:
    found = reduced(entry(1, state="completed"), entry(2), entry(3, state="scheduled"))
    assert [one.is_done for one in found] == [True, False, False]


def test_what_an_earlier_round_left_does_not_count() -> None:
    assert [one.number for one in reduced(*map(entry, range(5)), since=3)] == [3, 4]


def test_of_many_collectives_the_last_and_the_oldest_unfinished_remain() -> None:
    done = [entry(n, retired=True) for n in range(1000)]
    assert [one.number for one in reduced(*done, *map(entry, range(1000, 1100)))] == [1000, 1096, 1097, 1098, 1099]


def test_a_rank_without_any_collective_is_late_in_the_default_group_only() -> None:
    assert explain({0: reduced(entry(1)), 1: []}).endswith("rank 1 has not come to it")
    assert "rank 1" not in explain({0: reduced(entry(1, process_group=["7", "pair"])), 1: []})


def test_ranks_that_do_not_answer_or_wait_elsewhere_are_named() -> None:
    assert explain({0: [], 1: [], 5: None}) == "ranks 0-1 wait in no collective; rank 5 does not answer"
    assert explain({}) == ""


@pytest.mark.parametrize("text", ["", "[", "[]", '{"x": []}', '{"1": 1}', '{"1": [1, [], ["0", "", 1, 2, "", true]]}'])
def test_what_redelastic_did_not_write_is_left_out(text: str) -> None:
    assert not any(decode(text).values())


@pytest.mark.parametrize(("done", "may"), [((True, True), False), ((True, False), True), ((), True), (None, False)])
def test_a_hung_rank_may_wait_for_another_one(done: tuple[bool, ...] | None, may: bool) -> None:
    own = [Collective("0", "default_pg", n, "all_reduce", "", one) for n, one in enumerate(done or ())]
    assert may_wait(None if done is None else own) is may


# -- from workers

board, start = worker_processes.board, worker_processes.start_on_board
REPORTS = """
import ctypes, sys, time
from types import ModuleType, SimpleNamespace
sys.modules["torch"] = torch = ModuleType("torch")
torch._C = SimpleNamespace(_distributed_c10d=SimpleNamespace(_dump_fr_trace_json=lambda **_: b'{"entries": []}'))
from redelastic.worker import progress
progress(1)
"""
WORKER = REPORTS + 'print("ready", flush=True)\n'
# Its other thread would answer a request that comes before the lock is held: so "ready" is written with the lock, too.
HOLDS_LOCK = f"""
import sys; sys.setswitchinterval(1000)
{REPORTS}
libc = ctypes.PyDLL(None)
libc.write(1, b"ready\\n", 6)
libc.sleep(1000)
"""


def test_a_worker_answers_each_request(board: ProgressBoard, start: StartOnBoard) -> None:
    start(WORKER + "time.sleep(1000)")
    for _ in range(3):
        assert last_collectives(board, lambda: [0, 1], 0, TIMEOUT) == {0: ()}, "the other one has not reported"


def test_a_worker_that_holds_the_interpreters_lock_is_not_waited_for(board: ProgressBoard, start: StartOnBoard) -> None:
    start(HOLDS_LOCK)
    start(WORKER + "time.sleep(1000)", 1)
    begun = time.monotonic()
    found = last_collectives(board, lambda: [0, 1], 0, 1.0)
    assert time.monotonic() - begun < TIMEOUT
    assert found == {0: None, 1: ()}


def test_a_worker_that_ends_while_it_is_asked_is_not_waited_for(board: ProgressBoard, start: StartOnBoard) -> None:
    start(HOLDS_LOCK)
    looks = iter(([0], [0], []))
    assert last_collectives(board, lambda: next(looks), 0, math.inf) == {}


def test_a_script_without_torch_has_no_collectives(board: ProgressBoard, start: StartOnBoard) -> None:
    start(
        "import time; from redelastic.worker import progress; progress(1); print('ready', flush=True); time.sleep(1000)"
    )
    assert last_collectives(board, lambda: [0], 0, TIMEOUT) == {0: ()}
