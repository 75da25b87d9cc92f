"""Where rank 0's store listens: it has no password, so only at the announced address if that is known."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import psutil
import pytest
import torch.distributed as dist

from redelastic.rendezvous.bootstrap import BootstrapPort
from tests.support.servers import wait_until


def has(host: str) -> bool:
    try:
        with socket.create_server((host, 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


def listening(port: int) -> Iterator[str]:
    for connection in psutil.Process().net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
            yield connection.laddr.ip


@pytest.mark.fault("the workers' store of a --standalone job", "it listens on loopback only")
@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost", "192.0.2.1", ""])
def test_where_the_store_listens(host: str) -> None:
    if ":" in host and not has(host):
        pytest.skip("no IPv6 here")
    port = BootstrapPort(host)
    port.serve(20)
    peer = host if host.startswith(("127", ":")) else "127.0.0.1"
    store = dist.TCPStore(peer, port.port, is_master=False)
    store.set("a", "b")
    assert store.get("a") == b"b"
    wait_until(lambda: len({*listening(port.port)}) == 1, "one address listens")
    everywhere = {"0.0.0.0", "::"}  # noqa: S104
    assert {*listening(port.port)} <= ({host} if peer == host else everywhere)
    port.close()
