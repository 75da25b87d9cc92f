"""Interfaces and names: hosts with several interfaces, IPv6 alone, a hostname that is wrong, a loopback, or unknown.

Each host is a network namespace (see namespaces.py) with its own names: a thread with its own /etc/hosts,
/etc/resolv.conf and hostname, which the processes that it starts inherit.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar

import psutil
import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters

from redelastic.doctor.host import examine_host
from redelastic.redis.connection import Connection
from redelastic.redis.endpoint import parse_endpoint
from redelastic.redis.server import RedisServer
from redelastic.rendezvous import addresses
from redelastic.rendezvous.addresses import INTERFACE_VARIABLES, LocalAddress, find_address
from redelastic.rendezvous.handler import RedisRendezvousHandler, handler_from_parameters
from tests.support import two_hosts
from tests.support.fault_matrix import Measured
from tests.support.namespaces import LINK, Network, NetworkServer, _ip, _libc, both_ways
from tests.support.torchrun_job import LIMIT, Job
from tests.support.two_hosts import BARE, LAN, NAMES, ON_LAN, ON_LAN_6, ON_LINK

pytestmark = pytest.mark.timeout(300)

T = TypeVar("T")

LOCALHOST: Final = "127.0.0.1 localhost\n"
_CLONE_NEWNS, _CLONE_NEWUTS = 0x20000, 0x4000000
GLOO: Final = INTERFACE_VARIABLES[0]


network, redis, _environment = two_hosts.network, two_hosts.redis, two_hosts.own_interface_variables


def on(network: Network, name: str, hosts: str, act: Callable[[], T], resolver: str = "") -> T:
    """Act on a host whose name is HOST-host, which its /etc/hosts may know; no name server, unless resolver has one."""

    def there() -> T:
        with network.inside(name):
            _libc("unshare", _CLONE_NEWNS | _CLONE_NEWUTS)
            subprocess.run(["mount", "--make-rprivate", "/"], check=True)
            for file, text in (("/etc/hosts", LOCALHOST + hosts), ("/etc/resolv.conf", resolver)):
                with tempfile.NamedTemporaryFile("w") as own:  # the mount keeps the file's content
                    own.write(text)
                    own.flush()
                    subprocess.run(["mount", "--bind", own.name, file], check=True)
            hostname = f"{name}-host".encode()
            assert ctypes.CDLL(None).sethostname(hostname, len(hostname)) == 0
            return act()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(there).result(LIMIT)


def found_on(network: Network, hosts: str, local_addr: str | None = None, url: str = "") -> LocalAddress:
    def find() -> LocalAddress:
        connection = Connection.open(url) if url else None
        try:
            return find_address(local_addr, connection.local_address() if connection else None)
        finally:
            if connection:
                connection.close()

    return on(network, "a", hosts, find)


# -- which address


def hosts_file(network: Network, *, meant: str) -> str:
    """What /etc/hosts of host a has beside localhost; the last two names are not its own."""
    lines = {"nothing": "", "a loopback, as on Debian": "127.0.1.1 a-host\n"}
    for of, address in {**network.addresses, "its second interface": ON_LAN["a"]}.items():
        lines[of] = f"{address} a-host\n"
    return lines[meant] + f"{ON_LAN['a']} a-on-lan\n{ON_LAN['b']} b-host\n"


HOSTNAMES: Final = [  # what it resolves to, and whether gloo needs an interface
    pytest.param("a loopback, as on Debian", True, id="a loopback"),
    pytest.param("nothing", True, id="nothing"),
    pytest.param("b", True, id="another host"),
    pytest.param("a", False, id="its address"),
    pytest.param("its second interface", False, id="its second interface"),
]


@pytest.mark.fault(
    "the hostname resolves to a loopback, to nothing, or to another host",
    "peers get the address on the route to Redis, not a name; gloo, which resolves the name, gets that interface",
)
@pytest.mark.parametrize(("meant", "wrong"), HOSTNAMES)
def test_the_way_to_redis(network: Network, redis: RedisServer, meant: str, *, wrong: bool) -> None:
    found = found_on(network, hosts_file(network, meant=meant), url=redis.url)
    assert found == LocalAddress(network.addresses["a"], "its way to Redis", LINK if wrong else "")


@pytest.mark.fault(
    "the name server does not answer", "a node starts all the same; gloo gets its interface, and resolves no name"
)
def test_a_mute_name_server(network: Network, measured: Measured) -> None:
    mute = f"nameserver {network.addresses['b']}\noptions timeout:30 attempts:2\n"
    with network.cut(both_ways("a", ["b"])):
        at = time.monotonic()
        found = on(network, "a", "", lambda: find_address(None, network.addresses["a"]), mute)
        seconds = time.monotonic() - at
    measured("address found", seconds)
    assert seconds < 30, "a lookup lasts for a minute"
    assert found == LocalAddress(network.addresses["a"], "its way to Redis", LINK)


@pytest.mark.fault(
    "Redis is behind a proxy on a loopback or a socket file, and the hostname resolves to a loopback",
    "peers get the address of the default route, not a loopback",
)
def test_a_hostname_that_resolves_to_a_loopback_is_ignored(network: Network) -> None:
    debian = hosts_file(network, meant="a loopback, as on Debian")
    assert found_on(network, debian) == LocalAddress(network.addresses["a"], "its default route", LINK)
    second = hosts_file(network, meant="its second interface")
    assert found_on(network, second) == LocalAddress(ON_LAN["a"], "what its hostname means")
    network.pull_out("a")
    assert found_on(network, debian) == LocalAddress(addresses.LOOPBACK, "it has no other")


@pytest.mark.fault(
    "a host has only link-local addresses, and Redis is on another one",
    "a run of several nodes is refused there; the error says what to do",
)
def test_link_local_addresses_alone(network: Network, run_id: str) -> None:
    """The other host's interfaces have other names: a link-local address is useless there."""
    with network.inside("a"):
        _ip(f"addr flush dev {LINK}", f"addr flush dev {LAN}", f"addr add fe80::7/64 dev {LAN} nodad")
    with network.inside("b"):
        _ip(f"addr add fe80::8/64 dev {LAN} nodad")
        server = ServerOf6(f"fe80::8%{LAN}")
        server.start()

    def join(nodes: int) -> str:
        params = RendezvousParameters("redis", server.url, f"{run_id}-{nodes}", 1, nodes)
        handler = handler_from_parameters(params)
        assert isinstance(handler, RedisRendezvousHandler)
        handler.shutdown()
        return handler.address.host

    try:
        with pytest.raises(ValueError, match=r"no address at which the other nodes of run .* Give its interface"):
            on(network, "a", "", lambda: join(2))
        assert on(network, "a", "", lambda: join(1)) == "127.0.0.1", "a node alone needs no other"
    finally:
        server.stop()


