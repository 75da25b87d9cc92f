"""Three hosts (see namespaces.py): a and b, which have a second network without Redis, and the one of Redis."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

import pytest

from redelastic.redis.server import RedisServer
from redelastic.rendezvous import addresses
from redelastic.rendezvous.addresses import INTERFACE_VARIABLES
from tests.support.namespaces import Network, NetworkServer, _ip, redis_and_hosts

NAMES: Final = ("a", "b")
LAN: Final = "lan0"  # a second interface of both hosts, not of Redis
ON_LAN: Final = {"a": "198.51.100.1", "b": "198.51.100.2"}
ON_LAN_6: Final = {"a": "2001:db8:7::1", "b": "2001:db8:7::2"}
ON_LINK: Final = f"fe80::7%{LAN}"  # of a alone
BARE: Final = "bare0"  # an interface of a without an address


@pytest.fixture
def network() -> Iterator[Network]:
    with redis_and_hosts(*NAMES) as made:
        there = f"/proc/{os.getpid()}/fd/{made._namespaces['b']}"
        with made.inside("a"):
            _ip(
                f"link add name {LAN} type veth peer name {LAN} netns {there}",
                f"link add {BARE} type veth peer name {BARE}p",
            )
        for name in NAMES:
            with made.inside(name):
                v4, v6 = (f"addr add {ON_LAN[name]}/24 dev {LAN}", f"addr add {ON_LAN_6[name]}/64 dev {LAN} nodad")
                _ip(v4, v6, f"link set {LAN} up")
        with made.inside("a"):
            _ip(f"addr add fe80::7/64 dev {LAN} nodad")
        yield made


@pytest.fixture
def redis(network: Network) -> Iterator[RedisServer]:
    with NetworkServer(network.addresses["redis"]) as server:
        yield server


@pytest.fixture(autouse=True)
def own_interface_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "_exported", {})
    for variable in INTERFACE_VARIABLES:  # removed after the test, if handlers of this process set them
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
