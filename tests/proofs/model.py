"""Every interleaving of a few nodes on the oracle: I1 to I8 hold in each state, and each state leads to a round.

The search is breadth first over worlds. A world is what Redis holds and what each node knows. Time is an event: a
lease runs out, a deadline passes. A node acts only when a real one would: it asks again when an entry newer than the
id in its reply wakes it, or when the reply's `wait` has passed; it never polls. `settle` lets the nodes act, without
further faults, until none has a reason to: then the round has to be complete (I6).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Final, Literal

from tests.proofs.model_checks import check_failures, check_round, check_state
from tests.proofs.oracle import apply
from tests.proofs.oracle_state import (
    FORMER,
    Admit,
    Beat,
    Charge,
    Close,
    Drain,
    DrainWake,
    Join,
    Known,
    Leave,
    Reply,
    Request,
    RollCall,
    RollCallWake,
    SaveWake,
    Settings,
    State,
    Wake,
    replace,
)

NOW: Final = 1_000_000  # the clock stands still
RUN_THEN: Final[tuple[Literal["goes on", "closes"], ...]] = ("goes on", "closes")
NEW, ASKING, WAITING, TRAINING, GONE, DEAD = "new", "asking", "waiting", "training", "gone", "dead"


@dataclass(frozen=True)
class Node:
    """What one node knows. ASKING: its join took effect, but the reply was lost, so it sends it again."""

    name: str
    phase: str = NEW
    held: int = 0  # last epoch that it got
    woken: bool = False
    has_deadline: bool = False  # the last reply had a `wait`
    spare: bool = False  # the last reply called it one
    broken: bool = False  # it knows that its round is broken
    heard: int = 0  # the last round that it has read is broken, even before it entered it
    closed: bool = False  # it knows that the run is closed
    called: bool = False  # it has read of a roll call and has to answer
    knows: bool = False  # it has answered the last roll call, and its requests name it

    @property
    def alive(self) -> bool:
        return self.phase in (ASKING, WAITING, TRAINING)


@dataclass
class World:
    """A state of the run, its nodes, and ghost fields: facts that no node can see."""

    state: State
    nodes: tuple[Node, ...]
    holders: frozenset[str] = frozenset()  # members that neither rejoined nor left nor lost a lease
    dead: frozenset[str] = frozenset()  # dead when the last roll call opened, with a lease since
    sent: frozenset[tuple[str, int]] = frozenset()  # joins that may arrive once more
    faults: int = 1  # still to come: lost replies, late copies, frozen nodes, a closing
    story: tuple[str, ...] = field(default=(), compare=False)

    def key(self) -> object:
        """Equal for worlds that behave in the same way."""
        s = self.state
        arrivals = tuple(sorted(s.candidates, key=lambda node: s.candidates[node]))
        former = frozenset(node for node, place in s.candidates.items() if place < 0)
        leases = tuple(
            sorted((node, at > NOW, s.roll_until is not None and at <= s.roll_until) for node, at in s.leases.items())
        )
        record = (
            s.epoch,
            s.size,
            s.closed is None,
            s.broken is None,
            s.deadline is None or s.deadline > NOW,
            s.deadline,
            (s.admit_from, s.admit_by, s.save),
            (s.roll_until, s.roll_called_by, s.roll_last_chance, s.roll_again, s.roll_answered),
        )
        ranks = tuple(sorted(s.ranks.items()))
        return (
            (record, ranks, frozenset(s.members), arrivals, former, leases, frozenset(s.left)),
            self.nodes,
            (
                self.holders,
                self.dead if s.roll_until is not None else frozenset(),
                self.sent,
                self.faults,
            ),
        )

    def node(self, name: str) -> Node:
        return next(node for node in self.nodes if node.name == name)

    def changed(self, node: Node, **changes: object) -> World:
        new = replace(node, **changes)
        return replace(self, nodes=tuple(new if old.name == node.name else old for old in self.nodes))


class Model:
    """The moves, and what has to be true after each."""

    def __init__(
        self,
        settings: Settings,
        *,
        heartbeats: bool = True,
        failures: bool = False,
        roll_calls: bool = False,
        admission: tuple[int, int] = (0, 0),
    ) -> None:
        self.settings = settings
        self.admission = admission  # how new nodes are let in: time to save, minimum age of the round
        self.failures = failures  # whether workers fail, and nodes drain
        self.roll_calls = roll_calls or failures
        self.heartbeats = heartbeats  # whether a heartbeat may find what no wake-up announced

    # -- moves

    def request(self, world: World, request: Request, *, why: str) -> tuple[World, Reply]:
        """Apply a request, and check all that one transition must keep."""
        old, before = world.state, world.holders
        state, reply = apply(old, NOW, request)
        story = (
            *world.story,
            f"{why}: {request[0]} {type(request).__name__.lower()} -> {reply} {state.wake} {state.events}",
        )
        holders = world.holders
        if isinstance(request, Leave) or (isinstance(request, Join) and request.after == old.epoch):
            holders -= {request.node}
        check_failures(state, old, request, story)
        if any(entry.event == "complete" for entry in state.wake):
            assert not holders, ("I1", holders, story)
            assert state.epoch == (old.epoch or 0) + 1, ("I4", story)
            check_round(state, old, request, self.settings, story)
            holders = frozenset(state.ranks)
            assert old.roll_until is None or state.roll_until is None, ("no round completes during a roll call", story)
        else:
            assert (state.epoch or 0) == (old.epoch or 0), ("I4", story)
            assert state.ranks == old.ranks, ("I2: the ranks of a round never change", story)
        kinds = {entry.event for entry in state.wake}
        dead = (world.dead & set(state.leases)) - {event.node for event in state.events if event.event == "lost"}
        assert "answered" not in kinds or not dead, ("I7: the dead do not answer", story)
        if "roll_call" in kinds:
            dead = frozenset(n.name for n in world.nodes if n.phase == DEAD and n.name in state.leases)
        assert old.closed in (None, state.closed), ("I5", story)
        assert old.closed is None or state.epoch == old.epoch, ("I5", story)
        if request[0] in old.members and request[0] in state.candidates and old.leases[request[0]] > NOW:
            assert state.candidates[request[0]] == FORMER + old.ranks[request[0]], ("I2: it keeps its rank", story)
        again, second = apply(state, NOW, request)
        assert again == state, ("I8", story)
        assert isinstance(request, Beat | Leave | Admit) or second == reply, ("I8", story)
        if reply != ("left",):  # see `test_a_reap_checks_whether_the_round_can_complete` in test_oracle_stories.py
            check_state(state, self.settings, story)
        if isinstance(request, Beat):
            assert all(at > NOW for at in state.leases.values()), ("I7: a node that does not renew is out", story)
        nodes = tuple(hear(node, state.wake) for node in world.nodes)
        for node in nodes:
            lost = set(before) & set(old.members) - set(state.members) - {node.name}
            if lost and node.phase == TRAINING and node.name in state.members and not state.closed:
                assert node.broken, ("I7: every live member knows", story)
        if "roll_call" in kinds:
            state = replace(state, roll_called_at=NOW - 1)  # time passes: workers may fail after that
        state = replace(state, wake=(), events=())
        return replace(world, state=state, nodes=nodes, holders=holders, dead=dead, story=story), reply

    def ask(self, world: World, node: Node, why: str, *, lost: bool = False) -> World:
        join = Join(
            node.name, node.held, f"{node.name} 1", "", self.settings, known_to(node, world.state), *self.admission
        )
        world, reply = self.request(world, join, why=why + (" (reply lost)" if lost else ""))
        world = replace(world, sent=world.sent | {(node.name, node.held)}, faults=world.faults - lost)
        node = world.node(node.name)
        if lost:
            return world.changed(node, phase=ASKING, woken=False, has_deadline=False)
        if reply[0] == "waiting":
            world = world.changed(node, called=node.called or reply[5] != 0)
            return world.changed(
                world.node(node.name),
                phase=WAITING,
                woken=False,
                has_deadline=reply[3] != -1,
                spare=reply[4] == 1,
                broken=False,
            )
        if reply[0] == "closed":
            return world.changed(node, phase=GONE, closed=True)
        assert reply[0] == "complete", (reply, world.story)
        _, epoch, rank, size, master, *_ = reply
        s = world.state
        assert (epoch, rank, size) == (s.epoch, s.ranks[node.name], len(s.ranks)), ("I2", world.story)
        assert master == next(f"{name} 1" for name, at in s.ranks.items() if at == 0), ("I2", world.story)
        assert isinstance(epoch, int)
        assert epoch > node.held, ("I4", world.story)
        # The round may be broken by now: then the node has read so before it knew that it is a member.
        broken = node.heard == epoch
        return world.changed(
            node, phase=TRAINING, held=epoch, woken=False, has_deadline=False, spare=False, broken=broken
        )

    def beat(self, world: World, node: Node, *, steady: int = 1) -> World:
        why = ("answers" if node.called else "beats") + ("" if steady else ", having just found Redis again")
        world = world.changed(node, called=False, knows=node.knows or node.called)
        node = world.node(node.name)
        known = known_to(node, world.state)._replace(steady=steady)
        world, reply = self.request(world, Beat(node.name, self.settings, known), why=why)
        node = world.node(node.name)
        if reply[8]:
            world = world.changed(node, called=True)
            node = world.node(node.name)
        if node.phase == WAITING:
            return world.changed(node, woken=node.woken or reply[0] != "candidate")
        if node.phase == ASKING:
            return world
        if reply[:2] == ("member", node.held):
            return world.changed(node, broken=bool(reply[2]), closed=bool(reply[4]))
        again = Node(node.name + "'", held=node.held)  # fenced: it comes back as a new node
        return replace(world, nodes=tuple(again if other is node else other for other in world.nodes))

    def expire(self, world: World, name: str) -> World:
        state = replace(world.state, leases=world.state.leases | {name: NOW})
        story = (*world.story, f"the lease of {name} runs out")
        return replace(world, state=state, holders=world.holders - {name}, story=story)

    def end_roll_call(self, world: World) -> World:
        """The roll call's time is up, or that of its last chance."""
        s = world.state
        silent = silent_in(s)
        state = replace(s, roll_until=NOW, leases=s.leases | dict.fromkeys(silent, NOW))
        holders = world.holders - silent if s.roll_last_chance else world.holders
        return replace(world, state=state, holders=holders, story=(*world.story, "the roll call's time is up"))

    def pass_deadline(self, world: World) -> World:
        """Pass the deadline of the rendezvous, or of an admission's next step."""
        s = world.state
        due = {name: NOW for name in ("deadline", "admit_from", "admit_by") if getattr(s, name) is not None}
        return replace(world, state=replace(s, **due)) if due else world

    # -- what may happen next

    def steps(self, world: World) -> Iterator[World]:
        s = world.state
        for node in world.nodes:
            yield from self.steps_of(world, node)
            if self.failures and node.alive:
                yield from self.failures_of(world, node)
        if self.roll_calls:
            yield from self.roll_calls_in(world)
        for name, at in s.leases.items():
            if at > NOW:
                alive = any(node.name == name and node.alive for node in world.nodes)
                if not alive or world.faults:
                    yield replace(self.expire(world, name), faults=world.faults - alive)
        if world.faults:
            fewer = replace(world, faults=world.faults - 1)
            for name, after in world.sent:
                yield self.late_copy(fewer, name, after)
            if s.closed is None:
                yield self.request(fewer, Close("by x", 1, 0), why="closes")[0]
        yield from self.admissions_in(world)

    def admissions_in(self, world: World) -> Iterator[World]:
        """All workers have saved."""
        s = world.state
        if s.save is not None and s.epoch is not None:
            for node in sorted(s.members):
                yield self.request(world, Admit(node, s.epoch, s.save), why="all have saved")[0]

    def steps_of(self, world: World, node: Node) -> Iterator[World]:
        joins: dict[str, World] = {}  # why it asks, and the world in which it does
        first_new = next((other for other in world.nodes if other.phase == NEW), None)
        if node is first_new:  # in the order of their names: nodes that have not come yet are all alike
            joins["arrives"] = world
        elif node.phase == ASKING:
            joins["sends it again"] = world
        elif node.phase == TRAINING and node.held < 3:
            joins["regroups"] = world
        elif node.phase == WAITING:
            joins |= {"is woken": world} if node.woken else {}
            joins |= {"has waited": self.pass_deadline(world)} if node.has_deadline else {}
        for why, then in joins.items():
            yield self.ask(then, node, why)
            if world.faults and node.phase in (NEW, TRAINING):
                yield self.ask(then, node, why, lost=True)
        if node.alive:
            yield world.changed(node, phase=DEAD)
            for run_then in RUN_THEN if node.phase == TRAINING else ("goes on",):
                left = self.request(world, Leave(node.name, ("reason", "left"), run_then), why="goes")[0]
                yield left.changed(left.node(node.name), phase=GONE)
            if any(at <= NOW for at in world.state.leases.values()) or node.name not in world.state.leases:
                yield self.beat(world, node)

    def roll_calls_in(self, world: World) -> Iterator[World]:
        """A node calls the roll, one answers, or the time is up: a fault if a live node has not answered."""
        s = world.state
        for node in world.nodes:
            if node.phase == TRAINING:
                for ago in (0, 1):  # after the open roll call was opened, and before it
                    yield self.request(world, RollCall(node.name, node.held, ago, 500), why="calls the roll")[0]
            if node.alive and node.called:
                yield self.beat(world, node)
            if node.alive and world.faults and s.roll_until is not None and s.roll_until <= NOW:
                yield self.beat(replace(world, faults=world.faults - 1), node, steady=0)
        if s.roll_until is not None and s.roll_until > NOW:
            late = any(node.alive and node.name in silent_in(s) for node in world.nodes)
            if not late or world.faults:
                yield replace(self.end_roll_call(world), faults=world.faults - late)

    def failures_of(self, world: World, node: Node) -> Iterator[World]:
        s = world.state
        if node.phase == TRAINING and s.failed.get(node.name) != node.held:
            for ago, final in ((0, 0), (1, 0), (0, 1))[: 2 + bool(world.faults)]:  # a verdict may stop the run
                failure = Charge(node.name, node.name[0], node.held, ago, node.held // 2, 1, "failed", 1, 1, 2, final)
                yield replace(self.request(world, failure, why="fails")[0], faults=world.faults - final)
        if node.name not in s.draining:
            yield self.request(world, Drain(node.name, "preempted", 1), why="drains")[0]

    def late_copy(self, world: World, name: str, after: int) -> World:
        """I4: a request with an old epoch changes no more than a stranger's beat, which reaps too."""
        old, join = world.state, Join(name, after, f"{name} 1", "", self.settings)
        world, reply = self.request(world, join, why=f"late copy, after {after}")
        control, s = apply(old, NOW, Beat("stranger", Settings(1, 1, lease=1)))[0], world.state
        held = next((node.held for node in world.nodes if node.name == name), -1)
        if reply == ("left",):
            assert (s.epoch, s.ranks, s.closed) == (old.epoch, old.ranks, old.closed), ("I4", world.story)
            assert set(s.leases) <= set(old.leases), ("I4", world.story)
        elif name in control.leases and after != held:
            for part in ("epoch", "ranks", "members", "candidates", "closed", "broken", "deadline"):
                assert getattr(s, part) == getattr(control, part), ("I4", part, world.story)
        return world

    # -- I6

    def settle(self, world: World) -> World:
        """Without further faults, let the nodes act until none has a reason to."""
        for _ in range(60):
            following = self.one_more(world)
            if following is None:
                return world
            world = following
        raise AssertionError(("I6: it never ends", world.story))

    def one_more(self, world: World) -> World | None:
        """The first of the possible next steps; None if there is none."""
        moves = (self.they_ask(world), self.a_lease_runs_out(world), self.time_passes(world))
        return next(itertools.chain(*moves), None)

    def they_ask(self, world: World) -> Iterator[World]:
        for node in world.nodes:
            if node.phase == ASKING or (node.phase == WAITING and node.woken):
                yield self.ask(world, node, "settles")
            if node.phase == TRAINING and node.broken:
                yield self.ask(world, node, "regroups")
            if node.alive and node.called:
                yield self.beat(world, node)

    def a_lease_runs_out(self, world: World) -> Iterator[World]:
        """The other nodes beat when a lease or a roll call's time is up."""
        alive = [node for node in world.nodes if node.alive]
        if (until := world.state.roll_until) is not None:
            waited_for = {name for name in silent_in(world.state) if world.state.leases[name] > NOW}
            assert until == NOW or not any(node.name in waited_for for node in alive), ("I7: all answer", world.story)
            yield from (self.beat(self.end_roll_call(world), node) for node in alive)
        for name, at in world.state.leases.items():
            if at <= NOW or all(node.name != name for node in alive):
                for node in sorted(alive, key=lambda node: node.name == name):
                    yield self.beat(self.expire(world, name), node)

    def time_passes(self, world: World) -> Iterator[World]:
        """Steps that are due at a time and, with `heartbeats`, what a heartbeat finds."""
        s, alive = world.state, [node for node in world.nodes if node.alive]
        for node in alive:
            if node.name not in s.leases:
                yield self.beat(world, node)  # it learns that it lost its lease
            if node.has_deadline and (s.deadline or s.admit_from):
                yield self.ask(self.pass_deadline(world), node, "has waited")
        if s.broken is None and s.closed is None and s.candidates:
            yield from self.admissions_in(world)
        for node in alive if self.heartbeats and (s.broken or not s.members) else ():  # else it finds nothing
            later = self.beat(self.pass_deadline(world) if node.name in s.candidates else world, node)
            if (later.state, later.nodes) != (s, world.nodes):
                yield later
        for node in world.nodes:
            if "'" in node.name and node.phase == NEW:
                yield self.ask(world, node, "comes back")

    def check_end(self, world: World) -> None:
        s, alive = world.state, [node for node in world.nodes if node.alive]
        training = {node.name for node in alive if node.phase == TRAINING}
        if s.closed is not None:
            assert all(node.phase == TRAINING and node.closed for node in alive), ("I5", world.story)
        elif len(alive) >= self.settings.min:
            assert len(training) == min(len(alive), self.settings.max), ("I6", world.story)
            assert s.members == training, ("I6", world.story)
            assert {node.held for node in alive if node.name in training} == {s.epoch}, ("I6", world.story)
            assert all(node.spare for node in alive if node.phase == WAITING), ("I6", world.story)
        else:
            assert not training, ("I6", world.story)

    def walk(self, names: str, seed: int, events: int) -> None:
        """One long story, to get where breadth first does not."""
        random = Random(seed)
        world = World(State(), tuple(Node(name) for name in names), faults=3)
        for _ in range(events):
            following = list(self.steps(world))
            mild = [
                w for w in following if sum(n.phase in (DEAD, GONE) for n in w.nodes) <= len(names) - self.settings.min
            ]
            world = random.choice(mild or following or [world])
            self.check_end(self.settle(replace(world, faults=0)))

    def explore(self, names: str, worlds: int) -> tuple[int, int]:
        """Returns how many worlds were looked at, and the length of the longest story among them."""
        first = World(State(), tuple(Node(name) for name in names))
        seen, queue, longest = {first.key()}, deque([first]), 0
        looked_at = 0
        while queue and looked_at < worlds:
            world = queue.popleft()
            looked_at += 1
            longest = max(longest, len(world.story))
            self.check_end(self.settle(replace(world, faults=0)))
            for following in self.steps(world):
                if (key := following.key()) not in seen:
                    seen.add(key)
                    queue.append(following)
        return looked_at, longest


def known_to(node: Node, s: State) -> Known:
    """What the node's requests say of roll calls."""
    return Known(heard=(s.roll_called_at or 0) if node.knows else 0, incarnation=s.incarnation or "")


def silent_in(s: State) -> set[str]:
    """The nodes that have not answered the roll call."""
    return {node for node, at in s.leases.items() if s.roll_until is not None and at <= s.roll_until}


def hear(node: Node, entries: tuple[Wake | SaveWake | DrainWake | RollCallWake, ...]) -> Node:
    """The node after it has read new entries of the wake stream."""
    for entry in entries:
        if entry.event == "broken" and node.alive:
            node = replace(node, heard=entry.epoch)
        if entry.event == "roll_call" and node.alive:
            node = replace(node, called=True, knows=False)
        if node.phase == WAITING:
            node = replace(node, woken=True)
        elif node.phase == TRAINING and entry.event in ("closed", "stopped"):
            node = replace(node, closed=True)
        elif node.phase == TRAINING and entry.event == "broken" and entry.epoch == node.held:
            node = replace(node, broken=True)
    return node
