"""Hosts as network namespaces of this machine, linked to a router that can drop and delay packets.

A namespace has no name and no process of its own. A file descriptor of this process and the processes in it keep it:
when they have ended, however they end, nothing is left. This machine's own network is not touched.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import random
import select
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import pytest
from typing_extensions import Self

from redelastic.redis.server import RedisServer

LINK: Final = "eth0"  # device of each host; the router's end of the link has the host's name
_CLONE_NEWNET: Final = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_SLOW: Final = "slow"  # the router's device for slow packets
_TABLE: Final = 7  # the router's routing table for them
_MTU: Final = 1 << 16

Way = tuple[str, str]  # from one host to another


def _here() -> int:
    """This thread's namespace, as a file descriptor."""
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY)


def _libc(function: str, *args: int) -> None:
    """Call a function of libc; Python has unshare and setns only from 3.12 on."""
    if getattr(ctypes.CDLL(None, use_errno=True), function)(*args) != 0:
        raise OSError(ctypes.get_errno(), f"{function}: {os.strerror(ctypes.get_errno())}")


@contextlib.contextmanager
def _back_home() -> Iterator[None]:
    """Return this thread to its namespace at the end of the block."""
    home = _here()
    try:
        yield
    finally:
        _libc("setns", home, _CLONE_NEWNET)
        os.close(home)


def _new_namespace() -> int:
    with _back_home():
        _libc("unshare", _CLONE_NEWNET)
        return _here()


def _ip(*commands: str) -> None:
    done = subprocess.run(["ip", "-batch", "-"], input="\n".join(commands), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"ip: {' '.join(done.stderr.split())}")


class Network:
    """Hosts that reach each other through a router, for one block.

    Args:
        names: the hosts' names.

    Raises:
        OSError: this process may not make namespaces, there is no ``ip``, or the kernel lacks something.
    """

    def __init__(self, *names: str) -> None:
        self.addresses = {name: f"192.0.2.{4 * i + 2}" for i, name in enumerate(names)}
        self._namespaces: dict[str, int] = {}

    def __enter__(self) -> Self:
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_exc_info: object) -> None:
        while self._namespaces:
            os.close(self._namespaces.popitem()[1])

    def _build(self) -> None:
        self._namespaces["router"] = _new_namespace()
        with self.inside("router"):
            Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
            for which in ("all", "default"):  # for the sources of slow packets, their device is not the expected one
                Path(f"/proc/sys/net/ipv4/conf/{which}/rp_filter").write_text("0")
        for i, name in enumerate(self.addresses):
            self._namespaces[name] = _new_namespace()
            there = f"/proc/{os.getpid()}/fd/{self._namespaces[name]}"
            with self.inside("router"):
                _ip(
                    f"link add name {name} type veth peer name {LINK} netns {there}",
                    f"addr add 192.0.2.{4 * i + 1}/30 dev {name}",
                    f"link set dev {name} up",
                )
            with self.inside(name):
                _ip("link set lo up", f"addr add {self.addresses[name]}/30 dev {LINK}")
            self.plug_in(name)

    @contextlib.contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Put this thread, and the threads and processes that it starts, on that host."""
        with _back_home():
            _libc("setns", self._namespaces[name], _CLONE_NEWNET)
            yield

    def pull_out(self, name: str) -> None:
        """Take the host's link down: it reaches no other host, and its system calls say so."""
        with self.inside(name):
            _ip(f"link set dev {LINK} down")

    def plug_in(self, name: str) -> None:
        """Bring the host's link up."""
        with self.inside(name):
            router = self.addresses[name].rpartition(".")
            _ip(f"link set dev {LINK} up", f"route add default via {router[0]}.{int(router[2]) - 1}")

    @contextlib.contextmanager
    def cut(self, ways: Iterable[Way]) -> Iterator[None]:
        """Drop, without an error, what the first host of each way sends to the second."""
        rules = [f"iif {source} to {self.addresses[target]} blackhole" for source, target in ways]
        with self._ruled(rules):
            yield

    @contextlib.contextmanager
    def slow(self, name: str, delay: float, loss: float = 0.0) -> Iterator[None]:
        """Delay what a host sends by ``delay`` seconds, and drop it with probability ``loss``.

        Not every kernel has netem, so the packets go through this process instead.
        """
        with self.inside("router"):
            device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        with contextlib.ExitStack() as opened:
            opened.callback(os.close, device)
            with self.inside("router"):
                request = struct.pack("16sH22x", _SLOW.encode(), _IFF_TUN | _IFF_NO_PI)
                fcntl.ioctl(device, _TUNSETIFF, request)
                _ip(f"link set dev {_SLOW} up", f"route add default dev {_SLOW} table {_TABLE}")
            stop, stopped = os.pipe()
            opened.callback(os.close, stop)
            carrier = threading.Thread(target=_carry, args=(device, stop, delay, loss), daemon=True)
            carrier.start()
            opened.callback(carrier.join)
            opened.callback(os.close, stopped)
            opened.enter_context(self._ruled([f"iif {name} lookup {_TABLE}"]))
            yield

    @contextlib.contextmanager
    def _ruled(self, rules: list[str]) -> Iterator[None]:
        with self.inside("router"):
            _ip(*(f"rule add {rule}" for rule in rules))
        try:
            yield
        finally:
            with self.inside("router"):
                _ip(*(f"rule del {rule}" for rule in rules))


def both_ways(name: str, others: Iterable[str]) -> list[Way]:
    """The ways between one host and others, both to and from it."""
    return [way for other in others for way in ((name, other), (other, name))]


def _carry(device: int, stop: int, delay: float, loss: float) -> None:
    """Read packets from a device and write them back when they are due, until the other end of ``stop`` is closed."""
    chance = random.Random(0)
    late: deque[tuple[float, bytes]] = deque()
    while True:
        until_due = max(0.0, late[0][0] - time.monotonic()) if late else None
        readable = select.select([device, stop], [], [], until_due)[0]
        if stop in readable:
            return
        if device in readable:
            packet = os.read(device, _MTU)
            if chance.random() >= loss:
                late.append((time.monotonic() + delay, packet))
        while late and late[0][0] <= time.monotonic():
            with contextlib.suppress(OSError):  # the router refuses the packet: it is lost
                os.write(device, late.popleft()[1])


@contextlib.contextmanager
def redis_and_hosts(*names: str) -> Iterator[Network]:
    """A network of these hosts and that of Redis, on which this thread is; a test that cannot have it is skipped."""
    with contextlib.ExitStack() as opened:
        try:
            network = opened.enter_context(Network("redis", *names))
        except OSError as e:
            pytest.skip(f"network namespaces need Linux, root, and `ip` of the Debian package iproute2: {e}")
        opened.enter_context(network.inside("redis"))
        yield network


class NetworkServer(RedisServer):
    """A server on this thread's host that listens on the address that other hosts reach."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self._address = address

    @property
    def endpoint(self) -> str:
        return f"{self._address}:{self._port}"

    def _render_config(self, private_dir: Path) -> str:
        return super()._render_config(private_dir) + f"bind {self._address}\n"
