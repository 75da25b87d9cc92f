"""survive() without an agent that keeps workers: train is called once, as in any script."""

from __future__ import annotations

import os
import runpy
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import redelastic
from redelastic.agent.options import AgentOptions
from redelastic.survival import loop
from redelastic.survival.loop import CONNECT_TIMEOUT, MAKE_TIMEOUT, MEET_TIMEOUT
from redelastic.workers.channels import WorkerChannels
from tests.support.long_tests import quick_first
from tests.support.processes import Processes
from tests.support.servers import reserved_port
from tests.support.waiting import Within

until = Within(90)

pytestmark = pytest.mark.timeout(300)  # above what waits take together


def test_a_process_of_its_own_trains_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "REDELASTIC_CHANNEL", "REDELASTIC_EPOCH"):
        monkeypatch.delenv(name, raising=False)
    rounds: list[redelastic.Round] = []
    redelastic.survive(rounds.append, redelastic.State())
    [only] = rounds
    assert (only.rank, only.size, only.epoch, only.store) == (0, 1, 0, None)
    assert not dist.is_initialized()


def _train_once() -> tuple[int, int, int, bool]:
    state = redelastic.State()
    seen: list[redelastic.Round] = []

    def train(this: redelastic.Round) -> None:
        seen.append(this)
        assert this.store is not None
        this.store.add("count", 1)
        while this.store.add("count", 0) < this.size:
            pass
        dist.barrier()  # the store ends with the process of rank 0, which must not be the first to go
        state.commit()

    redelastic.survive(train, state)
    return seen[0].rank, seen[0].size, state.step, dist.is_initialized()


def test_processes_of_another_launcher_train_once_in_a_group(processes: Processes) -> None:
    with reserved_port() as port:
        for rank in range(2):
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
            processes.start(_train_once, **place)
        assert processes.values() == [(0, 2, 1, False), (1, 2, 1, False)]


def _train_shards(shards: int) -> tuple[tuple[int, ...], list[list[int]]]:
    seen: list[redelastic.Round] = []
    redelastic.survive(seen.append, redelastic.State(), shards=shards)
    mesh = seen[0].mesh
    assert mesh is not None
    assert mesh.mesh_dim_names == ("replicate", "shard")
    return tuple(mesh.shape), mesh.mesh.tolist()