@pytest.mark.fault(
    "the name of Redis resolves first to an IPv6 address, on which it does not listen",
    "peers get the local address of the connection that succeeded",
)
def test_a_name_of_two_addresses(network: Network, redis: RedisServer) -> None:
    names = f"{ON_LAN_6['b']} redis-host\n{network.addresses['redis']} redis-host\n"
    url = redis.url.replace(network.addresses["redis"], "redis-host")
    assert found_on(network, names, url=url).host == network.addresses["a"]


GIVEN: Final = [
    pytest.param(LAN, LocalAddress(ON_LAN["a"], f"of the given interface {LAN}", LAN), id="interface"),
    pytest.param(ON_LAN["a"], LocalAddress(ON_LAN["a"], "given", LAN), id="IPv4"),
    pytest.param(ON_LAN_6["a"], LocalAddress(ON_LAN_6["a"], "given", LAN), id="IPv6"),
    pytest.param(ON_LINK, LocalAddress(ON_LINK, "given", LAN), id="IPv6 of the link"),
    pytest.param("a-on-lan", LocalAddress("a-on-lan", "given", LAN), id="name"),
    pytest.param("a-host", LocalAddress("a-host", "given", LINK), id="name of a loopback"),
    pytest.param("127.0.0.1", LocalAddress("127.0.0.1", "given", "lo"), id="loopback"),
]


@pytest.mark.parametrize(("local_addr", "expected"), GIVEN)
def test_a_local_address_that_is_given(network: Network, local_addr: str, expected: LocalAddress) -> None:
    assert found_on(network, hosts_file(network, meant="a loopback, as on Debian"), local_addr) == expected


WRONG: Final = [
    pytest.param(ON_LAN["b"], "no interface has it", id="another host"),
    pytest.param("b-host", f"it resolves to {ON_LAN['b']}", id="name of another host"),
    pytest.param("eth7", "neither an address, an interface, nor a name that resolves", id="no interface"),
    pytest.param("fe80::1", "no interface has it", id="another link"),
    pytest.param("0.0.0.0", "it means every address", id="every address"),  # noqa: S104
    pytest.param("::", "it means every address", id="every IPv6 address"),
    pytest.param(BARE, "the interface has no address", id="bare interface"),
]


@pytest.mark.fault(
    "`--local-addr` is another host's, an interface that is not there, or every address",
    "refused at once; the error names the value, the reason and this host's addresses",
)
@pytest.mark.parametrize(("local_addr", "why"), WRONG)
def test_a_local_address_that_is_not_this_hosts_is_refused(network: Network, local_addr: str, why: str) -> None:
    with pytest.raises(ValueError, match=f"^local_addr='{re.escape(local_addr)}' is not this host's: {why}") as error:
        found_on(network, hosts_file(network, meant="a"), local_addr)
    for name, address in ((LINK, network.addresses["a"]), (LAN, ON_LAN["a"]), (LAN, ON_LAN_6["a"]), ("lo", "::1")):
        assert f"{address} ({name})" in str(error.value)


def test_variables_that_the_user_set_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GLOO, "custom")
    LocalAddress("192.0.2.1", "a test", "eth0").export_interface()
    assert [os.environ.get(variable) for variable in INTERFACE_VARIABLES] == ["custom", "eth0"]
    LocalAddress("192.0.2.9", "a test", "eth1").export_interface()
    assert [os.environ.get(variable) for variable in INTERFACE_VARIABLES] == ["custom", "eth1"]
    LocalAddress("192.0.2.9", "a test").export_interface()
    assert [os.environ.get(variable) for variable in INTERFACE_VARIABLES] == ["custom", "eth1"]


