"""The Lua does what the oracle says: the same random events on both, every reply and all that is stored compared.

``REDELASTIC_ORACLE_EXAMPLES=20000`` makes it a long run. A failure prints the events in their order, and a line that,
put above the test, repeats it exactly.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any, ClassVar, Final

import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from oracle import Beat, Close, Join, Leave, Reply, Request, Settings, State, apply

from redelastic import scripts
from redelastic.keys import RunKeys

EXAMPLES: Final = int(os.environ.get("REDELASTIC_ORACLE_EXAMPLES", "600"))
NODES: Final = "abcdefgh"
START: Final = 1_000_000_000  # of the clock that the test injects, in milliseconds
STATUS: Final = '{"state": "test"}'

nodes = st.sampled_from(NODES)
labels = st.sampled_from(("", "", "rack-1", "rack-2"))
sizes = st.sampled_from(((1, 1), (1, 2), (1, 4), (2, 2), (2, 3), (2, 4), (2, 5), (3, 4), (3, 5)))
# Below, at and above: one beat, a last call, a silence that is the server's own (1.5 beats), a lease; and back.
durations = st.sampled_from((1, 400, 1999, 2000, 2500, 3000, 3001, 5999, 6000, 6001, 60_000, -1, -700, -10_000))


class Server:
    """The verbs on a real server, whose clock the test sets.

    The scripts' text is the real one but for the call of TIME. Only the status keys live by the server's own clock; of
    those nothing but the `left` of nodes that have gone is compared: it lives for two hours.
    """

    _numbers = itertools.count()

    def __init__(self, client: redis.Redis) -> None:
        self.keys = RunKeys(f"oracle-{os.getpid()}-{next(self._numbers)}")
        self._client = client
        self._clock = f"{self.keys.run}:clock"
        self._verbs = {
            request: client.register_script(on_injected_clock(script.text))
            for request, script in (
                (Join, scripts.JOIN),
                (Beat, scripts.BEAT),
                (Leave, scripts.LEAVE),
                (Close, scripts.CLOSE),
            )
        }

    def apply(self, now: int, request: Request) -> Reply:
        keys = [*self.keys.types, self.keys.status(request[0])]
        args: list[Any] = [*request]
        if isinstance(request, Join | Beat):
            store = self.keys.store(request.after if isinstance(request, Join) else 0)
            keys += [store.data, store.waits, store.once]
        if isinstance(request, Join):
            args = [*request[:4], STATUS, *request.settings]
        elif isinstance(request, Beat):
            args = [*request, STATUS]
        elif isinstance(request, Leave):
            args[2] = int(request.finished)
        with self._client.pipeline(transaction=False) as pipeline:
            pipeline.delete(self._clock)
            pipeline.rpush(self._clock, now // 1000, now % 1000 * 1000 + 999)  # no script may round up
            self._verbs[type(request)](keys, args, client=pipeline)
            raw = pipeline.execute()[-1]
        reply = tuple(
            part.decode() if isinstance(part, bytes) else part
            for part in (raw if isinstance(raw, list) else [raw])
            if part is not None
        )
        if reply[:1] == ("waiting",):
            entries: Any = self._client.xrange(self.keys.wake)
            ids = [entry_id.decode() for entry_id, _ in entries]
            place = 0 if reply[2] == "0-0" else ids.index(reply[2]) + 1
            reply = (*reply[:2], place, *reply[3:])
        return reply

    def stored(self) -> dict[str, Any]:
        """Everything, in the form of :func:`stored`."""
        run, ranks, members, candidates, leases, endpoints, node_labels, wake = self.keys.types
        statuses = [self.keys.status(node) for node in NODES]
        with self._client.pipeline(transaction=False) as pipeline:
            for key in (run, endpoints, node_labels):
                pipeline.hgetall(key)
            pipeline.smembers(members)
            for key in (ranks, candidates, leases):
                pipeline.zrange(key, 0, -1, withscores=True)
            pipeline.xrange(wake)
            pipeline.mget(statuses)
            for key in (*self.keys.types, *statuses):
                pipeline.pttl(key)
            replies = pipeline.execute()
        hashes = [{k.decode(): v.decode() for k, v in reply.items()} for reply in replies[:3]]
        zsets = [{k.decode(): int(v) for k, v in reply} for reply in replies[4:7]]
        assert all(ttl != -1 for ttl in replies[9:]), "every key has a time to live"
        return {
            "run": hashes[0],
            "endpoints": hashes[1],
            "labels": hashes[2],
            "members": {node.decode() for node in replies[3]},
            **dict(zip(("ranks", "candidates", "leases"), zsets, strict=True)),
            "wake": [{k.decode(): v.decode() for k, v in fields.items()} for _, fields in replies[7]],
            "left": {node for node, status in zip(NODES, replies[8], strict=True) if status == b"left"},
        }

    def wipe(self) -> None:
        self._client.delete(*self.keys.types, *(self.keys.status(node) for node in NODES))


def on_injected_clock(text: str) -> str:
    """The script with its clock read from a key that the test sets: seconds and microseconds, as TIME gives them."""
    assert text.count("redis.call('TIME')") == 1
    return text.replace("redis.call('TIME')", "redis.call('LRANGE', KEYS[1] .. ':clock', 0, -1)")


def stored(state: State) -> dict[str, Any]:
    """How the oracle's state has to look in Redis."""
    names = (
        "epoch",
        "size",
        "master",
        "lost",
        "completed_at",
        "closed",
        "broken",
        "member_lost",
        "deadline",
        "beat_at",
        "ttl",
    )
    run = {name: getattr(state, name) for name in names} | {"arrivals": state.arrivals or None}
    run |= state.settings._asdict() if state.settings else {}
    run["ttl"] = state.ttl
    parts = ("endpoints", "labels", "members", "ranks", "candidates", "leases", "left")
    return {
        "run": {name: str(value) for name, value in run.items() if value is not None},
        **{part: getattr(state, part) for part in parts},
        "wake": [{name: str(value) for name, value in entry._asdict().items()} for entry in state.wake],
    }


