"""The channel between an agent and a worker that survives."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from redelastic.survival.channel import VARIABLE, Channel
from redelastic.workers.channels import WorkerChannels
from tests.support.waiting import Within

until = Within(20)


@pytest.fixture
def channels() -> Iterator[WorkerChannels]:
    made = WorkerChannels(2, lambda: None)
    yield made
    made.close()


def enter(channels: WorkerChannels, local_rank: int, monkeypatch: pytest.MonkeyPatch) -> Channel:
    """The end of a worker in this process."""
    for name, value in channels.environment(local_rank).items():
        monkeypatch.setenv(name, value)
    channel = Channel.open()
    assert channel is not None
    return channel


def test_commands_and_replies_arrive(channels: WorkerChannels, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (enter(channels, local_rank, monkeypatch) for local_rank in range(2))
    second.send(parked="", paused=False)
    until(lambda: channels.parked.keys() == {1}, "the worker is ready")
    channels.send_round(1, {"RANK": "4"})
    assert channels.parked == {}
    channels.send_round(0, {"RANK": "3", "ODD": "ä\n"})
    channels.abort(7)
    assert first.receive(10) == {"round": {"RANK": "3", "ODD": "ä\n"}}
    assert first.receive(10) == {"abort": 7}
    assert second.receive(10) == {"round": {"RANK": "4"}}
    assert second.receive(10) == {"abort": 7}
    assert not channels.arm(8)
    channels.settle(8)
    assert first.receive(10) == second.receive(10) == {"pause": 8}
    assert first.receive(10) == {"settle": 8}
    assert second.receive(0.01) is None
    first.send(parked="\x1b[1ma peer is gone", paused=False)
    until(lambda: 0 in channels.parked, "the worker has parked")
    parked = channels.parked[0]
    assert parked.why.endswith("a peer is gone")
    assert parked.why.isprintable()
    assert not parked.paused


def test_a_round_is_left_by_all_once_all_know_of_it(channels: WorkerChannels, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = workers = [enter(channels, local_rank, monkeypatch) for local_rank in range(2)]
    assert not channels.arm(3)
    first.send(armed=3)
    second.send(armed=2)
    until(lambda: channels.armed == {0: 3, 1: 2}, "one knows of it, one of an earlier one")
    assert not channels.arm(3)
    second.send(armed=3)
    until(lambda: channels.arm(3), "both know")
    for _ in range(2):
        channels.settle(3)
    assert [first.receive(10), first.receive(10), first.receive(0.01)] == [{"pause": 3}, {"settle": 3}, None]
    assert [second.receive(10), second.receive(0.01)] == [{"pause": 3}, None]
    for worker in workers:
        assert not channels.are_parked
        worker.send(parked="", paused=True)
    until(lambda: channels.are_parked, "both have left")
    assert all(parked.paused for parked in channels.parked.values())


def test_what_is_no_reply_is_ignored(channels: WorkerChannels, monkeypatch: pytest.MonkeyPatch) -> None:
    channel = enter(channels, 0, monkeypatch)
    odd: Any
    for odd in ("nonsense", [1], {}, None):
        channel.send(armed=odd)
        channel.send(odd=odd)
    channel.send(parked="no word of a pause")
    channel.send(armed=1)
    until(lambda: channels.armed == {0: 1}, "the last one has arrived")
    assert channels.parked == {}


def test_the_agents_end_ends_the_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    channels = WorkerChannels(1, lambda: None)
    channel = enter(channels, 0, monkeypatch)
    channels.close()
    with pytest.raises(EOFError):
        channel.receive(10)


def test_a_process_without_an_agent_has_no_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert Channel.open() is None


def test_a_workers_children_are_no_workers(channels: WorkerChannels, monkeypatch: pytest.MonkeyPatch) -> None:
    enter(channels, 0, monkeypatch)
    assert VARIABLE not in os.environ


def test_a_worker_in_another_process_namespace_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "/proc/1/fd/0:/proc/1/fd/1")
    monkeypatch.setenv("REDELASTIC_PID_NAMESPACE", "pid:[1]")
    with pytest.raises(RuntimeError, match="it runs in another process namespace"):
        Channel.open()