def test_what_the_doctor_finds(network: Network, redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def look() -> dict[str, tuple[str, str]]:
        connection = Connection.open(redis.url)
        try:
            found = examine_host(parse_endpoint(redis.url), connection)
            return {f.name: (f.level, f.found) for f in found if f.name in ("address", "gloo")}
        finally:
            connection.close()

    debian, second = (
        hosts_file(network, meant=meant) for meant in ("a loopback, as on Debian", "its second interface")
    )
    address = network.addresses["a"]
    found = on(network, "a", debian, look)
    assert found["address"] == ("ok", f"peers get {address} (its way to Redis)")
    assert found["gloo"] == ("ok", f"this host's name resolves to 127.0.1.1, so workers get {GLOO}={LINK}")
    level, said = on(network, "a", second, look)["gloo"]
    assert (level, LAN in said, address in said) == ("note", True, True)
    monkeypatch.setenv(GLOO, "^docker0")
    assert on(network, "a", debian, look)["gloo"] == ("problem", f"{GLOO}=^docker0: there is no ^docker0")
    monkeypatch.setenv(GLOO, LAN)
    assert on(network, "a", debian, look)["gloo"] == ("ok", f"listens on {LAN}, as {GLOO} says")


# -- jobs


def environments(job: Job) -> list[Mapping[str, str]]:
    """The environments of the workers."""
    return [psutil.Process(pid).environ() for pid in {line.pid for line in job.lines("start")}]


@pytest.mark.fault(
    "torchrun on hosts whose names resolve to a loopback, as on Debian, without a name service", "the job trains"
)
def test_hosts_as_debian_makes_them(network: Network, redis: RedisServer, tmp_path: Path) -> None:
    with Job(redis, tmp_path, "2:2") as job:
        for name in NAMES:
            on(network, name, f"127.0.1.1 {name}-host\n", lambda name=name: job.start(name))  # type: ignore[misc]
        job.wait_round(NAMES)
        assert {variables["MASTER_ADDR"] for variables in environments(job)} <= set(network.addresses.values())
        assert {variables[GLOO] for variables in environments(job)} == {LINK}
        job.finish(*NAMES)


class ServerOf6(NetworkServer):
    @property
    def endpoint(self) -> str:
        return f"[{self._address}]:{self._port}"


@pytest.mark.long
@pytest.mark.fault("`redelastic run` on hosts with IPv6 only, whose names do not resolve", "the job trains")
def test_hosts_with_ipv6_alone(network: Network, tmp_path: Path) -> None:
    with network.inside("router"):
        Path("/proc/sys/net/ipv6/conf/all/forwarding").write_text("1")
    for i, (name, v4) in enumerate(network.addresses.items()):
        with network.inside("router"):
            _ip(f"addr add 2001:db8:{i}::1/64 dev {name} nodad")
        with network.inside(name):
            _ip(f"addr del {v4}/30 dev {LINK}", f"addr add 2001:db8:{i}::2/64 dev {LINK} nodad")
            _ip(f"route add default via 2001:db8:{i}::1 dev {LINK}")
    with ServerOf6("2001:db8:0::2") as redis, Job(redis, tmp_path, "2:2", agent=True) as job:
        for name in NAMES:
            on(network, name, "", lambda name=name: job.start(name))  # type: ignore[misc]
        job.wait_round(NAMES)
        assert {variables["MASTER_ADDR"] for variables in environments(job)} <= {"2001:db8:1::2", "2001:db8:2::2"}
        assert {variables[GLOO] for variables in environments(job)} == {LINK}
        job.finish(*NAMES)


@pytest.mark.long
@pytest.mark.fault("`--local-addr=INTERFACE`, the only route between nodes", "the job trains by that interface")
@pytest.mark.parametrize("agent", [False, True], ids=["torchrun", "redelastic run"])
def test_a_second_interface(network: Network, redis: RedisServer, tmp_path: Path, *, agent: bool) -> None:
    with network.cut(both_ways("a", ["b"])), Job(redis, tmp_path, "2:2", agent=agent) as job:
        for name in NAMES:
            names = f"{network.addresses[name]} {name}-host\n"
            on(network, name, names, lambda name=name: job.start(name, options=[f"--local-addr={LAN}"]))  # type: ignore[misc]
        job.wait_round(NAMES)
        assert {variables["MASTER_ADDR"] for variables in environments(job)} <= set(ON_LAN.values())
        job.finish(*NAMES)


def test_a_wrong_local_address_ends_a_node(network: Network, redis: RedisServer, tmp_path: Path) -> None:
    with Job(redis, tmp_path, "1:1", agent=True) as job:
        on(network, "a", "", lambda: job.start("a", options=["--local-addr=eth7"], may_end=True))
        assert job.wait_end("a") == 2
        said = job.nodes["a"].stderr
        assert "redelastic run: local_addr='eth7' is not this host's" in said
        assert "Traceback" not in said