@pytest.mark.parametrize("shards", [1, 2])
def test_a_round_of_shards_has_a_mesh(processes: Processes, shards: int) -> None:
    with reserved_port() as port:
        for rank in range(2):
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
            processes.start(_train_shards, shards, **place, LOCAL_WORLD_SIZE="2")
        mesh = [[0], [1]] if shards == 1 else [[0, 1]]
        assert processes.values() == [((2 // shards, shards), mesh)] * 2


@pytest.mark.parametrize("shards", [0, 3])
def test_a_node_that_does_not_have_all_shards_joins_no_round(monkeypatch: pytest.MonkeyPatch, shards: int) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=f"shards={shards}.*has to be a multiple of the shards; it is 2. Set it by"):
        redelastic.survive(bool, redelastic.State(), shards=shards)


def enter(channels: WorkerChannels, epoch: int, *ranks: int, size: int = 2) -> dist.TCPStore:
    """Have workers enter a round; returns its store, which ends with the returned object."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(size)}
    agents = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    for rank in ranks:
        channels.send_round(rank, {**place, **agents, "RANK": str(rank), "REDELASTIC_EPOCH": str(epoch)})
    return store


def _survive() -> tuple[int, int]:
    seen: list[redelastic.Round] = []
    redelastic.survive(seen.append, redelastic.State())
    return seen[0].rank, seen[0].epoch


def test_a_group_that_was_cut_while_it_was_made_is_no_hindrance_to_the_next(processes: Processes) -> None:
    channels = WorkerChannels(2, lambda: None)
    for local_rank in range(2):
        processes.start(_survive, **channels.environment(local_rank))
    until(lambda: len(channels.parked) == 2, "both are ready")

    first = enter(channels, 1, 0)
    empty = first.num_keys()
    until(lambda: first.num_keys() > empty, "the first waits for the second")
    channels.abort(1)
    until(lambda: 0 in channels.parked, "the first has left")
    second = enter(channels, 2, 0, 1)
    assert processes.values() == [(0, 2), (1, 2)]
    del second  # the server of their store
    channels.close()


def _take_part(last: int) -> None:
    state = redelastic.State()

    def train(this: redelastic.Round) -> None:
        assert this.store is not None
        this.store.set(f"pid/{this.rank}", str(os.getpid()))
        while this.epoch < last:
            state.commit()

    redelastic.survive(train, state)


def test_a_peer_that_is_not_in_the_next_round_keeps_its_connections(processes: Processes) -> None:
    """It may be frozen, and still in a collective: gloo can miss a reset, and wait for good."""
    channels = WorkerChannels(2, lambda: None)
    for local_rank in range(2):
        processes.start(_take_part, 3, **channels.environment(local_rank))
    until(lambda: len(channels.parked) == 2, "both are ready")
    first = enter(channels, 1, 0, 1)
    until(lambda: first.check(["train/pid/0", "train/pid/1"]), "both take part")
    channels.abort(1)
    until(lambda: len(channels.parked) == 2, "both have left")
    second = enter(channels, 2, 0, size=1)
    until(lambda: second.check(["train/pid/0"]), "the first takes part in a round without the second")
    connections = psutil.Process(int(first.get("train/pid/1"))).net_connections("tcp")
    assert {connection.status for connection in connections} <= {psutil.CONN_ESTABLISHED, psutil.CONN_LISTEN}
    channels.abort(2)
    until(lambda: len(channels.parked) == 2, "it has left that, too")
    third = enter(channels, 3, 0, 1)
    assert processes.values() == [None, None]
    del third  # the server of their store
    channels.close()


def _wait_for_a_peer() -> None:
    state = redelastic.State()

    def train(this: redelastic.Round) -> None:
        assert this.store is not None
        if this.rank == 0 and this.epoch == 1:
            this.store.set("waits", "")
            dist.barrier()
        this.store.wait(["release"])

    # As with GPUs: NCCL learns that a peer has died, and the main thread gets no error.
    fails = {"RANK": "0", loop.EPOCH: "1"}
    vars(loop).update(IDLE_INTERVAL=0.01, nccl_has_failed=lambda: fails.items() <= os.environ.items())
    redelastic.survive(train, state)


def test_a_worker_whose_nccl_has_failed_leaves_by_itself(processes: Processes) -> None:
    channels = WorkerChannels(2, lambda: None)
    for local_rank in range(2):
        processes.start(_wait_for_a_peer, **channels.environment(local_rank))
    until(lambda: len(channels.parked) == 2, "both are ready")
    first = enter(channels, 1, 0, 1)
    until(lambda: 0 in channels.parked, "the first has left")
    assert 1 not in channels.parked
    channels.abort(1)
    until(lambda: len(channels.parked) == 2, "the second was told to leave")
    second = enter(channels, 2, 0, 1)
    second.set("train/release", "")
    assert processes.values() == [None, None]
    del first, second  # the servers of their stores
    channels.close()


class Held(NamedTuple):
    """What a worker holds when a round begins."""

    descriptors: int
    threads: int
    megabytes: float


def _train_in_rounds(last: int) -> tuple[Held, Held]:
    """What this process held at the beginning of an early round and of the last one."""
    model = torch.nn.Linear(1000, 1000)  # 4 MB, and its gradients
    optimizer = torch.optim.Adam(model.parameters())
    state = redelastic.State(model=model, optimizer=optimizer)
    process, held = psutil.Process(), []

    def train(this: redelastic.Round) -> None:
        memory = process.memory_info()
        own = memory.rss - memory.shared  # what it has read of libraries grows, and is the same for all processes
        held.append(Held(process.num_fds(), process.num_threads(), own / 1e6))
        ddp = DistributedDataParallel(model)
        while True:
            ddp(torch.ones(1, 1000)).sum().backward()
            optimizer.step()
            state.commit()
            assert this.store is not None
            this.store.set(f"stepped/{this.rank}", "")
            if this.epoch == last:
                return

    redelastic.survive(train, state)
    return held[14], held[-1]


@pytest.mark.parametrize("rounds", quick_first([30, 200]))
def test_a_worker_holds_no_more_after_many_rounds(processes: Processes, rounds: int) -> None:
    channels = WorkerChannels(2, lambda: None)
    for local_rank in range(2):
        processes.start(_train_in_rounds, rounds, **channels.environment(local_rank))
    until(lambda: len(channels.parked) == 2, "both are ready")
    for epoch in range(1, rounds + 1):
        store = enter(channels, epoch, 0, 1)
        if epoch < rounds:
            until(partial(store.check, ["train/stepped/0", "train/stepped/1"]), "both have made a step")
            channels.abort(epoch)
            until(lambda: len(channels.parked) == 2, "both have left")
    for early, late in processes.values():
        assert late.descriptors <= early.descriptors
        assert late.threads <= early.threads
        assert late.megabytes < early.megabytes + 40  # what one round has and the next needs anew: 8
    channels.close()


def test_a_group_that_cannot_be_made_is_given_up_before_its_workers_have_to_have_parked() -> None:
    gloo_waits_for_a_connection = 5 * MAKE_TIMEOUT
    longest = max(2 * CONNECT_TIMEOUT, MEET_TIMEOUT, gloo_waits_for_a_connection)
    assert longest.total_seconds() <= 0.8 * AgentOptions().park_timeout


def _fail() -> None:
    def train(_: redelastic.Round) -> None:
        raise ValueError("no data")

    redelastic.survive(train, redelastic.State())


def test_an_error_of_the_script_is_not_hidden(processes: Processes) -> None:
    processes.start(_fail)
    assert [outcome.error for outcome in processes.results()] == ["ValueError: no data"]


def _run_script(path: str, *args: str) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    sys.argv[:] = [path, *args]
    runpy.run_path(path, run_name="__main__")


def test_the_example_of_the_page_runs_alone(tmp_path: Path, processes: Processes) -> None:
    source = (Path(__file__).parents[2] / "examples" / "train_surviving.py").read_text()
    script = tmp_path / "script.py"
    script.write_text(source.replace("STEPS = 300", "STEPS = 100").replace("PACE = 0.1", "PACE = 0"))
    processes.start(_run_script, str(script), str(tmp_path / "checkpoint.pt"))
    processes.values()
    assert (tmp_path / "checkpoint.pt").stat().st_size > 0
