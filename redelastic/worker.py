"""The interface between a training script and its agent: progress, phases, and requests for checkpoints and stacks.

All use 160 bytes of shared memory that the agent created for this worker (`workers/board.py`), so that a call
takes a fraction of a microsecond, and works while the agent is busy or gone. Each field is an aligned 8-byte integer
with one writer: on x86-64 and arm64 it is written and read atomically, so neither side needs a lock.

The agent requests the stacks of a hanging worker with a signal. `faulthandler` answers it in C: it works while the main
thread hangs, with or without the interpreter's lock. A thread answers its requests for torch's flight recorder, which
knows the last collectives, and looks some times a second whether one goes on. It needs that lock, which a thread that
waits in a collective does not hold.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import json
import mmap
import os
import select
import struct
import sys
import threading
from collections.abc import Iterator
from itertools import count
from time import monotonic_ns
from typing import TYPE_CHECKING, Final, SupportsIndex

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Save", "begin_save", "phase", "progress", "should_checkpoint"]

NAMESPACE: Final = "REDELASTIC_PID_NAMESPACE"  # the agent's: a file in its /proc means nothing in another one
VARIABLE: Final = "REDELASTIC_WORKER"  # <file>:<token>; the token tells it from another file of the same name
STACK_SIGNAL: Final = 39  # SIGRTMIN + 5 on Linux: a real-time signal that nothing else uses

# The slot, which is all of the file: its fields, and the writer of each.
TOKEN: Final = 0  # agent, once
REQUESTED: Final = 1  # agent: number of checkpoints requested so far
PID: Final = 2  # worker: which process reports for it; 0 until it has called one of the functions
CALLS: Final = 3  # worker: calls of progress()
STEP: Final = 4  # worker: step of the last call
SEEN: Final = 5  # worker: last request seen << CALL_BITS | calls of progress() until then; -1 until it has asked
AT: Final = 6  # worker: when it last called progress(), or began or ended a phase, on the monotonic clock in ns
LIMIT: Final = 7  # worker: timeout of its phase in ms; 0 outside phases
BEGUN: Final = 8  # worker: number of the last save that begin_save() began,
DONE: Final = 9  # worker: and of the last one that is complete
STACKS: Final = 10  # agent, once: the number of its file for this worker's stacks,
RECORDS: Final = 11  # of its file for what this worker's flight recorder holds,
ASKS: Final = 12  # and of its pipe, which has a byte for each request for that
LOOKS: Final = 13  # worker: how often its thread has looked whether a collective goes on,
WAITS: Final = 14  # worker: and how often one did
PHASE: Final = 15  # worker: name of its phase, in the fields from here on
HIGH_FILE: Final = 500  # file descriptors are given out from the lowest up
SLOT_BYTES: Final = 160
LOOK_INTERVAL_MS: Final = 100  # on average
GOLDEN_RATIO: Final = 0.618034  # its multiples are spread evenly over the fractions
SETTLED_LOOKS: Final = 10  # in a row without a new process group, or one that has yet to be used
CALL_BITS: Final = 44  # 17 * 10^12 calls, and 500,000 requests

# The slot of a process that has no agent or is not the worker; nothing reads it.
_unread_slot = memoryview(bytearray(SLOT_BYTES)).cast("q")
_slot = _unread_slot  # where this process writes
_decided = False  # whether that has been decided
_deciding = threading.RLock()  # a signal handler may interrupt the decision, and call too
_finishing = threading.RLock()  # several threads may complete saves; a signal handler may interrupt one
_phases: list[list[int]] = []  # that this process has entered and not left: limit and name of each
_NAME = struct.Struct(f"{SLOT_BYTES // 8 - PHASE}q")
_calls = count(1)  # shared by all threads; next() is one step for them
_name = ""  # value of the variable when the file was opened
_mapped: memoryview[int] | None = None  # slot in that file; None if it is not there, or is the parent's


def progress(step: SupportsIndex) -> None:
    """Tell the agent that training is making progress. Every rank must call it after each step.

    It takes well under a microsecond, and works whatever happens to the agent. Outside an agent, and in child processes
    such as a ``DataLoader``'s, it does nothing. Any thread may call it.

    Args:
        step: number of the step just finished: a Python, NumPy or PyTorch integer. A value on a GPU makes the call wait
            for the GPU.

    Raises:
        TypeError: ``step`` is not an integer.
        ValueError: ``step`` does not fit a signed 64-bit integer.
    """
    if not _decided:
        _begin()
    try:
        _slot[STEP] = step  # type: ignore[call-overload]  # it takes anything with __index__
    except TypeError:
        raise TypeError(f"redelastic.progress() takes an integer step, not {step!r:.80}.") from None
    except ValueError:
        bits = step.__index__().bit_length()
        raise ValueError(
            f"redelastic.progress() takes a step of at most 63 bits plus a sign, not {bits} bits."
        ) from None
    _slot[AT] = monotonic_ns()
    _slot[CALLS] = next(_calls)  # last: the agent reads the others once this has changed


def should_checkpoint() -> bool:
    """Whether the agent wants a checkpoint now, because it will stop the workers soon. True once per request.

    The next call of :func:`progress` tells the agent that the checkpoint is saved. The processes of a job see a
    request at slightly different steps, so a script whose processes save together must agree::

        for step in range(first_step, steps):
            train(step)
            wanted = torch.tensor(int(redelastic.should_checkpoint()), device=device)
            dist.all_reduce(wanted, op=dist.ReduceOp.MAX)
            if wanted.item() or step % 1000 == 0:
                save(step)
            redelastic.progress(step)

    Every process must call it the same number of times. A process that sees the request a step after the others makes
    all of them save once more. Outside an agent, and in child processes, it is False.
    """
    if not _decided:
        _begin()
    requested = _slot[REQUESTED]
    if requested == _slot[SEEN] >> CALL_BITS:
        return False
    # Both in one word: the agent must not mistake calls from before the request for later ones.
    _slot[SEEN] = requested << CALL_BITS | _slot[CALLS]
    return requested > 0


@contextlib.contextmanager
def phase(name: str, *, timeout: float) -> Iterator[None]:
    """Give a part of the script that takes long a time limit of its own, in place of ``--hang-timeout``.

    Within the block the worker hangs if neither :func:`progress` nor another phase is called for ``timeout`` seconds::

        with redelastic.phase("export", timeout=3600):
            export(model)

    Phases may be nested: the last one entered counts. Only the main thread may use them. Without ``--hang-timeout``, in
    child processes and outside an agent, they do nothing.

    Args:
        name: of the phase, which the agent's report of a hang mentions; its first 40 bytes count.
        timeout: how long it may take, in seconds.

    Raises:
        ValueError: ``timeout`` is not a positive number.
    """
    if not 0 < timeout < 1e15:
        raise ValueError(f"redelastic.phase() takes a positive timeout in seconds, not {timeout!r:.80}.")
    if not _decided:
        _begin()
    text = name.encode(errors="replace")[: _NAME.size].decode(errors="ignore").encode()
    entered = [max(1, round(1000 * timeout)), *_NAME.unpack(text.ljust(_NAME.size, b"\0"))]
    _phases.append(entered)
    _show_phase()
    try:
        yield
    finally:
        _phases[:] = [other for other in _phases if other is not entered]  # callbacks may leave one before its parent
        if not sys.is_finalizing():  # a phase that lasts to the end of the process does not end while it is taken apart
            _show_phase()


def _show_phase() -> None:
    limit, *name = _phases[-1] if _phases else [0] * (_NAME.size // 8 + 1)
    _slot[AT] = monotonic_ns()  # first: with the limit of before, the time in the phase that ends would be a hang
    for field, value in enumerate(name, PHASE):
        _slot[field] = value
    _slot[LIMIT] = limit


class Save:
    """A save in progress, as :func:`begin_save` returns it. Leaving a ``with`` block completes it, unless it raises."""

    def __init__(self, number: int) -> None:
        self._number = number

    def complete(self) -> None:
        """Tell the agent that this save and all earlier ones are durable. Any thread may call it, and repeat it."""
        with _finishing:
            _slot[DONE] = max(_slot[DONE], self._number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.complete()


def begin_save() -> Save:
    """Tell the agent that a save has begun that may go on after the next :func:`progress`.

    A draining node waits until the last save that has begun is complete, or for ``--drain-timeout``. Call it before
    that :func:`progress`, and complete the save once all is written::

        save = redelastic.begin_save()
        future = dcp.async_save(state, checkpoint_id=folder)
        future.add_done_callback(lambda done: done.exception() or save.complete())
        redelastic.progress(step)

    One that fails is never complete: the next complete one takes its place. A script that has written everything when
    it calls :func:`progress` needs none of this.
    """
    if not _decided:
        _begin()
    with _finishing:
        _slot[BEGUN] += 1
        return Save(_slot[BEGUN])


def _begin() -> None:
    """Report for the worker from now on, unless another live process does (a child that was spawned, not forked)."""
    global _slot, _decided, _calls  # noqa: PLW0603  # one process, one slot
    with _deciding:
        slot = None if _decided else _open()
        if slot is not None and (slot[PID] in (0, os.getpid()) or not _is_alive(slot[PID])):
            if slot[PID] != os.getpid():  # what another process had begun has ended with it
                slot[LIMIT], slot[DONE] = 0, slot[BEGUN]
            slot[PID] = os.getpid()
            _calls = count(slot[CALLS] + 1)
            _slot = slot
            _start_thread(slot)
        _decided = True  # last: other threads write from then on


def _start_thread(slot: memoryview[int]) -> None:
    """Begin to look at the flight recorder, and to write to the agent's file what it holds, whenever the agent asks."""
    folder = os.environ[VARIABLE].rpartition("/")[0]
    try:
        asks, records = _open_high(f"{folder}/{slot[ASKS]}", os.O_RDONLY), _open_high(f"{folder}/{slot[RECORDS]}")
    except OSError:
        return  # the agent is gone, or has started other workers
    threading.Thread(target=_attend, args=(slot, asks, records), name="redelastic-records", daemon=True).start()


