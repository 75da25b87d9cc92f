"""Last words: one script call as bytes, for a process that sends them when this one is dead and has no redis-py.

``redelastic/agent/workers/deliver.py`` sends them. They contain the password, so they must only go through a pipe.
"""

from __future__ import annotations

import base64
import json
import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from redis.cluster import RedisCluster
from redis.connection import Connection, SSLConnection, UnixDomainSocketConnection
from redis.sentinel import SentinelConnectionPool, SentinelManagedConnection, SentinelManagedSSLConnection

from .client import pack
from .endpoint import DEFAULT_PORT, Client
from .errors import ERRORS
from .scripts import Argument, Script

PLAIN: Final = (Connection, UnixDomainSocketConnection, SentinelManagedConnection)
ENCRYPTED: Final = (SSLConnection, SentinelManagedSSLConnection)
TLS_OPTIONS: Final = frozenset(
    f"ssl_{name}" for name in ("ca_certs", "certfile", "keyfile", "password", "cert_reqs", "check_hostname")
)


def last_words(client: Client, script: Script, keys: Sequence[str], args: Sequence[Argument]) -> bytes:
    """Write down how to run a script at the server that ``client`` talks to now.

    Returns:
        One line of JSON; empty if no server is known now, or if the client connects in a custom way (a subclass of
        redis-py's connections, a credential provider, TLS options other than those of :class:`Endpoint`).
    """
    try:
        if isinstance(client, RedisCluster):
            client = client.get_redis_connection(client.get_node_from_key(keys[0]))
    except ERRORS:  # its slot has no node now
        return b""
    pool = client.connection_pool
    options = pool.connection_kwargs
    address = _address(pool, options)
    unknown = options.keys() - TLS_OPTIONS
    if (
        address is None
        or pool.connection_class not in PLAIN + ENCRYPTED
        or any(options[name] for name in unknown if name.startswith("ssl_") or name == "credential_provider")
    ):
        return b""
    username, password = options.get("username"), options.get("password")
    requests: list[tuple[Any, ...]] = []
    if username or password:
        requests.append(("AUTH", *([username] if username else []), password or ""))
    if options.get("db"):
        requests.append(("SELECT", options["db"]))
    requests.append(("EVAL", script.text, len(keys), *keys, *args))
    told = {
        "address": address,
        "tls": _tls(options) if pool.connection_class in ENCRYPTED else None,
        "requests": base64.b64encode(b"".join(map(pack, requests))).decode(),
        "replies": len(requests),
    }
    return json.dumps(told).encode()


def _address(pool: Any, options: Mapping[str, Any]) -> Any:
    """A socket's path, or host and port; None while no master is known."""
    if isinstance(pool, SentinelConnectionPool):
        return pool.master_address
    return _path(options.get("path")) or (options.get("host", "localhost"), options.get("port", DEFAULT_PORT))


def _path(given: str | None) -> str | None:
    """A path that is valid in any working directory; a link stays a link, since its target may change."""
    return str(Path(given).absolute()) if given else None


def _tls(options: Mapping[str, Any]) -> dict[str, Any]:
    """TLS options, read as redis-py's ``SSLConnection`` does."""
    required = options.get("ssl_cert_reqs", "required")
    mode = ssl.VerifyMode[f"CERT_{required.upper()}"] if isinstance(required, str) else required or ssl.CERT_NONE
    return {
        "verify_mode": mode.name,
        "check_hostname": mode != ssl.CERT_NONE and bool(options.get("ssl_check_hostname", True)),
        "ca": _path(options.get("ssl_ca_certs")),
        "certificate": _path(options.get("ssl_certfile")),
        "key": _path(options.get("ssl_keyfile")),
        "key_password": options.get("ssl_password"),
    }
