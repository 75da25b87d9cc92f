"""``survive``: calls the training function again in every round, in the same process, with the newest state."""

from __future__ import annotations

import contextlib
import gc
import os
import queue
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch

# Its functions' default arguments are the default group. DDP and Adam import it later: then the first group would be
# kept for good, and a thread of gloo would abort the process at its end.
import torch.distributed.nn.functional
from torch import distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh

from redelastic.torch_internals import (
    abort_nccl,
    forget_meshes,
    nccl_has_failed,
    restart_group_names,
    set_group_timeout,
)

from .channel import MAX_REASON, Channel
from .cutter import CUT_INTERVAL, Cutter
from .state import PausedError, RoundOverError, State

MEET_TIMEOUT: Final = timedelta(seconds=5)  # for all ranks of a round to be there
CONNECT_TIMEOUT: Final = timedelta(seconds=1)  # of one try to reach the round's store; torch tries twice at a time
# To make a group then. gloo waits five times that for a peer to connect. If the peer has died, there is no socket to
# cut: the wait has to end before the node starts its workers anew after --park-timeout.
MAKE_TIMEOUT: Final = timedelta(seconds=1.5)
IDLE_INTERVAL: Final = 3600.0  # between looks for a command, which wakes the thread anyway, in seconds
GPU_INTERVAL: Final = 0.1  # the same with GPUs, for whether NCCL has failed: torch looks as often
LAST_STEP: Final = "redelastic/last_step"  # key of the round's store: the step after which all ranks pause
EPOCH: Final = "REDELASTIC_EPOCH"  # variable of the round's number
LAUNCHED: Final = ("RANK", "WORLD_SIZE")  # variables of every launcher


@dataclass(frozen=True)
class Round:
    """One round, as the training function gets it.

    Attributes:
        rank: of this process, from 0.
        size: number of processes.
        local_rank: of this process on its node.
        epoch: number of the round, above that of every earlier one; 0 without an agent of redelastic.
        store: for the script's own keys in this round; None without other processes.
        device: where this process computes.
        mesh: all ranks as a mesh with the dimensions "replicate" and "shard", as HSDP takes it; None without ``shards``
            or without other processes. Its groups end with the round.
    """

    rank: int
    size: int
    local_rank: int
    epoch: int
    store: dist.Store | None
    device: torch.device
    mesh: DeviceMesh | None = None


TrainFunction = Callable[[Round], object]


def survive(
    train: TrainFunction,
    state: State,
    *,
    timeout: timedelta = default_pg_timeout,
    verify: bool = False,
    shards: int | None = None,
) -> None:
    """Train until ``train`` has returned on all ranks; it is called again in every round.

    Under ``redelastic run --survive`` this process outlives the loss of its peers: it leaves the collectives of the
    broken round, waits for the next one, takes the newest committed state, and calls ``train`` again. Elsewhere, as
    under torchrun, ``train`` is called once. In each round there is a default process group.

    ``train`` must begin at ``state.step``, make what depends on the group (``DistributedDataParallel``) anew in each
    call, and call ``state.commit()`` after each step. It must let errors of collectives pass.

    Objects that exist before the first call are not garbage-collected meanwhile (``gc.freeze``).

    Args:
        train: the training function.
        state: of the training.
        timeout: of the group's operations.
        verify: whether to compare a hash of the state's entries at the beginning of each round.
        shards: into how many the state is split, as with HSDP; None: each rank has all of it. Rank r has shard
            ``r % shards``, and gets it from other ranks that have it.

    Raises:
        TornStateError, ValueError, TypeError: as :meth:`State.share`.
        ValueError: the number of this node's processes, ``LOCAL_WORLD_SIZE``, is no multiple of ``shards``.
        SystemExit: the agent is gone.
        Exception: of ``train``, if it is none of communication; the agent then starts the node's workers anew.
    """
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if shards is not None and (shards < 1 or local_size % shards):  # before this node joins: the others train on
        raise ValueError(
            f"survive(shards={shards}): the number of this node's processes has to be a multiple of the shards; it is "
            f"{local_size}. Set it by --nproc-per-node."
        )
    channel = Channel.open()
    if channel is None:
        _train_once(train, state, timeout, verify=verify, shards=shards)
    else:
        gc.collect()
        gc.freeze()  # the collection after each round would visit all objects of torch, for 150 ms
        try:
            _Survivor(channel, state, timeout, verify=verify, shards=shards).run(train)
        finally:
            gc.unfreeze()


