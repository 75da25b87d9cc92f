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
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, NoReturn

import torch.distributed as dist

from benchmarks.harness import TimeLimitError, run_alone
from benchmarks.report import Progress, Spread, Table
from benchmarks.store_contenders import OURS, TCP, Servers
from redelastic import register_init_method
from redelastic.store import RedisStore

OURS_BY_URL: Final = "redelastic, redis://"
TCP_BY_URL: Final = "TCPStore, tcp://"
BY_URL: Final = (OURS_BY_URL, TCP_BY_URL)
GROUPS: Final = (OURS, TCP, *BY_URL)
TARGETS: Final = (1.0, 3.0)  # multiples of TCPStore's time for a group and for a barrier
BARRIERS: Final = 10
GROUP_LIMIT: Final = 30  # seconds for one group


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
    for n in sizes:
        progress(f"process groups of {n}")
        try:
            found = run_alone(form_groups, (servers, n, repeat), 3 * GROUP_LIMIT)
        except TimeLimitError as e:
            found = dict.fromkeys(GROUPS, str(e))
        for contender, groups in found.items():
            for i, table in enumerate((init,) if contender in BY_URL else (init, barrier)):
                table.put(n, contender, groups if isinstance(groups, str) else [took[i] for took in groups])
        for table, factor in zip((init, barrier), TARGETS, strict=True):
            if isinstance(theirs := table.cells[str(n)][TCP], Spread):
                table.targets[str(n)] = factor * theirs.median
    yield from (init, barrier)


def form_groups(servers: Servers, n: int, repeat: int) -> dict[str, Any]:
    """Form groups of ``n`` children forked from this process, which has imported torch for all of them.

    Returns:
        For each contender: what :func:`_form` returns for all groups but the first, or why there is none.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    register_init_method()
    gc.collect()
    gc.freeze()  # so that the children do not copy what they never touch
    found: dict[str, Any] = {contender: [] for contender in GROUPS}
    for turn in range(repeat + 1):
        for contender in GROUPS:
            try:
                if isinstance(found[contender], str):
                    continue
                took = _form(contender, servers, n)
                if turn:  # the first one warms up
                    found[contender].append(took)
            except threading.BrokenBarrierError:
                if contender not in (TCP, TCP_BY_URL):
                    raise
                found[contender] = f"not within {GROUP_LIMIT} s"
    return found


def _form(contender: str, servers: Servers, n: int) -> tuple[float, float]:
    """Form one group; its members are killed at the end in any case.

    Returns:
        Seconds from the first member's call to the last one's return, and the same for one barrier.
    """
    context = multiprocessing.get_context("fork")
    step = context.Barrier(n + 1)  # this process among them
    figures: Any = context.Array("d", 4 * n, lock=False)
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
                    _be_member(Member(contender, servers, run_id, listener, port, rank, n), step, figures)
                children.append(child)
            for _ in range(3):  # all may start, have formed the group, and have passed their barriers
                step.wait(GROUP_LIMIT)
        finally:
            for child in children:
                os.kill(child, signal.SIGKILL)
            for child in children:
                os.waitpid(child, 0)
    began, formed, entered, left = (figures[i::4] for i in range(4))
    return max(formed) - min(began), (max(left) - min(entered)) / BARRIERS


def _be_member(me: Member, step: Any, figures: Any) -> NoReturn:
    timeout = timedelta(seconds=GROUP_LIMIT)
    store: Any = None
    try:
        if me.contender == OURS:
            store = RedisStore(me.servers.redis, me.run_id, timeout=timeout)
        elif me.contender == TCP:
            server = me.listener.detach() if me.rank == 0 else None
            store = dist.TCPStore("127.0.0.1", me.port, me.n, me.rank == 0, timeout, master_listen_fd=server)
        url = None if store else f"{me.servers.redis}?run_id={me.run_id}"
        if me.contender == TCP_BY_URL:
            url = f"tcp://127.0.0.1:{me.port}"
        step.wait(GROUP_LIMIT)
        began = time.monotonic()
        dist.init_process_group("gloo", url, timeout, me.n, me.rank, store)
        formed = time.monotonic()
        step.wait(GROUP_LIMIT)
        entered = 0.0
        for i in range(BARRIERS + 1 if store else 0):
            store.barrier(f"barrier-{i}", me.n)
            if i == 0:  # all have got this far
                entered = time.monotonic()
        figures[4 * me.rank : 4 * me.rank + 4] = (began, formed, entered, time.monotonic())
        step.wait(GROUP_LIMIT)
        signal.pause()
    except BaseException:  # noqa: BLE001  # a child must not continue as its parent
        step.abort()
        traceback.print_exc()
    finally:
        os._exit(1)