def _attend(slot: memoryview[int], asks: int, records: int) -> None:
    requests = select.poll()
    requests.register(asks, select.POLLIN)
    recorders = _Recorder("_dump_fr_trace_json", of_nccl=False), _Recorder("_dump_nccl_trace_json", of_nccl=True)
    for place in count():
        # Looks at even intervals might always meet the same moment of a step.
        if not requests.poll(2 * LOOK_INTERVAL_MS * (place * GOLDEN_RATIO % 1)):
            seen = [recorder.look() for recorder in recorders]
            slot[WAITS] += any(seen)
            slot[LOOKS] += seen != [None, None]
        elif os.read(asks, 1):
            documents = [document for recorder in recorders if (document := recorder.dump(includeCollectives=True))]
            with os.fdopen(records, "ab", closefd=False) as file:
                file.write(b"[" + b",".join(documents) + b"]\n")
        else:
            return  # the agent is gone


class _Recorder:
    """One of torch's flight recorders: that of NCCL in builds that have it, or that of gloo and others.

    torch (2.13) adds a process group to it at the group's first collective, and dumps its groups without their lock: a
    dump at that moment may crash the process.
    """

    def __init__(self, function: str, *, of_nccl: bool) -> None:
        self._function, self._of_nccl = function, of_nccl
        self._groups: tuple[int, int] = 0, 0  # at the last look: how many had been made, and how many it has
        self._settled = 0  # looks in a row

    def dump(self, **options: bool) -> bytes | None:
        """What it holds, as a JSON document; None if this torch has no such recorder, or dumps it differently."""
        with contextlib.suppress(Exception):
            c10d = sys.modules["torch"]._C._distributed_c10d  # noqa: SLF001
            document = getattr(c10d, self._function)(onlyActive=False, **options)
            return document if isinstance(document, bytes) else document.encode()
        return None

    def look(self) -> bool | None:
        """Whether a collective goes on in any group; None if that is not known, or a dump is not safe."""
        with contextlib.suppress(Exception):
            if self._is_settled() and (document := self.dump(includeCollectives=False)):
                groups = json.loads(document)["pg_status"].values()
                return any(
                    int(one["last_enqueued_collective"]) > int(one["last_completed_collective"]) for one in groups
                )
        return None

    def _is_settled(self) -> bool:
        """Whether it has all groups: none is new, and each has been used for some looks."""
        world = sys.modules["torch.distributed.distributed_c10d"]._world  # noqa: SLF001
        backends = [each._get_backend(device) for each in list(world.pg_names) for device in each._device_types]  # noqa: SLF001
        own = [each for each in backends if (each._get_backend_name() == "nccl") == self._of_nccl]  # noqa: SLF001
        all_used = own and all(each._get_sequence_number_for_group() for each in own)  # noqa: SLF001
        before, self._groups = self._groups, (world.group_count, len(own))
        self._settled = self._settled + 1 if all_used and before == self._groups else 0
        return self._settled > SETTLED_LOOKS


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # another user's
    return True


