"""The state that workers share: who has the newest after a fault, and how the others get it from there."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol, SupportsIndex, runtime_checkable

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from redelastic.worker import progress

SHARDED: Final = ("placements", "sharding_spec")  # attributes of DTensor, of ShardedTensor
BUCKET_BYTES: Final = 32 << 20  # small tensors travel together, up to this size
ANEW: Final = "The workers start anew, from the last checkpoint."


@runtime_checkable
class Stateful(Protocol):
    """Anything whose state can be taken and put back; contract: as ``torch.distributed.checkpoint.stateful``."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state; its tensors may be those in use."""
        ...

    def load_state_dict(self, state_dict: Any) -> Any:
        """Put a state back."""
        ...


class TornStateError(RuntimeError):
    """No process has a whole state: each has changed its own since its last commit, and cannot go back."""


class RoundOverError(Exception):
    """The round has ended; :func:`redelastic.survive` catches it and takes part in the next one."""


class PausedError(RoundOverError):
    """All ranks leave the round after a common step."""


class Report(NamedTuple):
    """What a process says of its state when a round begins.

    Attributes:
        survived: whether it has had its shard since an earlier round.
        whole: whether its state is that of its last commit.
        step: number of steps committed.
        epoch: of the round of that commit. A process that was cut off may have made the same step in another round.
    """

    survived: bool
    whole: bool
    step: int
    epoch: int = 0


def choose_sources(reports: Sequence[Report], shards: int = 1) -> list[int]:
    """For each shard the rank from which all others get it; survivors go before new processes.

    The sources have the newest step that all shards have, of the same round, and have it whole.

    Args:
        reports: by rank.
        shards: into how many the state is split: rank r has shard ``r % shards``.

    Raises:
        TornStateError: of some shard no process has that step whole.
    """
    candidates = [rank for rank, report in enumerate(reports) if report.survived] or [*range(len(reports))]
    holders = [[rank for rank in candidates if rank % shards == shard] for shard in range(shards)]
    if lost := [shard for shard, ranks in enumerate(holders) if not ranks]:
        raise TornStateError(f"No process has shard {', '.join(map(str, lost))} of the state any more. {ANEW}")
    commits = [(report.step, report.epoch) for report in reports]
    newest = min(max(commits[rank] for rank in ranks) for ranks in holders)
    sources = []
    for shard, ranks in enumerate(holders):
        same = [rank for rank in ranks if commits[rank] == newest]
        if not same:
            raise TornStateError(
                f"Each process with shard {shard} is beyond step {newest[0]}, and none with another shard is. Call a "
                f"collective of all ranks before optimizer.step(): it makes this unlikely. {ANEW}"
            )
        whole = [rank for rank in same if reports[rank].whole]
        if not whole:
            raise TornStateError(
                f"No process has the state of step {newest[0]}: each has called optimizer.step() since, but not "
                "state.commit(), or has lost the process that was sending it a newer state. Use no collectives between "
                f"the two calls. {ANEW}"
            )
        sources.append(whole[0])
    return sources


