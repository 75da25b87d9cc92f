"""A user of the job may end a stream by writing the largest possible id: the run goes on, and people learn of it."""

from __future__ import annotations

import pytest
import redis

from redelastic.monitoring.control import RunControl
from redelastic.monitoring.event_log import EventLog
from redelastic.monitoring.events import LATEST, Cleared, Hung, Stopped
from redelastic.redis.connection import Connection
from redelastic.redis.errors import CorruptStateError
from redelastic.redis.keys import RunKeys
from tests.support.nodes import NodeFactory
from tests.support.servers import wait_until

LARGEST = f"{2**64 - 1}-{2**64 - 1}"


@pytest.fixture
def control(connection: Connection, keys: RunKeys) -> RunControl:
    return RunControl(connection, keys)


def cleared(control: RunControl) -> list[str]:
    return [event.stream for event in control.events() if isinstance(event, Cleared)]


@pytest.mark.fault("a user of the job writes the largest id into `events` or `wake`", "the stream begins anew")
@pytest.mark.parametrize("name", ["events", "wake"])
def test_a_stream_that_takes_no_more_entries(
    client: redis.Redis, new_node: NodeFactory, keys: RunKeys, control: RunControl, name: str
) -> None:
    """A member hears of the next change by its heartbeat at the latest: its place is behind all others."""
    node = new_node(1, 2, last_call_timeout=0)
    first = node.next_rendezvous()
    client.xadd(getattr(keys, name), {"event": "x"}, id=LARGEST)
    control.note(Hung(node=node.node.id))
    assert control.drain(node.node.id, "why", 30)
    wait_until(lambda: node.node.view.drain is not None, "the member hears of the drain")
    other = new_node(1, 2, node_name="other")
    assert first.world_size == 1
    assert control.state().members
    assert cleared(control) == [name]
    control.close("enough", stop=True)
    assert control.state().stopped
    wait_until(other.is_closed, "a new node hears of the end")


def test_a_member_that_has_read_the_largest_id_hears_on(
    client: redis.Redis, new_node: NodeFactory, keys: RunKeys, control: RunControl
) -> None:
    """A request to save is in no heartbeat's reply, and its id is lower."""
    node = new_node(1, 2, last_call_timeout=0)
    node.next_rendezvous()
    client.xadd(keys.wake, {"event": "x"}, id=LARGEST)
    asked = control.save("why", 30)
    assert asked
    wait_until(lambda: [save.place for save in node.node.view.saves] == [asked.place], "the member hears of it")


@pytest.mark.parametrize("name", ["events", "wake"])
def test_closing_a_run_whose_stream_takes_no_more_entries(
    client: redis.Redis, new_node: NodeFactory, keys: RunKeys, control: RunControl, name: str
) -> None:
    new_node(1, 2, last_call_timeout=0).next_rendezvous()
    client.xadd(getattr(keys, name), {"event": "x"}, id=LARGEST)
    assert isinstance(control.close("enough", stop=True), Stopped)
    assert control.state().stopped
    assert cleared(control) == [name]
    assert control.events()[-1].event == "stopped" or name == "wake"


@pytest.mark.parametrize("name", ["events", "wake"])
def test_a_close_that_fails_makes_no_run(client: redis.Redis, keys: RunKeys, control: RunControl, name: str) -> None:
    client.set(getattr(keys, name), "theirs")
    with pytest.raises(CorruptStateError, match="is a string, but a run needs a stream"):
        control.close("enough", stop=True)
    assert not client.exists(keys.run)


@pytest.mark.parametrize("name", ["events", "wake"])
def test_close_does_not_both_fail_and_close(
    client: redis.Redis, new_node: NodeFactory, keys: RunKeys, control: RunControl, name: str
) -> None:
    new_node(1, 2, last_call_timeout=0).next_rendezvous()
    client.set(getattr(keys, name), "theirs")
    with pytest.raises(CorruptStateError, match="is a string, but a run needs a stream"):
        control.close("enough", stop=True)
    assert not control.state().closed
    assert client.get(getattr(keys, name)) == b"theirs"


def test_a_reader_that_has_seen_the_largest_id_reads_on(
    client: redis.Redis, keys: RunKeys, control: RunControl
) -> None:
    log = EventLog(control)
    control.note(Hung(node="a"))
    client.xadd(keys.events, {"event": "x"}, id=LARGEST)
    for _ in range(2):
        log.read()
        assert [event.event for event in log.events] == ["hung", "x"]
    assert log.events[-1].time == LATEST
    control.note(Hung(node="a"))
    log.read()
    assert [event.event for event in log.events] == ["cleared", "hung"]


def test_a_stream_without_a_run(client: redis.Redis, keys: RunKeys, control: RunControl) -> None:
    """An agent may report before the run is there."""
    client.xadd(keys.events, {"event": "x"}, id=LARGEST)
    control.note(Hung(node="a"))
    assert [event.event for event in control.events()] == ["cleared", "hung"]
    assert client.pttl(keys.events) > 0
    assert not client.exists(keys.run)
