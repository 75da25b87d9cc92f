"""How long it takes to form process groups and pass barriers on a store: up to 64 processes, forked from one."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import socket
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any, Final, NoReturn

import torch.distributed as dist

from benchmarks.harness import TimeLimitError, run_alone
from benchmarks.report import Progress, Spread, Table
from benchmarks.store_contenders import OURS, TCP, Servers, bare_redis
from benchmarks.store_script import TTL
from redelastic import register_init_method
from redelastic.redis.keys import RunKeys
from redelastic.redis.scripts import STORE_BARRIER
from redelastic.store import RedisStore

OURS_BY_URL: Final = "redelastic, redis://"
TCP_BY_URL: Final = "TCPStore, tcp://"
BY_URL: Final = (OURS_BY_URL, TCP_BY_URL)
SCRIPTED: Final = "Redis, bare, with our script"  # a barrier, by a client that computes nothing
GROUPS: Final = (OURS, TCP, SCRIPTED, *BY_URL)
TARGETS: Final = (1.0, 3.0)  # multiples of TCPStore's time for a group and for a barrier
BARRIERS: Final = 10
GROUP_LIMIT: Final = 60  # seconds for one group


@dataclass(frozen=True)
class Member:
    """One process of a group of ``n``; rank 0 runs TCPStore's server on ``listener`` or, by URL, on its port."""

    contender: str
    servers: Servers
    run_id: str
    listener: socket.socket
    port: int
    rank: int
    n: int


def group_tables(servers: Servers, sizes: tuple[int, ...], repeat: int, progress: Progress) -> Iterator[Table]:
    """Contenders take turns at each size."""
    init = Table(
        "store-init", "init_process_group('gloo') of n processes, on a store that is open, or by URL", "processes"
    )
    barrier = Table("store-barrier", "store.barrier() of n processes", "processes")
    init.log = barrier.log = True
    for n in sizes:
        progress(f"process groups of {n}")
        try:
            found = run_alone(form_groups, (servers, n, repeat), 3 * GROUP_LIMIT)
        except TimeLimitError as e:
            found = dict.fromkeys(GROUPS, (str(e), str(e)))
        for contender in GROUPS:
            formed, waited = found[contender]
            if contender != SCRIPTED:
                init.put(n, contender, formed)
            if contender not in BY_URL:
                barrier.put(n, contender, waited)
        for table, factor in zip((init, barrier), TARGETS, strict=True):
            if isinstance(theirs := table.cells[str(n)][TCP], Spread):
                table.targets[str(n)] = factor * theirs.median
    yield from (init, barrier)


def form_groups(servers: Servers, n: int, repeat: int) -> dict[str, Any]:
    """Form groups of ``n`` children forked from this process, which has imported torch for all of them.

    Returns:
        For each contender: the times from the first child's call to the last one's return, and those of a barrier; or
        why there are none. The first group does not count.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    register_init_method()
    gc.collect()
    gc.freeze()  # so that the children do not copy what they never touch
    found: dict[str, Any] = {contender: ([], []) for contender in GROUPS}
    for turn in range(repeat + 1):
        for contender in GROUPS:
            formed, waited = found[contender]
            if isinstance(formed, str):
                continue
            try:
                times = _form(contender, servers, n)
            except threading.BrokenBarrierError:
                if contender not in (TCP, TCP_BY_URL):
                    raise
                found[contender] = (f"not within {GROUP_LIMIT} s",) * 2
                continue
            if turn:
                formed.append(times[0])
                waited.append(times[1])
    return found


def _form(contender: str, servers: Servers, n: int) -> tuple[float, float]:
    """Form one group; its members are killed at the end in any case."""
    context = multiprocessing.get_context("fork")
    step = context.Barrier(n + 1)  # this process among them
    times: Any = context.Array("d", 4 * n, lock=False)
    run_id = f"group-{uuid.uuid4().hex[:12]}"
    children: list[int] = []
    with socket.create_server(("127.0.0.1", 0), backlog=n) as listener:
        port: int = listener.getsockname()[1]
        if contender == TCP_BY_URL:
            listener.close()  # rank 0 binds it
        try:
            for rank in range(n):
                child = os.fork()
                if child == 0:
                    _be_member(Member(contender, servers, run_id, listener, port, rank, n), step, times)
                children.append(child)
            for _ in range(3):  # all have started; have formed the group; have passed their barriers
                step.wait(GROUP_LIMIT)
        finally:
            for child in children:
                os.kill(child, signal.SIGKILL)
            for child in children:
                os.waitpid(child, 0)
    began, formed, entered, left = (times[i::4] for i in range(4))
    return max(formed) - min(began), (max(left) - min(entered)) / BARRIERS


def bare_barrier(me: Member, bare: Any) -> Callable[[str], object]:
    """What ``RedisStore.barrier`` sends, on a bare socket."""
    run = RunKeys(me.run_id)
    store, numbers = run.store("bare"), count(1)
    digest = bare.ask("SCRIPT", "LOAD", STORE_BARRIER.text)
    fixed = [*run.of_store(store), run.wake]

    def barrier(key: str) -> object:
        counts, last = f"{key}/num_members".encode(), f"{key}/last_member".encode()
        keys = (*fixed, store.stream(counts), store.stream(last))
        script = ("EVALSHA", digest, len(keys), *keys, "", TTL, f"{me.rank}", next(numbers), counts, last, me.n, "1")
        return bare.ask_both(script, ("XREAD", "BLOCK", 1000 * GROUP_LIMIT, "STREAMS", store.stream(last), "0-0"))

    return barrier


def _be_member(me: Member, step: Any, times: Any) -> NoReturn:
    timeout = timedelta(seconds=GROUP_LIMIT)
    store: Any = None
    stack = ExitStack()
    try:
        if me.contender == OURS:
            store = RedisStore(me.servers.redis, me.run_id, timeout=timeout)
        elif me.contender == TCP:
            server = me.listener.detach() if me.rank == 0 else None
            store = dist.TCPStore("127.0.0.1", me.port, me.n, me.rank == 0, timeout, master_listen_fd=server)
        barrier = store and (lambda key: store.barrier(key, me.n))
        if me.contender == SCRIPTED:
            barrier = bare_barrier(me, stack.enter_context(bare_redis(me.servers.redis, me.run_id)))
        url = None if barrier else f"{me.servers.redis}?run_id={me.run_id}"
        if me.contender == TCP_BY_URL:
            url = f"tcp://127.0.0.1:{me.port}"
        step.wait(GROUP_LIMIT)
        times[4 * me.rank] = time.monotonic()
        if me.contender != SCRIPTED:
            dist.init_process_group("gloo", url, timeout, me.n, me.rank, store)
        times[4 * me.rank + 1] = time.monotonic()
        step.wait(GROUP_LIMIT)
        for i in range(BARRIERS + 1 if barrier else 0):
            barrier(f"barrier-{i}")
            if i == 0:  # all have got this far
                times[4 * me.rank + 2] = time.monotonic()
        times[4 * me.rank + 3] = time.monotonic()
        step.wait(GROUP_LIMIT)
        signal.pause()
    except BaseException:  # noqa: BLE001  # a child must not continue as its parent
        step.abort()
        traceback.print_exc()
    finally:
        os._exit(1)
