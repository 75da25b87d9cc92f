"""Why ranks wait in collectives: which rank has not come, and which came with another one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from typing import Any, Final, NamedTuple

from .wording import json_in

DEFAULT_GROUP: Final = "default_pg"  # torch's description of it
GROUPS: Final = 3  # process groups that are described
RUNS: Final = 8  # of consecutive ranks, that are named
MAX_RANKS: Final = 1024  # of one event
MAX_WORD: Final = 80  # characters of a name or a shape


class Collective(NamedTuple):
    """A collective, as one rank has called it.

    Attributes:
        group: torch's name of the process group: the same on all its ranks.
        description: of the group.
        number: of the collective in its group: the same on all its ranks.
        operation: such as ``all_reduce``.
        shape: data type and size of the input, where they have to be the same on all ranks; empty elsewhere.
        is_done: whether it has ended on this rank.
    """

    group: str
    description: str
    number: int
    operation: str
    shape: str
    is_done: bool

    @property
    def name(self) -> str:
        """The operation and its shape."""
        return f"{self.operation}({self.shape})" if self.shape else self.operation


# The last ones of each group, oldest first, by rank; None for a rank that does not answer.
LastCollectives = Mapping[int, Sequence[Collective] | None]


def explain(last: LastCollectives) -> str:
    """Why ranks wait; empty if nothing is known.

    Args:
        last: collectives of the ranks that were asked.
    """
    known = {rank: own for rank, own in last.items() if own is not None}
    names = dict.fromkeys(one.group for own in known.values() for one in own)
    found = (
        _explain_group({r: [one for one in own if one.group == name] for r, own in known.items()}) for name in names
    )
    parts = list(islice(filter(None, found), GROUPS))
    if known and not parts:
        parts.append(f"{_ranks(known)} {_verb(known, 'wait')} in no collective")
    if silent := last.keys() - known:
        parts.append(f"{_ranks(silent)} {'does' if len(silent) == 1 else 'do'} not answer")
    return "; ".join(parts)


def may_wait(own: Sequence[Collective] | None) -> bool:
    """Whether a rank that hangs may wait for another one.

    It does not if it has ended all its collectives, or does not even answer.

    Args:
        own: its last collectives; None if it does not answer, empty if nothing is known of any.
    """
    return own is not None and not (own and all(one.is_done for one in own))


def _explain_group(collectives: Mapping[int, Sequence[Collective]]) -> str:
    """Why ranks wait in one group; empty if none does."""
    waiting = {rank: first for rank, own in collectives.items() if (first := _first_unfinished(own))}
    if not waiting:
        return ""
    number = min(one.number for one in waiting.values())
    came = {rank: one for rank, own in collectives.items() for one in own if one.number == number}
    usual = Counter(one.name for one in came.values()).most_common(1)[0][0]
    group = next(iter(came.values()))
    # Only of the default group it is known that all ranks belong to it.
    members = [rank for rank, own in collectives.items() if own or group.description == DEFAULT_GROUP]
    late = [rank for rank in members if max((one.number for one in collectives[rank]), default=0) < number]
    where = f"{usual}, collective {number} of {group.description or group.group}"
    wait = [rank for rank, one in waiting.items() if one.number == number]
    with_usual = [rank for rank in wait if came[rank].name == usual]
    parts = [f"{_ranks(with_usual)} {_verb(with_usual, 'wait')} in {where}"] if with_usual else [f"in {where}"]
    for name in dict.fromkeys(one.name for one in came.values() if one.name != usual):
        others = [rank for rank, one in came.items() if one.name == name]
        parts.append(f"{_ranks(others)} came with {name}")
    if late:
        parts.append(f"{_ranks(late)} {'has' if len(late) == 1 else 'have'} not come to it")
    return ", ".join(parts)


def _first_unfinished(own: Sequence[Collective]) -> Collective | None:
    return next((one for one in own if not one.is_done), None)


def _verb(ranks: Iterable[int], verb: str) -> str:
    return verb + "s" * (len(list(ranks)) == 1)


def _ranks(ranks: Iterable[int]) -> str:
    """``rank 3``; ``ranks 0-2, 5``."""
    ordered = sorted(ranks)
    runs = list(_runs(ordered))
    shown = ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs[:RUNS]) + ", …" * (len(runs) > RUNS)
    return f"rank{'s' * (len(ordered) > 1)} {shown}"


def _runs(ordered: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The first and the last of each sequence of consecutive ranks."""
    for _, run in groupby(enumerate(ordered), lambda place_and_rank: place_and_rank[1] - place_and_rank[0]):
        ranks = [rank for _, rank in run]
        yield ranks[0], ranks[-1]


def decode(text: str) -> dict[int, tuple[Collective, ...] | None]:
    """Read them from JSON, without what is not of their form."""
    found = json_in(text)
    pairs = islice(found.items(), MAX_RANKS) if isinstance(found, dict) else ()
    return {
        int(rank): None if own is None else tuple(filter(None, map(_collective, own)))
        for rank, own in pairs
        if rank.isascii() and rank.isdecimal() and len(rank) < 10 and (own is None or isinstance(own, list))
    }


def _collective(fields: Any) -> Collective | None:
    match fields:
        case [str(group), str(description), int(number), str(operation), str(shape), bool(done)]:
            words = (word[:MAX_WORD] for word in (group, description, operation, shape))
            return Collective(next(words), next(words), number, next(words), next(words), done)
    return None
