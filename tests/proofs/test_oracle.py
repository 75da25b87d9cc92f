"""The Lua does what the oracle says: the same random events on both, comparing every reply and everything stored.

``REDELASTIC_ORACLE_EXAMPLES=20000`` makes it a long run. A failure prints the events in order, and a line that,
put above the test, repeats it exactly.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final

import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from redelastic.rendezvous.node import RunThen
from tests.proofs.oracle import apply
from tests.proofs.oracle_state import (
    NOTHING,
    Admit,
    Beat,
    Charge,
    Close,
    Drain,
    Join,
    Known,
    Leave,
    Readmit,
    Reply,
    Request,
    RollCall,
    Save,
    Settings,
    State,
    cause,
)
from tests.proofs.twin import HOSTS, NODES, START, Server, stored
from tests.support.long_tests import LONG

EXAMPLES: Final = int(os.environ.get("REDELASTIC_ORACLE_EXAMPLES", "500" if LONG else "60"))

nodes = st.sampled_from(NODES)
labels = st.sampled_from(("", "", "rack-1", "rack-2"))
sizes = st.sampled_from(((1, 1), (1, 2), (1, 4), (2, 2), (2, 3), (2, 4), (2, 5), (3, 4), (3, 5)))
# Below, at and above: one beat, a last call, a silence of the server (1.5 beats), a lease; and clocks set back.
durations = st.sampled_from((1, 400, 1999, 2000, 2500, 3000, 3001, 5999, 6000, 6001, 60_000, -1, -700, -10_000))
run_thens = st.sampled_from(("goes on", "goes on", "goes on", "goes on", "closes", "stops"))
steps = st.sampled_from((-1, -1, -1, 0, 0, 1, 2, 7, 2**63 - 1))
news_values = st.sampled_from((-1, 0, 1, 1, 2))  # see `Charge.news`
limits = st.tuples(*(st.sampled_from((-1, -1, 0, 1, 2, 3)) for _ in range(3)))
admissions = st.sampled_from(((0, 0), (0, 0), (2500, 0), (2500, 4000), (0, 4000), (-1, 0), (-1, 4000)))
finals = st.sampled_from((0, 0, 0, 0, 1))
asides = st.sampled_from(("", "", "heard of the roll call", "heard of another roll call", "has just found Redis again"))


class Equivalence(RuleBasedStateMachine):
    """Random requests of nodes in any order, with requests and replies lost, late and doubled."""

    connect: ClassVar[Callable[[], redis.Redis]]

    def __init__(self) -> None:
        super().__init__()
        self.server = Server(type(self).connect())
        self.state, self.now = State(), START
        self.sent: list[Request] = []
        self.applied: list[tuple[Request, int, Reply]] = []
        self.held = dict.fromkeys(NODES, NOTHING)  # what each node knows of its round,
        self.last = dict.fromkeys(NODES, 0)  # and the last epoch that it held, perhaps under another id
        self.replica: tuple[dict[str, tuple[bytes, int]], State] | None = None
        self.settings = Settings(1, 2)
        self.admit = (0, 0)  # how new nodes are let in

    def send(self, request: Request) -> Reply:
        """Apply to both; compare."""
        before = self.state
        self.state, reply = apply(before, self.now, request)
        assert self.server.apply(self.now, request) == reply
        found, expected = self.server.stored(), stored(self.state)
        assert found == expected, f"{request}: {stored(before)}"
        self.applied.append((request, self.now, reply))
        return reply

    def send_new(self, request: Request, lost: bool = False) -> None:
        self.sent.append(request)
        reply = self.send(request)
        if reply[:1] == ("complete",) and not lost:
            held = Known(*reply[1:6])  # type: ignore[arg-type]
            self.held[request[0]] = held._replace(incarnation=str(reply[7]))
            self.last[request[0]] = self.held[request[0]].epoch
        if reply == ("left",):
            incarnation = self.held[request[0]].incarnation
            self.held[request[0]] = NOTHING._replace(incarnation=incarnation)  # it comes back as a new node

    @initialize(
        size=sizes,
        times=st.sampled_from(((3000, 0), (3000, 2500), (0, 0))),
        first=st.permutations(NODES),
        others=st.integers(-1, 2),
        admit=admissions,
    )
    def begin(
        self, size: tuple[int, int], times: tuple[int, int], first: list[str], others: int, admit: tuple[int, int]
    ) -> None:
        self.settings, self.admit = Settings(*size, *times), admit
        for node in first[: size[0] + others]:
            self.join(node, "", False)

    def known(self, node: str, aside: str) -> Known:
        """What a node reports of its round, of roll calls and of itself: see `asides`."""
        heard = (self.state.roll_called_at or 0) - (aside == "heard of another roll call")
        return self.held[node]._replace(
            heard=heard if aside.startswith("heard") else 0, steady=int(aside != "has just found Redis again")
        )

    @rule(node=nodes, label=labels, lost=st.booleans(), aside=asides)
    def join(self, node: str, label: str, lost: bool, aside: str = "") -> None:
        endpoint = f"{node} {40_000 + len(self.sent)}"
        known = self.known(node, aside)
        parked = len(self.sent) % 2
        self.send_new(Join(node, self.last[node], endpoint, label, self.settings, known, *self.admit, parked), lost)

    @rule(lost=st.booleans())
    def all_candidates_ask_again(self, lost: bool) -> None:
        """As when they are woken, so that rounds follow one another."""
        for node in sorted(self.state.candidates | dict.fromkeys(self.state.members)):
            self.join(node, "", lost)

    @rule(node=nodes, size=sizes)
    def join_a_run_of_another_size(self, node: str, size: tuple[int, int]) -> None:
        self.send_new(Join(node, self.held[node].epoch, f"{node} 1", "", Settings(*size)))

    @rule(node=nodes, aside=asides)
    def beat(self, node: str, aside: str = "") -> None:
        self.send_new(Beat(node, self.settings, self.known(node, aside)))

    @rule(silent=st.sets(nodes, max_size=2), times=st.integers(1, 3), late=st.sampled_from((0, 0, 1000, 1001)))
    def some_beat_for_a_while(self, silent: set[str], times: int, late: int) -> None:
        for _ in range(times):
            self.now += self.settings.interval + late
            for node in sorted(set(self.state.leases) - silent):
                self.beat(node)

    def present(self, pick: int) -> str:
        """Some candidate or member."""
        nodes = sorted(self.state.candidates) + sorted(self.state.members) or ["a"]
        return nodes[pick % len(nodes)]

    @rule(pick=st.integers(0, 7), run_then=run_thens, aside=asides)
    def leave(self, pick: int, run_then: RunThen, aside: str) -> None:
        node = self.present(pick)
        self.send_new(Leave(node, ("reason", "went"), run_then, self.settings, self.known(node, aside)))

    @rule(node=nodes, run_then=run_thens)
    def leave_without_having_come(self, node: str, run_then: RunThen) -> None:
        if node not in self.state.leases:
            self.send_new(Leave(node, ("reason", "went"), run_then, self.settings, self.held[node]))

    @rule(pick=st.integers(0, 7), reason=st.sampled_from(("preempted", "by hand: 12:00")), timeout=st.integers(0, 9))
    def drain(self, pick: int, reason: str, timeout: int) -> None:
        self.send_new(Drain(self.present(pick), reason, timeout))

    @rule(timeout=st.integers(0, 9))
    def save(self, timeout: int) -> None:
        self.send_new(Save("by hand", timeout))

    @rule(joins=st.booleans(), off=st.sampled_from((0, 0, 0, -1)), place=st.sampled_from((0, 0, 0, -1, 5)))
    def all_have_saved(self, joins: bool, off: int, place: int) -> None:
        """Perhaps for another save, or in another round."""
        if joins:
            self.all_candidates_ask_again(lost=False)
        self.send_new(
            Admit(self.present(0), max(0, (self.state.epoch or 0) + off), max(0, (self.state.save or 0) + place))
        )

    @rule(late=st.sampled_from((-1, 0, 1)))
    def admission_goes_on(self, late: int) -> None:
        at = self.state.admit_from if self.state.save is None else self.state.admit_by
        if at is not None and at >= self.now:
            self.now = at + late
            self.all_candidates_ask_again(lost=False)

    @rule(node=nodes)
    def drain_any_node(self, node: str) -> None:
        self.send_new(Drain(node, "gone?", 1000))

    @rule(
        failures=st.lists(
            st.tuples(st.integers(0, 7), st.integers(0, 3), steps, news_values, st.booleans()), min_size=1, max_size=4
        ),
        limits=limits,
        final=finals,
        then=st.sampled_from(("", "regroup", "regroup", "one goes", "one goes")),
    )
    def workers_fail(
        self, failures: list[tuple[int, int, int, int, bool]], limits: tuple[int, int, int], final: int, then: str
    ) -> None:
        """On several nodes, which do not report in the order of failure; then a member without one may leave."""
        for pick, *when, unsure in failures:
            self.charge(self.present(pick), self.state.epoch or 0, when, limits, final, unsure=unsure)
        innocent = sorted(node for node in self.state.members if self.state.failed.get(node) != self.state.epoch)
        if then == "one goes" and innocent:
            self.send_new(Leave(innocent[0], ("reason", "went"), "goes on"))
        if then:
            self.all_candidates_ask_again(lost=False)

    @rule(node=nodes, off=st.integers(-2, 1), when=st.tuples(st.integers(0, 3), steps, news_values), limits=limits)
    def charge_any_node(self, node: str, off: int, when: tuple[int, int, int], limits: tuple[int, int, int]) -> None:
        self.charge(node, max(0, (self.state.epoch or 0) + off), when, limits, 0)

    @rule(
        pick=st.integers(0, 7),
        call=st.tuples(*map(st.sampled_from, ((0, 0, 0, 0, -1), (0, 1, 50, 5000), (500, 500, 20_000)))),
        answer=st.sets(nodes),
        end=st.sampled_from(
            ("", "in time", "looked at once", "looked at twice", "looked at twice", "by one who was away")
        ),
    )
    def call_roll(self, pick: int, call: tuple[int, int, int], answer: set[str], end: str) -> None:
        """Some nodes answer; then a node may check when the time is up, and again after the last chance."""
        node = self.present(pick)
        off, ago, timeout = call
        self.send_new(RollCall(node, max(0, (self.state.epoch or 0) + off), ago, timeout))
        for other in sorted(answer & set(self.state.leases)):
            self.now += 1
            self.beat(other, "heard of the roll call")
        for _ in range(("", "in time", "looked at once", "looked at twice").index(end) if "away" not in end else 1):
            if self.state.roll_until is not None:
                self.now = self.state.roll_until - (end == "in time")
                self.beat(node, "has just found Redis again" if "away" in end else "")

    @rule(late=st.sampled_from((-1, 0, 1)))
    def roll_call_ends(self, late: int) -> None:
        if self.state.roll_until is not None:
            self.now = self.state.roll_until + late

    @rule(host=st.sampled_from("xyz"))
    def readmit(self, host: str) -> None:
        self.send_new(Readmit(host, "by hand"))

    def charge(
        self, node: str, epoch: int, when: Sequence[int], limits: Sequence[int], final: int, *, unsure: bool = False
    ) -> None:
        ago, step, news = when
        budget, patience, limit = limits
        failure = ago, step, news, "exit code 1"
        host = "" if unsure else HOSTS[node]
        self.send_new(Charge(node, host, epoch, *failure, budget, patience, limit, final))

    @rule(pick=st.integers(0, 7), lost=st.booleans())
    def member_regroups(self, pick: int, lost: bool) -> None:
        if members := sorted(self.state.members):
            self.join(members[pick % len(members)], "", lost)

    @rule(node=nodes, odds=st.integers(0, 5), stop=st.integers(0, 1))
    def close(self, node: str, odds: int, stop: int) -> None:
        if odds == 5 or self.state.closed is not None:  # little happens in a closed run
            self.send_new(Close(f"by {node}", self.settings.ttl, stop))

    @rule()
    def last_request_again(self) -> None:
        """I8: the reply was lost, so it is sent again, and nothing changes."""
        if not self.applied:
            return
        request, at, reply = self.applied[-1]
        if at != self.now or isinstance(request, Save):  # a second request: the workers' next save serves both
            return
        before = stored(self.state)
        again = self.send(request)
        assert stored(self.state) == before
        assert again == reply or isinstance(request, Beat | Leave | Readmit | Admit)  # these report the state before

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

    @rule(odds=st.integers(0, 3))
    def the_replica_stops_following(self, odds: int) -> None:
        if odds == 3:
            self.replica = self.server.save(), self.state

    @rule()
    def the_server_fails_over(self) -> None:
        """The server fails over to a replica that has not seen the last writes."""
        if self.replica:
            (saved, self.state), self.replica = self.replica, None
            self.server.load(saved)
            self.applied.clear()

    @rule(node=nodes, other=nodes, wrong=st.sampled_from(("rank", "size", "master", "completed_at", "closed")))
    def beat_of_another_round(self, node: str, other: str, wrong: str) -> None:
        """With the same epoch, as after a split brain."""
        known = self.held[other]
        others = {
            "rank": known.rank + 1,
            "size": known.size + 1,
            "master": "x 1",
            "completed_at": 1,
            "closed": cause("closed", "x", ("reason", "over")),
        }
        value: Any = others[wrong]
        if wrong != "closed" or len(self.sent) % 9 == 0:
            self.send_new(Beat(node, self.settings, known._replace(**{wrong: value})))


@pytest.mark.timeout(600 + EXAMPLES / 5)
def test_the_lua_does_what_the_oracle_says(client: redis.Redis) -> None:
    class Machine(Equivalence):
        connect = staticmethod(lambda: client)

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=EXAMPLES,
            derandomize="REDELASTIC_ORACLE_EXAMPLES"
            not in os.environ,  # CI has to be reproducible; a long run explores
            stateful_step_count=40,
            deadline=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
