"""Judges a history by the guarantees of PROTOCOL.md: what must never happen, and what must come in time.

Where a promise has a condition, the checker looks for it in the history. Chaos notes an action before it acts; a node
notes a request before it asks, and a fact after it knows it: what is out of order here was out of order there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from .history import Event
from .story import NEVER, Ask, Stay, Story

SLACK: Final = 1.0  # nodes put a forgotten record back within that time: a heartbeat on a busy machine


@dataclass(frozen=True)
class Violation:
    """A promise that was not kept."""

    guarantee: str
    what: str
    t: float

    def __str__(self) -> str:
        return f"{self.guarantee} at {self.t:.3f}: {self.what}"


@dataclass
class Verdict:
    """What is wrong, and what was measured."""

    violations: list[Violation] = field(default_factory=list)
    detected: list[float] = field(default_factory=list)  # from a member's death until another one knew, in seconds
    regrouped: list[float] = field(default_factory=list)  # from there until the next round, in seconds
    rounds: int = 0
    adds: int = 0
    excused: int = 0  # rounds on a server that had lost its data, before a node put an older round back


def check(history: Iterable[Event]) -> Verdict:
    """Judges one episode."""
    story = Story(history)
    verdict = Verdict(rounds=len(story.rounds), adds=sum(len(node.adds) for node in story.nodes.values()))
    verdict.excused = _excuse(story)
    for rule in RULES:
        verdict.violations += rule(story)
    verdict.violations.sort(key=lambda violation: violation.t)
    verdict.detected = [seconds for _, seconds in _detections(story)]
    verdict.regrouped = list(_regroupings(story))
    return verdict


def _excuse(story: Story) -> int:
    """Takes out what PROTOCOL.md does not promise: on an empty server newcomers may be faster than members."""
    stays = [stay for stay in story.stays if any(b <= stay.entered for _, b in story.lost)]
    excused = set()
    for stay in stays:
        lost = max(b for _, b in story.lost if b <= stay.entered)
        before = max((s.epoch for s in story.stays if s.entered <= lost), default=0)
        if stay.epoch <= before and stay.entered < lost + story.interval + SLACK:
            excused.add(stay.entered)
    for node in story.nodes.values():
        node.stays = [stay for stay in node.stays if stay.entered not in excused]
    return len(excused)


def exclusivity(story: Story) -> Iterator[Violation]:
    """I1: every member has rejoined, left, or lost its lease before the next round."""
    for (epoch, members), (later, others) in pairwise(story.rounds.items()):
        first = others[0]
        for stay in members:
            known = min(stay.entered, first.entered - story.lease)  # a frozen node may learn late of its round
            if stay.until > first.entered and not story.may_be_lost(stay.node, known, first.entered):
                member = f"{stay.node} was a live member of round {epoch}"
                yield Violation("I1", f"{member} when {first.node} entered round {later}", first.entered)


def agreement(story: Story) -> Iterator[Violation]:
    """I2: the same size and master for all, ranks 0..n-1; a missing node has to have had a reason."""
    for epoch, members in story.rounds.items():
        t, first = members[0].entered, members[0]
        for stay in members:
            if (stay.size, stay.master) != (first.size, first.master):
                one, other = (f"{s.node} has {s.size} nodes, master {s.master}" for s in (first, stay))
                yield Violation("I2", f"round {epoch}: {one}; {other}", stay.entered)
        ranks = sorted(stay.rank for stay in members)
        if len(set(ranks)) < len(ranks) or ranks[-1] >= first.size or ranks[0] < 0:
            yield Violation("I2", f"round {epoch} of {first.size} nodes has the ranks {ranks}", t)
        elif len(ranks) < first.size - _may_be_silent(story, t):
            yield Violation("I2", f"round {epoch}: of {first.size} members only the ranks {ranks} entered it", t)
        identities = {stay.rank: stay.identity for stay in members}
        for stay in members:
            wrong = stay.peers and any(
                stay.peers[rank] != identity for rank, identity in identities.items() if rank < first.size
            )
            if wrong:
                yield Violation(
                    "I2", f"round {epoch}: {stay.node} met {stay.peers}, which are {identities}", stay.entered
                )


def _may_be_silent(story: Story, t: float) -> int:
    """How many nodes that waited when a round began may be in it without a report: they or Redis had a fault."""
    soon = t + 2 * story.lease + story.patience
    dead_for = story.lease + SLACK  # for so long a killed node counts as waiting
    waiting = [
        ask
        for node in story.nodes.values()
        for ask in node.asks
        if ask.since <= t < ask.until + (dead_for if ask.until == node.gone else 0)
    ]
    upset = any(a < soon and b > t - story.lease for a, b in (*story.away, *story.lost)) or soon > story.closing
    return sum(upset or story.nodes[a.node].gone < soon or story.nodes[a.node].is_frozen(t - 1, soon) for a in waiting)


def size(story: Story) -> Iterator[Violation]:
    """I3: min_nodes <= world size <= max_nodes."""
    for stay in story.stays:
        if not story.min <= stay.size <= story.max:
            what = f"round {stay.epoch} has {stay.size} nodes, not {story.min} to {story.max}"
            yield Violation("I3", what, stay.entered)


def epochs(story: Story) -> Iterator[Violation]:
    """I4: epochs grow, for each node and for all."""
    for node in story.nodes.values():
        for one, other in pairwise(node.stays):
            if other.epoch <= one.epoch:
                yield Violation("I4", f"{node.name} entered round {other.epoch} after {one.epoch}", other.entered)
    newest: Stay | None = None
    for stay in story.stays:
        if newest and stay.epoch < newest.epoch and stay.asked > newest.entered:
            late = f"{stay.node} asked after {newest.node} had entered round {newest.epoch}"
            yield Violation("I4", f"{late}, and entered round {stay.epoch}", stay.entered)
        newest = stay if newest is None or stay.epoch > newest.epoch else newest
    recorded = [event["epoch"] for event in story.records if event["event"] == "completed"]
    for before, after in pairwise(recorded):
        if after <= before and not story.lost:
            yield Violation("I4", f"round {after} is on record after round {before}", story.ends)


def fencing(story: Story) -> Iterator[Violation]:
    """I4: a request with an older epoch changes nothing."""
    begun = [(epoch, members[0].entered) for epoch, members in story.rounds.items()]
    for node in story.nodes.values():
        for add in node.adds:
            newer = next((epoch for epoch, t in begun if epoch > add.epoch and t < add.asked), None)
            forgot = any(a <= add.answered and add.asked <= b + story.interval + SLACK for a, b in story.lost)
            if newer and add.outcome == "added" and not forgot:
                what = f"{node.name} added to the store of round {add.epoch} when round {newer} had begun"
                yield Violation("I4", what, add.asked)


def closing(story: Story) -> Iterator[Violation]:
    """I5: nobody enters a round of a run that is closed, all nodes hear of it, and no run closes by itself."""
    for stay in story.stays:
        if stay.asked > story.closed:
            yield Violation("I5", f"{stay.node} asked after the run was closed, and entered {stay.epoch}", stay.entered)
    kinds = [event["event"] for event in story.records]
    if "closed" in kinds and "completed" in kinds[kinds.index("closed") :] and not story.lost:
        yield Violation("I5", "a round is on record as completed after the run was closed", story.ends)
    for node in story.nodes.values():
        alive = node.gone == NEVER and not node.is_frozen(story.closed, story.ends)
        if alive and node.heard == NEVER and story.closed + story.patience < story.ends < NEVER:
            yield Violation(
                "I5", f"{node.name} did not hear within {story.patience:g} s that the run is closed", story.ends
            )
        if node.heard < story.closing:
            yield Violation("I5", f"{node.name} heard of a closing that nobody had asked for", node.heard)


def progress(story: Story) -> Iterator[Violation]:
    """I6: where enough nodes stay, a rendezvous completes. Judged where nothing was done for long enough."""
    marks = sorted([*story.actions, story.closing, *(stay.entered for stay in story.stays)])
    for ask in (ask for node in story.nodes.values() for ask in node.asks):
        if ask.until == NEVER and story.ends == NEVER:
            continue
        within = [ask.since, *(t for t in marks if ask.since < t < ask.until), min(ask.until, story.closing)]
        for quiet, until in pairwise(within):
            allowed = story.limit + story.disturbed(quiet, until)
            inside = [stay for stay in story.stays if stay.entered <= quiet < stay.until]
            live = [n for n in story.nodes.values() if n.asks and n.asks[0].since <= quiet and n.gone >= until]
            frozen = any(node.is_frozen(quiet, until) for node in live)
            full = {
                stay.epoch for stay in inside if stay.size == story.max == len([s for s in inside if s.until >= until])
            }
            if until - quiet > allowed and len(live) >= story.min and not frozen and not full:
                waiting = f"{ask.node} waited with {len(live)} nodes alive, none of them disturbed"
                yield Violation("I6", f"{waiting}, and no round was complete after {until - quiet:.1f} s", quiet)


def detection(story: Story) -> Iterator[Violation]:
    """I7: when a member is dead, gone or silent for a lease, all others know."""
    for lost, at in _losses(story):
        for stay in story.rounds[lost.epoch]:
            known = min(stay.broken, stay.until)
            limit = at + 2 * story.lease + story.patience
            limit += story.disturbed(at, limit) + (2 * story.lease if story.disturbed(at - story.lease, limit) else 0)
            judged = stay.node != lost.node and stay.entered < limit < min(story.closing, story.ends)
            if judged and known > limit and not story.nodes[stay.node].is_frozen(at - story.lease, limit):
                what = f"{stay.node} did not know within {limit - at:.1f} s that {lost.node} is gone"
                yield Violation("I7", f"{what} from round {lost.epoch}", at)
    newest = max(story.rounds, default=0)
    began = story.rounds[newest][0].entered if newest else 0.0
    for stay in story.stays:
        limit = max(story.calm, began) + story.limit + story.disturbed(story.calm, story.closing)
        if stay.epoch < newest and stay.until > limit < min(story.closing, story.ends):
            yield Violation("I7", f"{stay.node} went on in round {stay.epoch} when {newest} had long begun", limit)


def answering(story: Story) -> Iterator[Violation]:
    """I7: when all have answered a roll call, no member of its round had died before it was asked for."""
    for call in story.calls:
        for stay in story.rounds.get(call.epoch, ()):
            dead = story.nodes[stay.node]
            if dead.killed and stay.entered < dead.gone == stay.until < call.asked < call.answered < NEVER:
                what = f"{call.node} learned that all had answered its roll call, but {stay.node} was dead"
                yield Violation("I7", what, call.answered)


def _losses(story: Story) -> Iterator[tuple[Stay, float]]:
    """Members that were killed, left, or were frozen for longer than their lease, and since when."""
    long = story.lease + 2 * story.interval
    for stay in story.stays:
        node = story.nodes[stay.node]
        if node.gone == stay.until < NEVER:
            yield stay, node.gone
        for a, b in node.frozen:
            if stay.entered < a < stay.until and b - a > long:
                yield stay, a


def _detections(story: Story) -> Iterator[tuple[Stay, float]]:
    """Of members that were killed in a round that stood: when another one knew."""
    for lost, at in _losses(story):
        others = [stay for stay in story.rounds[lost.epoch] if stay.node != lost.node and stay.until > at]
        calm = not story.disturbed(at - story.lease, at + 2 * story.lease)
        node = story.nodes[lost.node]
        calm = calm and node.killed and not node.is_frozen(at - story.lease, at)
        if not calm or any(stay.broken < at for stay in others):
            continue
        yield from ((stay, stay.broken - at) for stay in others if stay.broken < NEVER and lost.identity in stay.why)


def _regroupings(story: Story) -> Iterator[float]:
    for (_, members), (_, others) in pairwise(story.rounds.items()):
        broken = min(stay.broken for stay in members)
        if broken < others[0].entered:
            yield others[0].entered - broken


def counting(story: Story) -> Iterator[Violation]:
    """I8: each add counts once: no two have one reply, and the count is that of the adds."""
    for epoch, members in story.rounds.items():
        adds = [add for node in story.nodes.values() for add in node.adds if add.epoch == epoch]
        if not adds or story.lost_between(members[0].entered, max(min(a.answered, story.ends) for a in adds)):
            continue
        values = sorted(add.value for add in adds if add.outcome == "added")
        possible = sum(add.outcome != "fenced" for add in adds)
        for one, other in pairwise(values):
            if one == other:
                yield Violation("I8", f"round {epoch}: two adds both got the reply {one}", members[0].entered)
        if values and values[-1] > possible:
            what = f"round {epoch}: a counter is at {values[-1]} after {possible} adds at most"
            yield Violation("I8", what, members[0].entered)


def standing(story: Story) -> Iterator[Violation]:
    """I9: no round is broken without a cause among nodes: not by Redis being away, restarted or emptied."""
    for epoch, members in story.rounds.items():
        began = members[0].entered
        broken = min(min(stay.broken, stay.until) for stay in members)
        if broken < min(story.closing, story.ends) and not _cause(story, members, began, broken):
            fault = any(a < broken and b > broken - story.lease - story.patience for a, b in (*story.away, *story.lost))
            first = next(stay.node for stay in members if min(stay.broken, stay.until) == broken)
            what = f"round {epoch} was broken for {first}, and no node gave a reason"
            yield Violation("I9", what + (": Redis had been away" if fault else ""), broken)


def _cause(story: Story, members: list[Stay], began: float, broken: float) -> bool:
    inside = {stay.node for stay in members}
    outsiders = [node for node in story.nodes.values() if node.name not in inside]
    wanted = members[0].size < story.max
    return (
        len(members) < members[0].size  # a member never reported that it is in: see `agreement`
        or any(story.nodes[name].gone <= broken for name in inside)
        or any(story.may_be_lost(name, began - story.lease, broken) for name in inside)
        or (wanted and any(_is_waiting(ask, began, broken, story) for node in outsiders for ask in node.asks))
    )


def _is_waiting(ask: Ask, began: float, broken: float, story: Story) -> bool:
    """Whether a node may have waited while a round stood; a killed node waits for as long as its lease."""
    return ask.since <= broken and ask.until >= began - story.lease - SLACK


def contract(story: Story) -> Iterator[Violation]:
    """Torch's: ``num_nodes_waiting`` never raises, and ``next_rendezvous`` only what it says."""
    for event in story.errors:
        yield Violation("contract", f"{event['by']} failed with {event['error']}", event["t"])


Rule = Callable[[Story], Iterator[Violation]]
RULES: Final[tuple[Rule, ...]] = (
    *(
        exclusivity,
        agreement,
        size,
        epochs,
        fencing,
        closing,
        progress,
        detection,
        answering,
        counting,
        standing,
        contract,
    ),
)