class Equivalence(RuleBasedStateMachine):
    """Nodes that do what they like, in any order, with replies and requests lost, late and doubled."""

    connect: ClassVar[Callable[[], redis.Redis]]

    def __init__(self) -> None:
        super().__init__()
        self.server = Server(type(self).connect())
        self.state, self.now = State(), START
        self.sent: list[Request] = []
        self.applied: list[tuple[Request, int, Reply]] = []
        self.held = dict.fromkeys(NODES, 0)
        self.settings = Settings(1, 2)

    def send(self, request: Request) -> Reply:
        """Apply to both; compare."""
        before = stored(self.state)
        self.state, reply = apply(self.state, self.now, request)
        assert self.server.apply(self.now, request) == reply
        found, expected = self.server.stored(), stored(self.state)
        assert found == expected, f"{request}: {before}"
        self.applied.append((request, self.now, reply))
        return reply

    def send_new(self, request: Request, lost: bool = False) -> None:
        self.sent.append(request)
        reply = self.send(request)
        if reply[:1] == ("complete",) and not lost:
            self.held[request[0]] = int(reply[1])

    @initialize(
        size=sizes,
        times=st.sampled_from(((3000, 0), (3000, 2500), (0, 0))),
        first=st.permutations(NODES),
        others=st.integers(-1, 2),
    )
    def begin(self, size: tuple[int, int], times: tuple[int, int], first: list[str], others: int) -> None:
        self.settings = Settings(*size, *times)
        for node in first[: size[0] + others]:
            self.join(node, "", False)

    @rule(node=nodes, label=labels, lost=st.booleans())
    def join(self, node: str, label: str, lost: bool) -> None:
        endpoint = f"{node} {40_000 + len(self.sent)}"
        self.send_new(Join(node, self.held[node], endpoint, label, self.settings), lost)

    @rule(lost=st.booleans())
    def all_candidates_ask_again(self, lost: bool) -> None:
        """As they do when they are woken: so that rounds follow on rounds."""
        for node in sorted(self.state.candidates | dict.fromkeys(self.state.members)):
            self.join(node, "", lost)

    @rule(node=nodes, size=sizes)
    def join_a_run_of_another_size(self, node: str, size: tuple[int, int]) -> None:
        self.send_new(Join(node, self.held[node], f"{node} 1", "", Settings(*size)))

    @rule(node=nodes)
    def beat(self, node: str) -> None:
        self.send_new(Beat(node, self.settings.lease))

    @rule(silent=st.sets(nodes, max_size=2), times=st.integers(1, 3), late=st.sampled_from((0, 0, 1000, 1001)))
    def some_beat_for_a_while(self, silent: set[str], times: int, late: int) -> None:
        for _ in range(times):
            self.now += self.settings.interval + late
            for node in sorted(set(self.state.leases) - silent):
                self.beat(node)

    @rule(pick=st.integers(0, 7), finished=st.sampled_from((False, False, False, True)))
    def leave(self, pick: int, finished: bool) -> None:
        present = sorted(self.state.candidates) + sorted(self.state.members) or ["a"]
        self.send_new(Leave(present[pick % len(present)], "went", finished))

    @rule(node=nodes, finished=st.booleans())
    def leave_without_having_come(self, node: str, finished: bool) -> None:
        if node not in self.state.leases:
            self.send_new(Leave(node, "went", finished))

    @rule(pick=st.integers(0, 7), lost=st.booleans())
    def member_regroups(self, pick: int, lost: bool) -> None:
        if members := sorted(self.state.members):
            self.join(members[pick % len(members)], "", lost)

    @rule(node=nodes, odds=st.integers(0, 5))
    def close(self, node: str, odds: int) -> None:
        if odds == 5:  # nothing happens any more in a run that is closed
            self.send_new(Close(node, self.settings.ttl))

    @rule()
    def last_request_again(self) -> None:
        """I8: the reply was lost, so it is sent again, and nothing changes."""
        if not self.applied:
            return
        request, at, reply = self.applied[-1]
        if at != self.now:
            return
        before = stored(self.state)
        again = self.send(request)
        assert stored(self.state) == before
        assert again == reply or isinstance(request, Beat | Leave)  # those tell how the node stood before

    @rule(data=st.data())
    def old_request_again(self, data: st.DataObject) -> None:
        if self.sent:
            self.send(data.draw(st.sampled_from(self.sent[-20:])))

    @rule(by=durations)
    def time_passes(self, by: int) -> None:
        self.now += by

    @rule(late=st.sampled_from((-1, 0, 1)))
    def deadline_passes(self, late: int) -> None:
        if self.state.deadline is not None:
            self.now = self.state.deadline + late

    @rule(late=st.sampled_from((-1, 0, 1)))
    def first_lease_runs_out(self, late: int) -> None:
        if self.state.leases:
            self.now = min(self.state.leases.values()) + late

    @rule(odds=st.integers(0, 5))
    def data_are_lost(self, odds: int) -> None:
        if odds == 5:
            self.server.wipe()
            self.state = State()
            self.applied.clear()


@pytest.mark.timeout(600)  # half a minute, and more where others compute as well
def test_the_lua_does_what_the_oracle_says(client: redis.Redis) -> None:
    class Machine(Equivalence):
        connect = staticmethod(lambda: client)

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=40,
            deadline=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