class State:
    """What a training script keeps from one round to the next, and shares with workers that join.

    Args:
        entries: objects with ``state_dict`` and ``load_state_dict``, by name, such as a model (not wrapped in
            ``DistributedDataParallel``), an optimizer, a scheduler. All ranks need the same names. Tensors of modules
            and of torch's optimizers are updated in place. One with a method ``commit``, as
            :class:`redelastic.data.ElasticBatches` has, is committed with each step.

    Attributes:
        step: number of steps committed. A script that loads a checkpoint sets it before :func:`redelastic.survive`.

    Raises:
        TypeError: an entry lacks one of the two methods.
    """

    def __init__(self, **entries: Stateful) -> None:
        for name, entry in entries.items():
            if not isinstance(entry, Stateful):
                raise TypeError(
                    f"State({name}=…) needs an object with state_dict() and load_state_dict(), not a "
                    f"{type(entry).__name__}."
                )
        self._entries = entries
        self.step = 0
        self._shard: int | None = None  # that this process has; None before it has shared its state
        self._whole = True
        self._epoch = self._committed_in = 0  # of the round, and of that of the last commit
        self._after_commit: Callable[[int], object] = bool
        self._before_step: Callable[[], object] = bool
        for entry in entries.values():
            if isinstance(entry, torch.optim.Optimizer):
                entry.register_step_pre_hook(self._tear)

    def _tear(self, *_: object) -> None:
        self._before_step()
        self._whole = False

    def commit(self, step: SupportsIndex | None = None) -> None:
        """Record that a step is complete: every entry has its new state. Counts as :func:`redelastic.progress`.

        Args:
            step: number of steps complete from now on; None: one more than before.

        Raises:
            RoundOverError: the round has ended; leave it to :func:`redelastic.survive`.
            ValueError: ``step`` is not above the last one.
        """
        new = self.step + 1 if step is None else step.__index__()
        if new <= self.step:
            raise ValueError(f"commit({new}) does not follow step {self.step}.")
        for entry in self._entries.values():
            if commit := getattr(entry, "commit", None):  # it counts steps itself, as ElasticBatches does
                commit()
        self.step, self._committed_in, self._whole = new, self._epoch, True
        progress(new)
        self._after_commit(new)

    def call_after_commit(self, check: Callable[[int], object]) -> None:
        """Have :meth:`commit` call ``check`` with the number of steps; it ends the round by a RoundOverError."""
        self._after_commit = check

    def call_before_step(self, check: Callable[[], object]) -> None:
        """Have each optimizer's ``step`` call ``check`` first; it ends the round by a RoundOverError."""
        self._before_step = check

    def share(self, mesh: DeviceMesh | None = None, *, epoch: int = 0, verify: bool = False) -> None:
        """Give all ranks of the default group the newest committed state; a collective.

        Args:
            mesh: if the state is sharded: ranks in a column have the same shard. None: all ranks have all of it.
            epoch: of the round that begins.
            verify: whether to compare a hash of each entry afterwards.

        Raises:
            TornStateError: as :func:`choose_sources`, on all ranks.
            ValueError: ranks have other entries; or with ``verify``, an entry differs.
            TypeError: an entry's tensors are distributed, as those of a module that FSDP has sharded.
        """
        if self._shard is None:
            self._apart()  # all ranks refuse what cannot be shared, and none waits for another
        rank, size = dist.get_rank(), dist.get_world_size()
        shards, group = (1, None) if mesh is None else (mesh.size(1), mesh.get_group(0))
        shard = rank % shards
        peers = range(shard, size, shards)
        own = Report(self._shard == shard, self._whole, self.step, self._committed_in)
        reports: list[Any] = [None] * size
        dist.all_gather_object(reports, (own, sorted(self._entries)))
        names = reports[0][1]
        for other, (_, its) in enumerate(reports):
            if its != names:
                raise ValueError(f"Rank {other} has the state's entries {its}, and rank 0 has {names}.")
        known: list[Report] = [report for report, _ in reports]
        source = choose_sources(known, shards)[shard]
        # New processes may have begun differently, as with other random numbers.
        if not known[source].survived or any(known[peer] != known[source] for peer in peers):
            if rank == source:
                self._send(source, group)
            else:
                # A new process is torn until all of it has arrived. A survivor with another step keeps its state until
                # then, as the source may be lost; other survivors get what they have.
                self._whole = own.survived and own.whole
                self._receive(source, group, aside=self._whole and own != known[source])
            self.step, self._committed_in = known[source].step, known[source].epoch
        self._shard, self._epoch, self._whole = shard, epoch, True
        if verify:
            self._compare(names, shards)

    def _apart(self) -> tuple[dict[str, Any], dict[Path, torch.Tensor]]:
        """The entries in order, without their tensors; and these by path, which begins with the entry's name."""
        skeleton, tensors = take_apart({name: self._entries[name].state_dict() for name in sorted(self._entries)})
        for (name, *path), tensor in tensors.items():
            if any(hasattr(tensor, mark) for mark in SHARDED):
                raise TypeError(
                    f"{'.'.join(map(str, path))} of the entry {name!r} is a {type(tensor).__name__}: its parts are on "
                    "several ranks, and belong to the groups of one round. An entry needs plain tensors: this process' "
                    "own part, with redelastic.survive(…, shards=…), if the other nodes have it, too. Otherwise run "
                    "the script without redelastic.survive(), from a checkpoint."
                )
        return skeleton, tensors

    def _send(self, source: int, group: dist.ProcessGroup | None) -> None:
        skeleton, tensors = self._apart()
        dist.broadcast_object_list([skeleton], source, group)
        for bucket in _buckets(tensors.values()):
            _broadcast(bucket, source, group)

    def _receive(self, source: int, group: dist.ProcessGroup | None, *, aside: bool) -> None:
        """Take the source's state; with ``aside``, change nothing before all of it is there, if there is memory."""
        box: list[Any] = [None]
        dist.broadcast_object_list(box, source, group)
        skeleton: dict[str, Any] = box[0]
        own, before = self._apart()
        tensors = {hole.path: hole.fill(before.get(hole.path)) for hole in _holes(skeleton)}
        arriving = tensors
        if aside:
            try:
                arriving = {path: torch.empty_like(tensor) for path, tensor in tensors.items()}
            except torch.OutOfMemoryError:
                self._whole = False
        for bucket in _buckets(arriving.values()):
            _broadcast(bucket, source, group)
        if arriving is not tensors:
            self._whole = False
            for path, tensor in tensors.items():
                tensor.copy_(arriving[path])
        for name, entry in self._entries.items():
            in_place = isinstance(entry, (torch.nn.Module, torch.optim.Optimizer)) and all(
                tensor is before.get(path) for path, tensor in tensors.items() if path[0] == name
            )
            if not in_place or own[name] != skeleton[name]:
                entry.load_state_dict(put_together(skeleton[name], tensors))

    def _compare(self, names: Sequence[str], shards: int) -> None:
        """Compare the entries of all ranks that have the same shard, on all ranks: none waits for one that fails."""
        own = {name: fingerprint(self._entries[name].state_dict()) for name in names}
        prints: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(prints, own)
        for name in names:
            differing = [rank for rank, other in enumerate(prints) if other[name] != prints[rank % shards][name]]
            if differing:
                first = differing[0] % shards
                raise ValueError(
                    f"After step {self.step} the entry {name!r} of ranks {differing} is not rank {first}'s."
                )


