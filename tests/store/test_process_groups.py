"""Process groups on RedisStore: real processes with gloo, by ``store=`` and by ``init_method="redis://…"``."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
from datetime import timedelta
from typing import Any

import pytest
import redis
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

from redelastic import RedisStore, register_init_method
from redelastic.redis import connection
from redelastic.redis.server import RedisServer
from redelastic.rendezvous.handler import EPOCH_VARIABLE, PREFIX_VARIABLE
from tests.support.calls import takes
from tests.support.commands import until
from tests.support.nodes import NodeFactory
from tests.support.peers import lossy_proxy
from tests.support.processes import Processes
from tests.support.servers import HOST, reserved_port

TIMEOUT = timedelta(seconds=60)  # of the groups
LEASE = 6.0  # of the nodes, in seconds: keep_alive_interval=0.3, twenty times; a busy machine may stand still for less
SOON = 20.0  # within which what is due at once has to happen on a busy machine, in seconds


def total() -> float:
    """The sum of rank + 1 over the default group: a proof that it works, and of its size."""
    number = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(number)
    return float(number)


# -- store=


def _init(url: str, run_id: str, rank: int, size: int, name: str = "default") -> None:
    """Nothing in Python holds the store afterwards."""
    store = RedisStore(url, run_id, name)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    del store
    gc.collect()


def _collectives(url: str, run_id: str, rank: int, size: int) -> dict[str, Any]:
    _init(url, run_id, rank, size)
    seen: dict[str, Any] = {"total": total()}
    first_two: Any = dist.new_group([0, 1])
    if rank < 2:
        number = torch.tensor([1.0])
        dist.all_reduce(number, group=first_two)
        seen["new group"] = float(number)
    dist.barrier()
    dist.monitored_barrier(timeout=TIMEOUT)
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, {"rank": rank})
    seen["gathered"] = [each["rank"] for each in gathered]
    sent: list[Any] = ["from 1", (1, 2)] if rank == 1 else [None, None]
    dist.broadcast_object_list(sent, src=1)
    seen["broadcast"] = sent
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [f"for {i}" for i in range(size)] if rank == 0 else None, src=0)
    seen["scattered"] = mine[0]
    return seen


def test_collectives_on_a_store_that_only_torch_holds(server: RedisServer, run_id: str, processes: Processes) -> None:
    for rank in range(3):
        processes.start(_collectives, server.url, run_id, rank, 3)
    for rank, seen in enumerate(processes.values()):
        expected: dict[str, Any] = {"total": 6.0, "gathered": [0, 1, 2], "broadcast": ["from 1", (1, 2)]}
        expected["scattered"] = f"for {rank}"
        if rank < 2:
            expected["new group"] = 2.0
        assert seen == expected


def _ddp_step(url: str, run_id: str, rank: int, size: int) -> list[float]:
    _init(url, run_id, rank, size)
    torch.manual_seed(rank)  # each rank begins elsewhere: DDP hands out rank 0's weights
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    model(torch.full((2, 4), float(rank))).sum().backward()
    weights, gradients = model.module.weight, model.module.weight.grad
    assert gradients is not None
    return [*weights.detach().flatten().tolist(), *gradients.flatten().tolist()]


def test_a_ddp_step_gives_all_ranks_the_same_gradients(server: RedisServer, run_id: str, processes: Processes) -> None:
    for rank in range(2):
        processes.start(_ddp_step, server.url, run_id, rank, 2)
    first, second = processes.values()
    assert first == second
    assert first[4:] == [1.0] * 4, "the mean of 2 * 0 and 2 * 1"


def _again(url: str, run_id: str, rank: int, size: int) -> list[float]:
    totals = []
    for attempt in range(3):
        _init(url, run_id, rank, size, f"attempt-{attempt}")
        totals.append(total())
        dist.destroy_process_group()
    return totals


def test_a_group_is_destroyed_and_made_again(server: RedisServer, run_id: str, processes: Processes) -> None:
    for rank in range(2):
        processes.start(_again, server.url, run_id, rank, 2)
    assert processes.values() == [[3.0] * 3] * 2


def _once_more(url: str, run_id: str, rank: int, size: int) -> float:
    _init(url, run_id, rank, size)
    return total()


def test_a_second_start_on_the_store_of_the_first_is_an_error(
    server: RedisServer, run_id: str, processes: Processes
) -> None:
    for rank in range(2):
        processes.start(_once_more, server.url, run_id, rank, 2)
    assert processes.values() == [3.0] * 2
    for rank in range(2):
        processes.start(_once_more, server.url, run_id, rank, 2)
    for rank, outcome in enumerate(processes.results()):
        assert outcome.error.startswith("DistStoreError: ")
        assert f"the key '0//cpu//0/{rank}'" in outcome.error
        assert f"delete the key 'redelastic:{{{run_id}}}:store:default'" in outcome.error


# -- init_method="redis://…"


def _join(url: str, **arguments: Any) -> tuple[int, int, float]:
    dist.init_process_group("gloo", init_method=url, timeout=TIMEOUT, **arguments)
    return dist.get_rank(), dist.get_world_size(), total()


def _url(server: RedisServer, run_id: str, **options: object) -> str:
    options = {"run_id": run_id, "keep_alive_interval": 0.3, "keep_alive_max_attempt": 20} | options
    return f"{server.url}?" + "&".join(f"{name}={value}" for name, value in options.items())


def _join_as(url: str, rank: int, size: int) -> tuple[int, int, float]:
    return _join(url, rank=rank, world_size=size)


@pytest.mark.parametrize("source", ["arguments", "no host", "environment", "size alone", "rendezvous"])
def test_rank_and_world_size(server: RedisServer, run_id: str, processes: Processes, source: str) -> None:
    url = _url(server, run_id)
    for rank in range(2):
        if source == "arguments":
            processes.start(_join_as, url, rank, 2)
        elif source == "no host":
            own = url.replace(server.url, "redis://")
            processes.start(_join_as, own, rank, 2, REDELASTIC_REDIS_URL=server.url)
        elif source == "environment":
            processes.start(_join, url, RANK=str(rank), WORLD_SIZE="2")
        elif source == "size alone":
            processes.start(_join, url, WORLD_SIZE="2")
        else:
            processes.start(_join, _url(server, run_id, min_nodes=2, max_nodes=2))
    joined = processes.values()
    if source in ("arguments", "no host", "environment"):
        assert joined == [(0, 2, 3.0), (1, 2, 3.0)]
    assert sorted(joined) == [(0, 2, 3.0), (1, 2, 3.0)]


def test_a_group_of_as_many_as_come(server: RedisServer, run_id: str, processes: Processes) -> None:
    url = _url(server, run_id, min_nodes=3, max_nodes=4, last_call_timeout=1.5)
    for _ in range(3):
        processes.start(_join, url)
    assert sorted(processes.values()) == [(0, 3, 6.0), (1, 3, 6.0), (2, 3, 6.0)]


@pytest.mark.parametrize("ranks", [(0, 0), (0, 2)], ids=["twice", "too high"])
def test_a_wrong_rank_fails_all_processes_at_once(
    server: RedisServer, run_id: str, processes: Processes, ranks: tuple[int, int]
) -> None:
    for rank in ranks:
        processes.start(_join_as, _url(server, run_id), rank, 2)
    outcomes = processes.results()
    refused = [o for o in outcomes if o.error.startswith("ValueError")]
    others = [o for o in outcomes if o not in refused]
    assert len(refused) == len(others) == 1
    assert ("used twice" if ranks == (0, 0) else "rank=2 is not below the world size of 2") in refused[0].error
    assert "Round 1" in others[0].error
    assert refused[0].error.partition(": ")[2][:20] in others[0].error, "they are told why"
    assert max(o.seconds for o in outcomes) < SOON


def test_processes_that_disagree_on_the_world_size(server: RedisServer, run_id: str, processes: Processes) -> None:
    url = _url(server, run_id, keep_alive_max_attempt=12, join_timeout=8)  # longer than a lease, which is waited for
    for rank, size in ((0, 2), (1, 3)):
        processes.start(_join_as, url, rank, size)
    errors = [outcome.error for outcome in processes.results()]
    assert sum("to 3 nodes, but" in error or "to 2 nodes, but" in error for error in errors) == 1, errors
    assert sum("had no new round" in error for error in errors) == 1, errors


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK|rank='one' must be a whole number"),
        ({"RANK": "0"}, "lacks min_nodes"),
    ],
)
def test_a_wrong_environment(
    server: RedisServer,
    run_id: str,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    message: str,
) -> None:
    register_init_method()
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        dist.init_process_group("gloo", init_method=_url(server, run_id))
    assert not dist.is_initialized()


def _join_and_leave_a_key(url: str) -> tuple[bool, float]:
    _join(url)
    store = dist.distributed_c10d._get_default_store()
    found = store.check(["left behind"])
    dist.barrier()
    store.set("left behind", "v")
    return found, total()


def test_two_groups_one_after_the_other_do_not_meet(server: RedisServer, run_id: str, processes: Processes) -> None:
    for _ in range(2):
        for _ in range(2):
            processes.start(_join_and_leave_a_key, _url(server, run_id, min_nodes=2, max_nodes=2))
        assert processes.values() == [(False, 3.0)] * 2


def _join_again_and_again(url: str) -> list[float]:
    totals = []
    for _ in range(3):
        totals.append(_join(url)[2])
        dist.destroy_process_group()
    return totals


@pytest.mark.parametrize("given", ["rank", "nothing"])
def test_a_group_by_url_is_made_again(server: RedisServer, run_id: str, processes: Processes, given: str) -> None:
    for rank in range(2):
        if given == "rank":
            processes.start(_join_again_and_again, _url(server, run_id), RANK=str(rank), WORLD_SIZE="2")
        else:
            processes.start(_join_again_and_again, _url(server, run_id, min_nodes=2, max_nodes=2))
    assert processes.values() == [[3.0] * 3] * 2


def _die_in_the_round(url: str, rank: int, size: int) -> None:
    """Goes as far as init_process_group does before it makes the group."""
    next(dist.rendezvous(url, rank, size, timeout=TIMEOUT))
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_killed_in_the_middle_ends_the_wait_of_the_others(
    server: RedisServer, run_id: str, processes: Processes
) -> None:
    url = _url(server, run_id)
    for rank in range(2):
        processes.start(_join_as, url, rank, 3)
    processes.start(_die_in_the_round, url, 2, 3)
    *others, killed = processes.results()
    assert killed.error == "killed"
    for outcome in others:
        assert "lost its lease" in outcome.error
        assert "Round 1" in outcome.error
        assert outcome.seconds < LEASE + SOON


def _hold_the_lock(url: str, rank: int, size: int) -> float:
    """Rank 0 lets no thread of its process run for three default leases, while the other waits for it in the store."""
    _join_as(url, rank, size)
    if rank == 0:
        ctypes.PyDLL(None).sleep(3)
    group: Any = dist.new_group([0, 1])
    number = torch.tensor([1.0])
    dist.all_reduce(number, group=group)
    return float(number)


def test_a_call_that_holds_the_interpreter_s_lock_does_not_break_the_group(
    server: RedisServer, run_id: str, processes: Processes
) -> None:
    for rank in range(2):
        processes.start(_hold_the_lock, f"{server.url}?run_id={run_id}&keep_alive_interval=0.3", rank, 2)
    assert processes.values() == [2.0] * 2


def test_workers_of_our_agents_join_the_store_of_their_round(
    server: RedisServer, run_id: str, new_node: NodeFactory, processes: Processes
) -> None:
    info = new_node(1, 1).next_rendezvous()
    environment = {"TORCHELASTIC_RUN_ID": run_id, "REDELASTIC_EPOCH": "1", "WORLD_SIZE": "2"}
    for rank in range(2):
        processes.start(_join_again_and_again, server.url, RANK=str(rank), **environment)
    assert processes.values() == [[3.0] * 3] * 2
    assert any(key.startswith("worker/") for key in info.store.list_keys())


@pytest.mark.parametrize("epoch", [None, "1"], ids=["by a rendezvous", "in its agents' round"])
def test_a_first_connect_takes_the_caller_s_time(monkeypatch: pytest.MonkeyPatch, epoch: str | None) -> None:
    register_init_method()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "away")
    if epoch is not None:
        monkeypatch.setenv(EPOCH_VARIABLE, epoch)
    with reserved_port() as port, takes(0.5, 2), pytest.raises(RendezvousConnectionError, match="could not be reached"):
        dist.init_process_group(
            "gloo", init_method=f"redis://{HOST}:{port}", rank=0, world_size=1, timeout=timedelta(seconds=0.5)
        )


def _first_use(kind: str, url: str, run_id: str) -> None:
    """In a process of its own, whose node lives until it ends."""
    register_init_method()
    vars(connection)["CONNECT_TIMEOUT"] = 0.0
    if kind == "store":
        store: dist.Store = RedisStore(url, run_id, timeout=TIMEOUT)
    else:
        store = next(dist.rendezvous(f"{url}?run_id={run_id}", 0, 1, timeout=TIMEOUT))[0]
    store.set("here", "again")


@pytest.mark.parametrize("kind", ["store", "group"])
def test_a_first_connect_waits_for_redis_as_long_as_its_caller(
    kind: str, own_server: RedisServer, run_id: str, processes: Processes
) -> None:
    """Not only as long as those who name no time."""
    own_server.kill()
    with lossy_proxy(own_server) as (url, loss):
        processes.start(_first_use, kind, url, run_id)
        until(lambda: loss.proxy.accepted > 1, "it tries again")
        own_server.start()
        assert processes.values() == [None]


def _kept_after_groups(url: str) -> list[tuple[int, int]]:
    """Connections and stores of a process after each round, with two groups in each."""
    kept = []
    for epoch in range(1, 7):
        os.environ[EPOCH_VARIABLE] = str(epoch)
        for _ in range(2):
            _join(url)
            dist.destroy_process_group()
        gc.collect()
        with redis.Redis.from_url(url) as admin:
            kept.append((len(admin.client_list()), sum(isinstance(each, RedisStore) for each in gc.get_objects())))
    return kept


def test_a_worker_keeps_one_connection_and_its_last_stores(
    own_server: RedisServer, run_id: str, processes: Processes
) -> None:
    """Recoveries within a process make one group after the other, round for round."""
    environment = {"TORCHELASTIC_RUN_ID": run_id, "WORLD_SIZE": "1", "RANK": "0"}
    processes.start(_kept_after_groups, own_server.url, **environment)
    [kept] = processes.values()
    assert len(set(kept[1:])) == 1, kept


def _join_beside(url: str) -> tuple[str | None, str | None]:
    os.environ.update({EPOCH_VARIABLE: "3", PREFIX_VARIABLE: "ours"})
    _join(url, rank=0, world_size=1)
    return os.environ.get(EPOCH_VARIABLE), os.environ.get(PREFIX_VARIABLE)


def test_a_group_of_its_own_leaves_a_worker_its_fencing_token(
    server: RedisServer, run_id: str, processes: Processes
) -> None:
    processes.start(_join_beside, f"{server.url}?run_id={run_id}&key_prefix=theirs")
    assert processes.values() == [("3", "ours")]