def _open() -> memoryview[int] | None:
    """Map the slot that the environment names, and have stacks written to the file beside it; None if there is none."""
    global _name, _mapped  # noqa: PLW0603
    name = os.environ.get(VARIABLE, "")
    if name == _name:
        return _mapped
    _name, _mapped = name, None
    path, _, token = name.rpartition(":")
    try:
        if os.environ.get(NAMESPACE, "") not in ("", pid_namespace()):
            raise OSError("it runs in another process namespace")  # noqa: TRY301
        with open(path, "r+b", buffering=0) as file:  # noqa: PTH123  # pathlib is slow to import
            slot = memoryview(mmap.mmap(file.fileno(), SLOT_BYTES)).cast("q")
        if slot[TOKEN] == int(token):  # else it belongs to a later group of workers, or to something else
            stacks = _open_high(f"{path.rpartition('/')[0]}/{slot[STACKS]}")
            faulthandler.register(STACK_SIGNAL, stacks, all_threads=True, chain=False)
            _mapped = slot
    except FileNotFoundError:
        pass  # the agent is gone
    except (OSError, ValueError, RuntimeError) as e:
        with contextlib.suppress(Exception):  # stderr may be closed, or replaced by anything
            sys.stderr.write(f"redelastic: the agent cannot see the progress of process {os.getpid()}: {e}\n")
    return _mapped


def _open_high(path: str, flags: int = os.O_WRONLY | os.O_APPEND) -> int:
    """Open a file for as long as the process lives: faulthandler needs it."""
    file = os.open(path, flags)
    with contextlib.suppress(OSError):  # there may be no such number
        # If the script closes all its files, the next ones that it opens do not get this number.
        high = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, HIGH_FILE)
        os.close(file)
        return high
    return file


def pid_namespace() -> str:
    """A name of this process' namespace of processes."""
    return os.readlink("/proc/self/ns/pid")  # noqa: PTH115  # pathlib is slow to import


def _detach() -> None:
    """Detach a forked child from the worker's slot; if its environment names another slot, it will use that one."""
    global _slot, _decided, _mapped, _deciding, _finishing
    _slot, _decided, _mapped = _unread_slot, False, None
    _phases.clear()
    _deciding, _finishing = threading.RLock(), threading.RLock()  # another thread of the parent may have held them


os.register_at_fork(after_in_child=_detach)
_open()  # so that a worker that hangs before its first call can write its stacks