def _train_once(train: TrainFunction, state: State, timeout: timedelta, *, verify: bool, shards: int | None) -> None:
    store = mesh = None
    if any(name in os.environ for name in LAUNCHED) and not dist.is_initialized():
        store, rank, size = next(dist.rendezvous("env://"))
        dist.init_process_group(_backend(), store=store, rank=rank, world_size=size, timeout=timeout)
    if dist.is_initialized():
        mesh = _mesh(shards, timeout)
        state.share(mesh, verify=verify)
    train(_round(store, mesh))
    if store is not None:
        dist.destroy_process_group()


def _backend() -> str:
    """The default group's backend: gloo, and NCCL for what is on GPUs."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def _device() -> torch.device:
    """Where this process computes."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    return torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")


def _mesh(shards: int | None, timeout: timedelta) -> DeviceMesh | None:
    """The mesh of the default group's ranks, a row for each replica of the state; None if each rank has all of it."""
    if shards is None:
        return None
    if (device := _device()).type == "cuda":
        torch.cuda.set_device(device)  # FSDP computes on the current one
    ranks = torch.arange(dist.get_world_size()).view(-1, shards)
    replica, shard = divmod(dist.get_rank(), shards)
    columns = [dist.new_group(members, timeout) for members in ranks.T.tolist()]  # of all ranks, so that names agree
    rows = [dist.new_group(members, timeout) for members in ranks.tolist()]
    own = [columns[shard], rows[replica]]
    return DeviceMesh.from_group(own, device.type, ranks, mesh_dim_names=("replicate", "shard"))


def _round(store: dist.Store | None, mesh: DeviceMesh | None) -> Round:
    return Round(
        rank=dist.get_rank() if dist.is_initialized() else 0,
        size=dist.get_world_size() if dist.is_initialized() else 1,
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        epoch=int(os.environ.get(EPOCH, "0")),
        store=None if store is None else dist.PrefixStore("train", store),
        device=_device(),
        mesh=mesh,
    )


