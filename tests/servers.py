"""Servers beyond a single Redis: replicas, Sentinel, a Cluster, TLS, and peers that misbehave; each for one block."""

from __future__ import annotations

import contextlib
import datetime as dt
import ipaddress
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from redelastic import server as server_module
from redelastic.server import RedisServer, find_binary

HOST = "127.0.0.1"
MASTER_NAME = "mymaster"
Signer = tuple[x509.Name, ec.EllipticCurvePrivateKey]


def wait_until(holds: Callable[[], object], what: str, timeout: float = 20.0) -> None:
    """Polls what an outside server has to reach by itself; an error of redis-py counts as "not yet"."""
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
    """A port that a server of the test may listen on, and that nobody else is given meanwhile."""
    reservation, port = server_module._reserve_port(0)
    try:
        yield port
    finally:
        reservation.close()


def redis_server(password: str | None = None, config: Mapping[str, str] | None = None) -> RedisServer:
    """A server, not yet started, whose password is known before it starts."""
    server = RedisServer(config=config)
    if password is not None:
        server._password = password
    return server


def port_of(server: RedisServer) -> int:
    return int(server.endpoint.rpartition(":")[2])


@contextlib.contextmanager
def frozen(server: RedisServer) -> Iterator[None]:
    """Stops a server's process, which keeps its connections and answers nothing."""
    pid = server.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def replica_of(master: RedisServer) -> Iterator[RedisServer]:
    config = {"replicaof": f"{HOST} {port_of(master)}", "masterauth": master._password}
    with master.get_client() as client:
        client.config_set("repl-diskless-sync-delay", 0)
    with redis_server(master._password, config) as replica, replica.get_client() as client:
        wait_until(lambda: client.info("replication")["master_link_status"] == "up", "the replica is in step")
        yield replica


# -- A master that dies, and replicas that take over


@dataclass
class Shard:
    """A master and its replicas, and the URL under which clients find whoever of them is master."""

    url: str
    servers: list[RedisServer]

    def role(self, server: RedisServer) -> list[Any]:
        with server.get_client(socket_timeout=1.0) as client:
            told: list[Any] = client.role()
            return told

    def master(self) -> RedisServer | None:
        """Who takes writes now; None while nobody does."""
        return next((s for s in self.servers if s.pid is not None and self.role(s)[0] == b"master"), None)

    def get_client(self, **options: Any) -> redis.Redis:
        """A client of who is master now, and of nobody else later."""
        master = self.master()
        assert master is not None
        return master.get_client(**options)

    def kill_master(self) -> RedisServer:
        """SIGKILL. Returns the dead server; a replica takes over in a second or two."""
        old = self.master()
        assert old is not None
        old.kill()
        return old

    def replicas(self) -> list[RedisServer]:
        return [s for s in self.servers if s.pid is not None and self.role(s)[0] == b"slave"]

    def in_step(self) -> bool:
        """Whether all are there, one is master, and the others follow it."""
        roles = [self.role(s) for s in self.servers if s.pid is not None]
        masters = [role for role in roles if role[0] == b"master"]
        states = [role[3] for role in roles if role[0] == b"slave"]
        return len(masters) == 1 and len(masters[0][2]) == len(self.servers) - 1 == states.count(b"connected")

    def replicate(self, run_id: str) -> None:
        """Wait until the replicas have all that was written before."""
        with self.get_client(socket_timeout=30) as client:
            wait_until(lambda: client.set(f"{{{run_id}}}:mark", 1), "the master takes writes")
            assert client.wait(len(self.servers) - 1, 20_000) == len(self.servers) - 1

    @contextlib.contextmanager
    def cut(self) -> Iterator[None]:
        """The replicas see none of what the master acknowledges meanwhile: it does not let them log in any more."""
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
            set_login(self.servers[0]._password)

    def heal(self) -> None:
        """Who was killed comes back as a replica of who is master now."""
        wait_until(self.master, "somebody is master", 30)
        master = self.master()
        for server in self.servers:
            if server.pid is None and master:
                if "cluster-enabled" not in server._config:
                    server._config["replicaof"] = f"{HOST} {port_of(master)}"
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
        """Kills the master, and returns once the sentinels name another one, which is master."""
        old = self.master()
        old.kill()

        def promoted() -> bool:
            new = self.master()
            with new.get_client() as client:
                return new is not old and client.role()[0] == b"master"

        wait_until(promoted, "a replica is promoted", 30)


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
                f"sentinel down-after-milliseconds {MASTER_NAME} 500\n"
                f"sentinel failover-timeout {MASTER_NAME} 3000\n"
            )
            command = [find_binary(), str(config_file), "--sentinel"]
            process = server_module._OwnedProcess(command, "", folder / "log")
            stack.callback(process.terminate)
        for port in ports:
            sentinel = stack.enter_context(redis.Redis(HOST, port, password=sentinel_password))

            def knows_everybody(sentinel: redis.Redis = sentinel) -> bool:
                state: Any = sentinel.sentinel_master(MASTER_NAME)
                return bool(state["num-slaves"] == 2 and state["num-other-sentinels"] == 2 and state["is_master"])

            wait_until(knows_everybody, "a sentinel knows both replicas and both other sentinels", 30)
        yield SentinelGroup(servers, ports, password, sentinel_password)


# -- Cluster


