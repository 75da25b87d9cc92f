"""How long it takes to form process groups and pass barriers on a store: up to 64 processes, forked from one."""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
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
from typing import Any, Final, NamedTuple, NoReturn

import psutil
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
    computed = Table(
        "store-init-cpu", f"CPU time of all until {sizes[-1]} processes are a group, on a store that is open", "store"
    )
    for n in sizes:
        progress(f"process groups of {n}")
        try:
            found = run_alone(form_groups, (servers, n, repeat), 3 * GROUP_LIMIT)
        except TimeLimitError as e:
            found = dict.fromkeys(GROUPS, dict.fromkeys(Group._fields, str(e)))
        for contender in GROUPS:
            took = found[contender]
            if contender != SCRIPTED:
                init.put(n, contender, took["formed"])
            if contender not in BY_URL:
                barrier.put(n, contender, took["waited"])
            if contender in (OURS, TCP) and n == sizes[-1]:
                computed.put(contender, "the processes", took["own"])
                computed.put(contender, "the kernel for them", took["kernel"])
                computed.put(contender, "the server", took["server"] if contender == OURS else "is in rank 0's process")
        for table, factor in zip((init, barrier), TARGETS, strict=True):
            if isinstance(theirs := table.cells[str(n)][TCP], Spread):
                table.targets[str(n)] = factor * theirs.median
    yield from (init, computed, barrier)


class Group(NamedTuple):
    """What a group took, in seconds.

    Attributes:
        formed: from the first call to the last return.
        waited: a barrier, likewise.
        own: CPU time of all its processes until it was formed.
        kernel: the kernel's for them.
        server: that of Redis.
    """

    formed: float
    waited: float
    own: float
    kernel: float
    server: float


def form_groups(servers: Servers, n: int, repeat: int) -> dict[str, Any]:
    """Form groups of ``n`` children forked from this process, which has imported torch for all of them.

    Returns:
        For each contender, by the names of a :class:`Group`: those of all groups but the first; or why there are none.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    register_init_method()
    gc.collect()
    gc.freeze()  # so that the children do not copy what they never touch
    groups: dict[str, list[Group]] = {contender: [] for contender in GROUPS}
    failed: dict[str, str] = {}
    for _ in range(repeat + 1):
        for contender in GROUPS:
            if contender in failed:
                continue
            try:
                groups[contender].append(_form(contender, servers, n))
            except threading.BrokenBarrierError:
                if contender not in (TCP, TCP_BY_URL):
                    raise
                failed[contender] = f"not within {GROUP_LIMIT} s"
    return {
        contender: dict.fromkeys(Group._fields, failed[contender])
        if contender in failed
        else dict(zip(Group._fields, zip(*formed[1:], strict=True), strict=True))
        for contender, formed in groups.items()
    }


def _form(contender: str, servers: Servers, n: int) -> Group:
    """Form one group; its members are killed at the end in any case."""
    context = multiprocessing.get_context("fork")
    step = context.Barrier(n + 1)  # this process among them
    figures: Any = context.Array("d", 6 * n, lock=False)
    run_id, redis = f"group-{uuid.uuid4().hex[:12]}", psutil.Process(servers.pids[1])
    children: list[int] = []
    with socket.create_server(("127.0.0.1", 0), backlog=n) as listener:
        port: int = listener.getsockname()[1]
        if contender == TCP_BY_URL:
            listener.close()  # rank 0 binds it
        try:
            for rank in range(n):
                child = os.fork()
                if child == 0:
                    _be_member(Member(contender, servers, run_id, listener, port, rank, n), step, figures)
                children.append(child)
            step.wait(GROUP_LIMIT)
            before = redis.cpu_times()
            for _ in range(2):  # all may start; have formed the group
                step.wait(GROUP_LIMIT)
            after = redis.cpu_times()
            for _ in range(2):  # all may begin, and have passed, their barriers
                step.wait(GROUP_LIMIT)
        finally:
            for child in children:
                os.kill(child, signal.SIGKILL)
            for child in children:
                os.waitpid(child, 0)
    began, formed, entered, left, own, kernel = (figures[i::6] for i in range(6))
    return Group(
        formed=max(formed) - min(began),
        waited=(max(left) - min(entered)) / BARRIERS,
        own=sum(own),
        kernel=sum(kernel),
        server=after.user + after.system - before.user - before.system,
    )


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


def _be_member(me: Member, step: Any, figures: Any) -> NoReturn:
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
        used = resource.getrusage(resource.RUSAGE_SELF)
        step.wait(GROUP_LIMIT)
        began = time.monotonic()
        if me.contender != SCRIPTED:
            dist.init_process_group("gloo", url, timeout, me.n, me.rank, store)
        formed, now = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
        step.wait(GROUP_LIMIT)
        step.wait(GROUP_LIMIT)
        entered = 0.0
        for i in range(BARRIERS + 1 if barrier else 0):
            barrier(f"barrier-{i}")
            if i == 0:  # all have got this far
                entered = time.monotonic()
        spent = now.ru_utime - used.ru_utime, now.ru_stime - used.ru_stime
        figures[6 * me.rank : 6 * me.rank + 6] = (began, formed, entered, time.monotonic(), *spent)
        step.wait(GROUP_LIMIT)
        signal.pause()
    except BaseException:  # noqa: BLE001  # a child must not continue as its parent
        step.abort()
        traceback.print_exc()
    finally:
        os._exit(1)