class _Survivor:
    """A worker that takes part in one round after the other.

    A thread receives the agent's commands; it cuts the group of a round that has ended.

    For a planned change all ranks pause after a common step: no collective is cut, and no step is made twice. The
    agents ask each worker, and tell rank 0's once all know; it names its next step. No rank can have come further,
    since that step's collectives need rank 0. Each looks for the step after every commit from then on.
    """

    def __init__(self, channel: Channel, state: State, timeout: timedelta, *, verify: bool, shards: int | None) -> None:
        self._channel, self._state, self._timeout = channel, state, timeout
        self._verify, self._shards = verify, shards
        self._rounds: queue.SimpleQueue[Mapping[str, str] | None] = queue.SimpleQueue()
        self._epoch = 0  # of the round that this worker is in, or was last
        self._over = 0  # epoch of the newest round that has ended, for all or for this worker
        self._pauses = self._settles = 0  # epoch of the round that is to pause; in which this rank chooses the step
        self._device = torch.device("cpu")
        self._store: dist.Store | None = None  # of the round
        self._cutter: Cutter | None = None  # of the group, while there is one
        state.call_after_commit(self._leave_if_due)
        state.call_before_step(self._await_gradients)

    def _is_over(self) -> bool:
        return self._over >= self._epoch

    def _leave_if_due(self, step: int) -> None:
        if self._is_over():
            raise RoundOverError(f"The round ended at step {step}.")
        if self._pauses != self._epoch or self._store is None:
            return
        if self._settles == self._epoch:
            self._settles = 0
            self._store.set(LAST_STEP, str(step + 1))
        elif self._store.check([LAST_STEP]) and step >= int(self._store.get(LAST_STEP)):
            raise PausedError(f"All ranks pause after step {step}.")

    def _await_gradients(self) -> None:
        """Make no step from what an abort has left of the gradients: waiting for them on the GPU raises no error."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            self._raise_if_over()

    def _raise_if_over(self) -> None:
        if self._is_over():
            raise RoundOverError("The round is over.")

    def run(self, train: TrainFunction) -> None:
        threading.Thread(target=self._listen, name="redelastic-channel", daemon=True).start()
        self._channel.send(parked="", paused=False)
        groups: list[Cutter] = []  # that this worker has left, whose connections are held back
        while (environment := self._rounds.get()) is not None:
            if len(groups) > 1:  # a peer that is not in this round, as it was frozen, may still be in the last group
                groups.pop(0).release()
            os.environ.update(environment)
            self._epoch, self._device = int(environment[EPOCH]), _device()
            cutter = self._cutter = Cutter()
            left = self._take_part(train, cutter)
            if left is not None:
                cutter.hold()
                groups.append(cutter)
                if not left[1]:
                    abort_nccl()  # or its end may wait for a peer
            with contextlib.suppress(Exception):  # of a group that was cut while it was made
                if dist.is_initialized():
                    dist.destroy_process_group()
            self._cutter = self._store = None
            forget_meshes()
            gc.collect()  # what holds the group in a cycle, such as a DDP of it
            if left is None:
                return
            why, paused = left
            with contextlib.suppress(OSError):  # the agent is gone: the thread that listens ends this
                self._channel.send(parked=why[:MAX_REASON], paused=paused)
        raise SystemExit("redelastic.survive(): the agent is gone.")

    def _listen(self) -> None:
        """Receive commands, in a thread; cut the group as long as its round is over, or NCCL has failed."""
        idle = GPU_INTERVAL if torch.cuda.is_available() else IDLE_INTERVAL
        with contextlib.suppress(EOFError):
            while True:
                command = self._channel.receive(CUT_INTERVAL if self._cut() else idle)
                if command:
                    self._obey(command)
        self._over = self._epoch
        self._rounds.put(None)
        while self._cut():
            threading.Event().wait(CUT_INTERVAL)

    def _cut(self) -> bool:
        """End the group's operations if this worker is to leave the round; returns whether it is, and has not yet."""
        epoch, cutter = self._epoch, self._cutter
        if cutter is None:
            return False
        if nccl_has_failed():
            self._over = max(self._over, epoch)
        if not self._is_over():
            return False
        with contextlib.suppress(RuntimeError):  # of one communicator; the next call tries again
            abort_nccl()
        cutter.cut()
        return True

    def _obey(self, command: Mapping[str, Any]) -> None:
        if "abort" in command:
            self._over = max(self._over, command["abort"])
        elif "pause" in command:
            self._pauses = command["pause"]
            self._channel.send(armed=self._pauses)
        elif "settle" in command:
            self._settles = command["settle"]
        else:
            self._rounds.put(command["round"])

    def _take_part(self, train: TrainFunction, cutter: Cutter) -> tuple[str, bool] | None:
        """Train in one round; returns why this worker has left it and whether it has paused; None if all have finished.

        No reference to the group is left when it returns: the error's frames hold some, until they are cleared.
        """
        try:
            store, rank, size = self._connect()
            self._raise_if_over()  # no abort ends one of these waits, and together they outlast --park-timeout
            store.wait([_count_in(store, size, "met")], MEET_TIMEOUT)
            self._raise_if_over()
            restart_group_names()
            dist.init_process_group(_backend(), store=store, rank=rank, world_size=size, timeout=MAKE_TIMEOUT)
            mesh = _mesh(self._shards, MAKE_TIMEOUT)
            cutter.mark()
            for group in (None, *(() if mesh is None else mesh.get_all_groups())):
                set_group_timeout(self._timeout, group)
            self._state.share(mesh, epoch=self._epoch, verify=self._verify)
            self._store = store
            train(_round(store, mesh))
            _await_all(store, size)
        except Exception as e:
            if not _is_of_communication(e):
                raise
            traceback.clear_frames(e.__traceback__)
            return f"{type(e).__name__}: {e}", isinstance(e, PausedError)
        return None

    def _connect(self) -> tuple[dist.Store, int, int]:
        """Connect to the round's store; nothing ends a wait for rank 0's agent if that has just died."""
        until = time.monotonic() + MEET_TIMEOUT.total_seconds()
        while True:
            self._raise_if_over()
            try:
                store, rank, size = next(dist.rendezvous("env://", timeout=CONNECT_TIMEOUT))
            except dist.DistError:
                if time.monotonic() > until:
                    raise
            else:
                store.set_timeout(MEET_TIMEOUT)
                return store, rank, size


def _count_in(store: dist.Store, size: int, place: str) -> str:
    """Count this rank as having come to a place; returns the key that exists once all have."""
    if store.add(f"redelastic/{place}", 1) == size:
        store.set(f"redelastic/all_{place}", "")
    return f"redelastic/all_{place}"


def _await_all(store: dist.Store, size: int) -> None:
    """Wait until all ranks have finished: until then, one that fails needs the state of the others."""
    all_finished = _count_in(store, size, "finished")
    while True:
        try:
            store.wait([all_finished], timedelta(hours=1))
        except dist.DistStoreError:  # the others are not there yet
            continue
        return


def _is_of_communication(error: BaseException | None) -> bool:
    """Whether an error, or the one that caused it, says that this process could not reach its peers."""
    while error is not None:
        if isinstance(error, (RoundOverError, dist.DistNetworkError, dist.DistBackendError, dist.DistStoreError)):
            return True
        if isinstance(error, RuntimeError) and any(name in str(error) for name in ("gloo", "NCCL")):
            return True
        error = error.__cause__
    return False
