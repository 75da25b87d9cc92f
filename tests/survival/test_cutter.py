"""Cutter: all members of a group leave its operations, whatever they are doing; nothing else is cut."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from redelastic.survival.cutter import CUT_INTERVAL, LATE, Cutter
from tests.support.long_tests import quick_rows
from tests.support.processes import Processes

SIZE = 3
DESCRIPTORS = Path("/proc/self/fd")
THREADS = Path("/proc/self/task")


def _work_until_cut(folder: str, rank: int, numbers: int, cuts: int) -> tuple[int, int]:
    """In each of several groups: reduce until it ends at an arbitrary moment.

    Returns how many groups it has left, and how many descriptors and threads the last of them cost more than the first.

    As in a training, one rank notices the end between two operations, and the others wait for it in the next one.
    """
    held: list[int] = []
    for cut in range(cuts):
        cutter = Cutter()
        store = dist.FileStore(f"{folder}/store-{cut}", SIZE)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE, timeout=timedelta(seconds=60))
        cutter.mark()
        ended, over = threading.Event(), threading.Event()

        def end_later(
            cutter: Cutter = cutter,
            ended: threading.Event = ended,
            over: threading.Event = over,
            pause: float = cut % 10 / 500,
        ) -> None:
            over.wait(pause)
            ended.set()
            while not over.wait(CUT_INTERVAL):
                cutter.cut()

        thread = threading.Thread(target=end_later)
        thread.start()
        with contextlib.suppress(RuntimeError):
            while not (ended.is_set() and rank == cut % SIZE):
                dist.all_reduce(torch.ones(numbers))
        over.set()
        thread.join()
        cutter.hold()
        dist.destroy_process_group()
        store.add("left", 1)  # as with the agents: nobody goes on before all have left
        while store.add("left", 0) < SIZE:
            time.sleep(0.001)
        cutter.release()
        held.append(len(list(DESCRIPTORS.iterdir())) + len(list(THREADS.iterdir())))
    return len(held), held[-1] - held[0]


@pytest.mark.parametrize(
    ("numbers", "cuts"),
    quick_rows([(1000, 20), (100_000, 10), (4_000_000, 5), (10, 100), (100, 100), (1000, 150), (10_000, 150)], 2),
)
def test_every_member_leaves_and_keeps_nothing(processes: Processes, tmp_path: Path, numbers: int, cuts: int) -> None:
    for rank in range(SIZE):
        processes.start(_work_until_cut, str(tmp_path), rank, numbers, cuts)
    assert processes.values() == [(cuts, 0)] * SIZE


def _cut(cutter: Cutter, connection: socket.socket) -> None:
    """Cut until the connection's reader is awake."""
    connection.settimeout(CUT_INTERVAL)
    while True:
        cutter.cut()
        with contextlib.suppress(TimeoutError):
            assert connection.recv(1) == b""
            return


def test_only_connections_made_before_the_mark_are_cut_and_no_older_ones() -> None:
    with contextlib.ExitStack() as opened:

        def connect() -> tuple[socket.socket, socket.socket]:
            one = opened.enter_context(socket.create_connection(listening.getsockname()))
            return one, opened.enter_context(listening.accept()[0])

        listening = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
        older = connect()
        cutter = Cutter()
        opened.callback(cutter.release)
        late_listening = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
        own = connect()
        cutter.mark()
        later = connect()
        own[0].sendall(b"x")
        cutter.cut()
        own[0].sendall(b"x")
        own[1].settimeout(20)
        cutter.cut()
        assert own[1].recv(2) == b"xx", "nothing is cut while there is traffic"
        _cut(cutter, own[0])
        for one, other in (older, later):
            other.sendall(b"x")
            assert one.recv(1) == b"x"
        opened.enter_context(socket.create_connection(late_listening.getsockname()))
        opened.enter_context(late_listening.accept()[0])


def test_on_a_busy_machine_it_has_to_be_quiet_for_longer() -> None:
    with contextlib.ExitStack() as opened:
        listening = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
        cutter = Cutter()
        own = opened.enter_context(socket.create_connection(listening.getsockname()))
        opened.enter_context(listening.accept()[0])
        begun = time.monotonic()
        cutter.cut()
        threading.Event().wait(0.1)  # late, as without a processor
        _cut(cutter, own)
        cutter.release()
        assert time.monotonic() - begun >= LATE * (0.1 - CUT_INTERVAL)


def test_a_peer_notices_nothing_before_the_release() -> None:
    cutter = Cutter()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        own = socket.create_connection(listening.getsockname())
        _cut(cutter, own)
        own.close()
        peer, _ = listening.accept()
        with peer:
            peer.sendall(b"x")
            peer.settimeout(0.05)
            with pytest.raises(TimeoutError):
                peer.recv(1)
            cutter.release()
            peer.settimeout(10)
            with contextlib.suppress(ConnectionResetError):
                assert peer.recv(1) == b""


def test_nothing_is_held_twice_by_a_cut_amid_a_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.ExitStack() as opened:
        listening = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
        cutter = Cutter()
        opened.enter_context(socket.create_connection(listening.getsockname()))
        opened.enter_context(listening.accept()[0])
        cutter.cut()
        descriptors = len(list(DESCRIPTORS.iterdir()))
        holding = threading.Thread(target=cutter.hold)
        shutdown = socket.socket.shutdown

        def hold_meanwhile(connection: socket.socket, how: int) -> None:
            shutdown(connection, how)
            if not holding.ident:
                holding.start()
                holding.join(0.2)  # without a lock it would have ended long before

        monkeypatch.setattr(socket.socket, "shutdown", hold_meanwhile)
        while not holding.ident:
            cutter.cut()
        holding.join()
        cutter.release()
        assert len(list(DESCRIPTORS.iterdir())) == descriptors


def test_a_file_in_a_closed_sockets_place_is_left_alone() -> None:
    with contextlib.ExitStack() as opened:
        listening = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
        cutter = Cutter()
        closed = socket.create_connection(listening.getsockname())
        place = closed.fileno()
        cutter.mark()
        closed.close()
        file = opened.enter_context(Path(__file__).open())
        assert file.fileno() == place
        descriptors = len(list(DESCRIPTORS.iterdir()))
        cutter.cut()
        cutter.hold()
        assert len(list(DESCRIPTORS.iterdir())) == descriptors
        assert file.readable()
