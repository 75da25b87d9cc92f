"""What is measured on a host and between hosts, in a process of its own: it may hang (``probe.py``)."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

COMPUTE_S: Final = 1.0  # long enough that a limited share of a CPU shows, or a GPU that gets hot
COPY_S: Final = 0.5
COPY_BYTES: Final = {"cpu": 64 << 20, "cuda": 1 << 30}  # by type of device: far more than its caches hold
WRITE_BYTES: Final = 64 << 20
CHUNK_BYTES: Final = 8 << 20
WRITE_S: Final = 3.0  # after which no more is written
ROUND_TRIPS: Final = 20
SEND_BYTES: Final = (1 << 20, 256 << 20)  # of the first transfer, and at most
SEND_S: Final = 0.3  # a transfer that takes as long is the last

GIGA: Final = 1e9


def devices(backend: str) -> list[torch.device]:
    """What computes: all GPUs with NCCL, else the CPU."""
    if backend != "nccl":
        return [torch.device("cpu")]
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


def compute(device: torch.device) -> float:
    """Multiply matrices; returns GFLOP/s."""
    size, kind = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    matrix = torch.ones(size, size, dtype=kind, device=device)
    return 2 * size**3 / GIGA * _per_second(lambda: torch.mm(matrix, matrix), device, COMPUTE_S)


def memory(device: torch.device) -> float:
    """Copy memory; returns GB/s, read and written."""
    size = COPY_BYTES[device.type]
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / GIGA * _per_second(lambda: target.copy_(source), device, COPY_S)


def _per_second(act: Callable[[], object], device: torch.device, seconds: float) -> float:
    """How often per second something can be done."""

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    act()
    finish()
    times, started = 0, time.perf_counter()
    while (took := time.perf_counter() - started) < seconds or not times:
        act()
        finish()
        times += 1
    return times / took


def write(folder: Path) -> float:
    """Write a file in a folder and sync it; returns MB/s. The file is removed.

    Raises:
        OSError: the folder is missing, full, or cannot be written.
    """
    chunk, written = os.urandom(CHUNK_BYTES), 0
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".redelastic-", buffering=0) as file:
        started = time.perf_counter()
        while written < WRITE_BYTES and (not written or time.perf_counter() - started < WRITE_S):
            written += file.write(chunk)
            os.fsync(file.fileno())
        return written / 1e6 / (time.perf_counter() - started)


def link(rank: int, device: torch.device) -> dict[str, float]:
    """Measure the link to the other rank of the default group, of two.

    Returns:
        latency: of a round trip, in ms, on both ranks alike; send: what this rank sends, in Gbit/s.
    """
    word = torch.zeros(1, device=device)
    latency = torch.tensor([1000 * _round_trip(rank, word)], dtype=torch.float32, device=device)
    dist.broadcast(latency, 0)
    sent = 0.0
    for sender in (0, 1):
        if sender == rank:
            sent = _send(1 - rank, word)
        else:
            _receive(sender, word)
    return {"latency": float(latency.item()), "send": sent}


def _round_trip(rank: int, word: torch.Tensor) -> float:
    times = []
    for _ in range(ROUND_TRIPS):
        started = time.perf_counter()
        for sender in (0, 1):
            if sender == rank:
                dist.send(word, 1 - rank)
            else:
                dist.recv(word, sender)
        word.sum().item()  # with NCCL, sends and receives go on in the background
        times.append(time.perf_counter() - started)
    return min(times)  # what else a busy host does comes between some of them


def _send(peer: int, word: torch.Tensor) -> float:
    """Send ever larger messages, until one takes long enough; returns the Gbit/s of the last."""
    size, largest = SEND_BYTES
    content = torch.empty(largest, dtype=torch.uint8, device=word.device)
    while True:
        started = time.perf_counter()
        dist.send(content[:size], peer)
        dist.recv(word, peer)
        word.sum().item()
        took = time.perf_counter() - started
        is_last = took >= SEND_S or size == largest
        dist.send(torch.full_like(word, float(is_last)), peer)
        if is_last:
            return 8 * size / GIGA / took
        size = min(4 * size, largest)


def _receive(peer: int, word: torch.Tensor) -> None:
    size, largest = SEND_BYTES
    content = torch.empty(largest, dtype=torch.uint8, device=word.device)
    while True:
        dist.recv(content[:size], peer)
        dist.send(word, peer)
        is_last = torch.zeros_like(word)
        dist.recv(is_last, peer)
        if is_last.item():
            return
        size = min(4 * size, largest)


def all_reduce(size: int, device: torch.device) -> dict[str, float]:
    """Sum a tensor of ``size`` bytes over the default group, after a first time that makes the connections.

    Returns:
        seconds: that it took; bandwidth: of each rank's link, in Gbit/s, if it is done as a ring.
    """
    content = torch.ones(size // 4, dtype=torch.float32, device=device)
    dist.all_reduce(content[:1])
    dist.barrier()
    started = time.perf_counter()
    dist.all_reduce(content)
    content[:1].sum().item()
    seconds = time.perf_counter() - started
    ranks = dist.get_world_size()
    return {"seconds": seconds, "bandwidth": 8 * size * 2 * (ranks - 1) / ranks / GIGA / seconds}