# -- a state without its tensors, and back

Path = tuple[Any, ...]  # of keys and indices


@dataclass(frozen=True)
class Hole:
    """The place of a tensor in a state.

    Attributes:
        path: the keys and indices that lead to it.
        shape, dtype, device: of the tensor; the device's type.
    """

    path: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str

    def fill(self, own: torch.Tensor | None) -> torch.Tensor:
        """A tensor for it: ``own``, if it fits."""
        if own is not None and (tuple(own.shape), own.dtype, own.device.type) == (self.shape, self.dtype, self.device):
            return own
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


def take_apart(state: Any) -> tuple[Any, dict[Path, torch.Tensor]]:
    """Separate a state into what is no tensor, with a :class:`Hole` for each tensor, and the tensors by path."""
    tensors: dict[Path, torch.Tensor] = {}

    def hole_for(leaf: Any, path: Path) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        tensors[path] = leaf.detach()
        return Hole(path, tuple(leaf.shape), leaf.dtype, leaf.device.type)

    return _with_leaves(state, hole_for), tensors


def put_together(skeleton: Any, tensors: Mapping[Path, torch.Tensor]) -> Any:
    """The opposite of :func:`take_apart`."""
    return _with_leaves(skeleton, lambda leaf, _: tensors[leaf.path] if isinstance(leaf, Hole) else leaf)


def _holes(skeleton: Any) -> list[Hole]:
    """All holes, in the order in which :func:`take_apart` met them."""
    leaves: list[Any] = []
    _with_leaves(skeleton, lambda leaf, _: leaves.append(leaf))
    return [leaf for leaf in leaves if isinstance(leaf, Hole)]


def _with_leaves(part: Any, replacement: Callable[[Any, Path], object], path: Path = ()) -> Any:
    """A copy of a state's mappings, lists and tuples, in which each other part is ``replacement(part, path)``."""
    if isinstance(part, Mapping):
        return {key: _with_leaves(value, replacement, (*path, key)) for key, value in part.items()}
    if isinstance(part, list | tuple) and not hasattr(part, "_fields"):
        return type(part)(_with_leaves(value, replacement, (*path, index)) for index, value in enumerate(part))
    return replacement(part, path)


def fingerprint(state: Any) -> str:
    """A hash of a state, which is equal for equal states, in whatever order they list their keys."""
    skeleton, tensors = take_apart(state)
    digest = hashlib.blake2b(_ordered(skeleton).encode(), digest_size=16)
    for path in sorted(tensors, key=repr):
        digest.update(tensors[path].cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _ordered(skeleton: Any) -> str:
    if isinstance(skeleton, dict):
        return repr(sorted((repr(key), _ordered(value)) for key, value in skeleton.items()))
    if isinstance(skeleton, list | tuple):
        return repr([_ordered(value) for value in skeleton])
    return repr(skeleton)


# -- over the group


def _buckets(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Runs of consecutive tensors of one type, each up to the size of a bucket."""
    bucket: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and (size + tensor.nbytes > BUCKET_BYTES or not _is_alike(tensor, bucket[0])):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket


def _is_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.device.type == other.device.type


def _broadcast(bucket: Sequence[torch.Tensor], source: int, group: dist.ProcessGroup | None) -> None:
    """Broadcast tensors of one type; those of the other ranks are overwritten."""
    if len(bucket) == 1 and bucket[0].is_contiguous():
        dist.broadcast(bucket[0], source, group)
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
    dist.broadcast(flat, source, group)
    if dist.get_rank() != source:
        parts = flat.split([tensor.numel() for tensor in bucket])
        for tensor, part in zip(bucket, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))