@dataclass
class Cluster:
    """Three masters that share the slots, and a replica of each if so asked for."""

    servers: list[RedisServer]  # the masters first, then their replicas in the same order
    password: str

    @property
    def url(self) -> str:
        return f"redis+cluster://:{self.password}@" + ",".join(server.endpoint for server in self.servers)

    def owner(self, key: str) -> RedisServer:
        """The server that holds a key, as long as no replica took over."""
        return self.shard(key).servers[0]

    def shard(self, key: str) -> Shard:
        """The servers that may hold a key."""
        with self.servers[0].get_client() as client:
            slot: int = client.execute_command("CLUSTER KEYSLOT", key)
        return Shard(self.url, self.servers[min(slot // _SLOTS_EACH, 2) :: 3])


_SLOTS = 16384
_SLOTS_EACH = _SLOTS // 3


@contextlib.contextmanager
def redis_cluster(*, replicas: bool = False) -> Iterator[Cluster]:
    """With replicas, one takes over from a dead master after about two seconds, however old its data are."""
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
                """Every server knows that every master has a replica, and those are in step."""
                told = [len(slots) == 4 for c in clients for slots in c.execute_command("CLUSTER SLOTS")]
                return all(told) and all(Shard("", servers[i::3]).in_step() for i in range(3))

            wait_until(complete, "every master has its replica", 30)
        yield Cluster(servers, password)


# -- TLS


@dataclass
class Certificates:
    """PEM files: a CA, a server's certificate for 127.0.0.1, a client's, and a CA that signed neither."""

    ca: str
    server: str
    server_key: str
    client: str
    client_key: str
    other_ca: str


def _key_usage(*, ca: bool) -> x509.KeyUsage:
    uses = dict.fromkeys(
        (
            "content_commitment",
            "key_encipherment",
            "data_encipherment",
            "key_agreement",
            "encipher_only",
            "decipher_only",
        ),
        False,
    )
    return x509.KeyUsage(digital_signature=True, key_cert_sign=ca, crl_sign=ca, **uses)


def make_certificates(folder: Path) -> Certificates:
    now = dt.datetime.now(dt.timezone.utc)

    def make(name: str, signer: Signer | None) -> tuple[str, str, Signer]:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        issuer, issuer_key = signer or (subject, key)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(days=1))
            .not_valid_after(now + dt.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=signer is None, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(HOST))]), critical=False)
            # From Python 3.13 on a certificate without these three is refused
            .add_extension(_key_usage(ca=signer is None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
            .sign(issuer_key, hashes.SHA256())
        )
        paths = folder / f"{name}.crt", folder / f"{name}.key"
        paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        paths[1].write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return str(paths[0]), str(paths[1]), (subject, key)

    ca, _, signer = make("ca", None)
    server, server_key, _ = make("server", signer)
    client, client_key, _ = make("client", signer)
    other_ca, _, _ = make("other-ca", None)
    return Certificates(ca, server, server_key, client, client_key, other_ca)


def encrypt_key(source: str, target: str) -> None:
    """Writes a private key again, behind a password."""
    key = serialization.load_pem_private_key(Path(source).read_bytes(), None)
    encryption = serialization.BestAvailableEncryption(b"key-password")
    Path(target).write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
    )


# -- Peers that are no Redis, or whose connection to Redis breaks


@dataclass
class Peer:
    """A TCP server whose behaviour is a function of each connection."""

    port: int
    accepted: int = 0
    sockets: list[socket.socket] = field(default_factory=list)


@contextlib.contextmanager
def peer(serve: Callable[[socket.socket], None]) -> Iterator[Peer]:
    """Listens on a free port and runs `serve` in a thread for each connection; closes them all at the end."""
    listener = socket.create_server((HOST, 0))
    made = Peer(listener.getsockname()[1])
    threads: list[threading.Thread] = []

    def run(connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            serve(connection)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                made.accepted += 1
                made.sockets.append(connection)
                threads.append(threading.Thread(target=run, args=(connection,), daemon=True))
                threads[-1].start()

    acceptor = threading.Thread(target=accept, daemon=True)
    acceptor.start()
    try:
        yield made
    finally:
        for opened in (listener, *made.sockets):
            with contextlib.suppress(OSError):
                opened.shutdown(socket.SHUT_RDWR)
        listener.close()
        acceptor.join(5)
        for thread in threads:
            thread.join(5)


def say_nothing(connection: socket.socket) -> None:
    while connection.recv(4096):
        pass


def speak_http(connection: socket.socket) -> None:
    connection.recv(4096)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")


@dataclass
class ReplyLoss:
    """How often a reply has still to be lost, and what was sent to the server."""

    losses: int = 0
    sent: list[bytes] = field(default_factory=list)

    def sends_of(self, command: bytes) -> int:
        return sum(request.count(b"\r\n" + command + b"\r\n") for request in self.sent)


@contextlib.contextmanager
def lossy_proxy(server: RedisServer, command: bytes = b"EVALSHA") -> Iterator[tuple[str, ReplyLoss]]:
    """A proxy that cuts the connection after the server has answered `command`, as often as its `losses` says.

    Yields the URL to reach the server through it, and the control.
    """
    control = ReplyLoss()

    def serve(connection: socket.socket) -> None:
        with socket.create_connection((HOST, port_of(server))) as upstream:
            while request := connection.recv(1 << 20):
                control.sent.append(request)
                upstream.sendall(request)
                reply = upstream.recv(1 << 20)
                if control.losses > 0 and b"\r\n" + command + b"\r\n" in request:
                    control.losses -= 1
                    return
                connection.sendall(reply)

    with peer(serve) as proxy:
        yield f"redis://:{server._password}@{HOST}:{proxy.port}", control
