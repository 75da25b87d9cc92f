"""A Redis that speaks TLS: by itself, if it was built with TLS, or behind a TLS terminator."""

from __future__ import annotations

import contextlib
import select
import socket
import socketserver
import ssl
import threading
from collections.abc import Iterator
from typing import Final

import pytest

from redelastic.redis.server import RedisServer
from tests.support import servers
from tests.support.tls_files import Certificates

WHO_SPEAKS_TLS: Final = ("redis", "terminator")


@contextlib.contextmanager
def tls_server(
    speaker: str, password: str | None, certificates: Certificates, *, ask_clients: bool, certificate: str = ""
) -> Iterator[tuple[RedisServer, str]]:
    """A server and its ``rediss://`` URL; the test is skipped if Redis is to speak TLS and was built without it.

    Args:
        who: one of :data:`WHO_SPEAKS_TLS`.
        password: the server's; with None it makes one, which the URL does not have.
        certificates: the server's certificate and key, and the CA of clients' certificates.
        ask_clients: whether clients need a certificate.
        certificate: another certificate for the server.
    """
    settings = {
        "tls-cert-file": certificate or certificates.server,
        "tls-key-file": certificates.server_key,
        "tls-ca-cert-file": certificates.ca,
        "tls-auth-clients": "yes" if ask_clients else "no",
    }
    with servers.reserved_port() as port, contextlib.ExitStack() as stack:
        own = settings | {"tls-port": str(port)} if speaker == "redis" else None
        try:
            server = stack.enter_context(servers.redis_server(password, own))
        except RuntimeError as e:
            if "tls" not in str(e):
                raise
            pytest.skip("needs a redis-server that was built with TLS: apt-get install redis-server")
        if speaker == "terminator":
            stack.enter_context(_terminator(port, servers.port_of(server), settings))
        login = f":{password}@" if password else ""
        yield server, f"rediss://{login}{servers.HOST}:{port}"


@contextlib.contextmanager
def _terminator(port: int, target: int, settings: dict[str, str]) -> Iterator[None]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(settings["tls-cert-file"], settings["tls-key-file"])
    context.load_verify_locations(settings["tls-ca-cert-file"])
    context.verify_mode = ssl.CERT_REQUIRED if settings["tls-auth-clients"] == "yes" else ssl.CERT_NONE

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(OSError), context.wrap_socket(self.request, server_side=True) as client:
                _relay(client, target)

    with _Terminator((servers.HOST, port), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield
        listening.shutdown()


class _Terminator(socketserver.ThreadingTCPServer):
    allow_reuse_address = True  # the port is reserved
    daemon_threads = True


def _relay(client: ssl.SSLSocket, target: int) -> None:
    """Relay between client and server until one of them closes its connection."""
    with socket.create_connection((servers.HOST, target)) as server:
        while True:
            ready = [client] if client.pending() else select.select([client, server], [], [])[0]
            for source in ready:
                if not (data := source.recv(65536)):
                    return
                (server if source is client else client).sendall(data)
