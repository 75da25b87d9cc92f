"""Where Redis is: an endpoint or URL, checked once, that can print itself without its secrets and be opened."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias
from urllib.parse import parse_qsl, quote, unquote, urlsplit

import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.retry import Retry
from redis.sentinel import Sentinel

Client: TypeAlias = "redis.Redis | RedisCluster"

URL_VARIABLE: Final = "REDELASTIC_REDIS_URL"
DEFAULT_PORT: Final = 6379
SCHEMES: Final = (
    "redis",
    "rediss",
    "unix",
    "redis+sentinel",
    "rediss+sentinel",
    "redis+cluster",
    "rediss+cluster",
)
_FORMS: Final = (
    "host[:port], redis://[user:password@]host[:port][/db], rediss://…, unix://[user:password@]/path.sock[?db=N], "
    "redis+sentinel://[user:password@]host[:port],…/service[/db], redis+cluster://[user:password@]host[:port],…"
)


@dataclass(frozen=True)
class Endpoint:
    """A Redis server, Sentinel group or Cluster, and how to log in.

    Attributes:
        scheme: one of :data:`SCHEMES`.
        hosts: host and port of the server, or of each sentinel or Cluster node; empty for ``unix``.
        path: the unix socket.
        service: name of the master that the sentinels watch.
        db: database number.
        username, password: ACL user; never printed.
        sentinel_username, sentinel_password: ACL user on the sentinels; never printed.
        ca_cert, ssl_cert, ssl_cert_key: files for TLS; None takes the system's own CAs and no client certificate.
    """

    scheme: str
    hosts: tuple[tuple[str, int], ...] = ()
    path: str = ""
    service: str = ""
    db: int = 0
    username: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    sentinel_username: str | None = field(default=None, repr=False)
    sentinel_password: str | None = field(default=None, repr=False)
    ca_cert: str | None = None
    ssl_cert: str | None = None
    ssl_cert_key: str | None = None

    @property
    def tls(self) -> bool:
        """Whether connections are encrypted."""
        return self.scheme.startswith("rediss")

    def __str__(self) -> str:
        if self.scheme == "unix":
            return f"unix://{self.path}" + (f"?db={self.db}" if self.db else "")
        hosts = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.hosts)
        service = f"/{self.service}" if self.service else ""
        return f"{self.scheme}://{hosts}{service}" + (f"/{self.db}" if self.db else "")

    def open(self, attempt_timeout: float) -> Client:
        """Make a client. It connects when it is first used.

        Args:
            attempt_timeout: how long one attempt at connecting or at one command may take, in seconds.
        """
        options: dict[str, Any] = {
            "username": self.username,
            "password": self.password,
            "socket_timeout": attempt_timeout,
            "socket_connect_timeout": attempt_timeout,
            "socket_keepalive": True,
            "protocol": 2,
            "driver_info": None,  # saves two round trips on each connect
            "retry": Retry(NoBackoff(), 0),  # retries are `connection.Connection`'s, which knows what may be repeated
        }
        if self.tls:
            options |= {
                "ssl": True,
                "ssl_ca_certs": self.ca_cert,
                "ssl_certfile": self.ssl_cert,
                "ssl_keyfile": self.ssl_cert_key,
            }
        if self.scheme.endswith("+cluster"):
            nodes = [ClusterNode(host, port) for host, port in self.hosts]
            return RedisCluster(startup_nodes=nodes, max_connections=2**31, **options)
        options |= {"db": self.db, "max_connections": 2**31}  # every blocked thread holds a connection
        if self.scheme.endswith("+sentinel"):
            login = {"username": self.sentinel_username, "password": self.sentinel_password}
            sentinel = Sentinel(self.hosts, sentinel_kwargs={**options, **login, "db": 0}, **options)  # type: ignore[no-untyped-call]
            master: redis.Redis = sentinel.master_for(self.service)  # type: ignore[no-untyped-call]
            return master
        if self.scheme == "unix":
            options.pop("socket_keepalive")
            return redis.Redis(unix_socket_path=self.path, **options)
        [(host, port)] = self.hosts
        return redis.Redis(host=host, port=port, **options)


def parse_endpoint(
    text: str, *, ca_cert: str | None = None, ssl_cert: str | None = None, ssl_cert_key: str | None = None
) -> Endpoint:
    """Read an endpoint as torchrun gives it, or a URL.

    A plain ``host[:port]`` keeps the scheme, user, password and database of the environment's ``REDELASTIC_REDIS_URL``,
    so that no secret has to stand on a command line; an empty text is that URL, or else ``localhost:6379``.

    Args:
        text: one of ``host[:port]``, ``redis://``, ``rediss://``, ``unix://``, ``redis+sentinel://``, ``redis+cluster://``
            and the two TLS forms of the last ones.
        ca_cert, ssl_cert, ssl_cert_key: files for TLS, as in torch's etcd backend; they need a ``rediss`` scheme.

    Raises:
        ValueError: the text is none of these; the message never holds the password.
    """
    text = text.strip()
    default = os.environ.get(URL_VARIABLE, "").strip()
    if "://" in text:
        endpoint = _parse_url(text)
    elif not text:
        endpoint = _parse_url(default) if default else Endpoint("redis", (("localhost", DEFAULT_PORT),))
    else:
        base = _parse_url(default) if default else Endpoint("redis")
        if base.scheme not in ("redis", "rediss"):
            base = Endpoint("redis", username=base.username, password=base.password)
        endpoint = replace(base, hosts=(_parse_host(text, text),))
    if (ca_cert or ssl_cert or ssl_cert_key) and not endpoint.tls:
        raise ValueError(f"ca_cert, ssl_cert and ssl_cert_key need TLS, but the endpoint is {endpoint}; use rediss://.")
    for name, path in (("ca_cert", ca_cert), ("ssl_cert", ssl_cert), ("ssl_cert_key", ssl_cert_key)):
        if path and not os.access(path, os.R_OK):
            raise ValueError(f"{name}={path!r} is not a file that can be read; give the path of a PEM file.")
    return replace(endpoint, ca_cert=ca_cert, ssl_cert=ssl_cert, ssl_cert_key=ssl_cert_key)


def _parse_url(url: str) -> Endpoint:
    scheme, _, rest = url.partition("://")
    if scheme not in SCHEMES:
        raise ValueError(f"The endpoint's scheme {scheme[:40]!r} is unknown; use one of: {_FORMS}.")
    parts = urlsplit(f"//{rest}")
    login, _, netloc = parts.netloc.rpartition("@")
    username, _, password = login.partition(":")
    shown = f"{scheme}://{netloc}{parts.path}"
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    allowed = {"db", "sentinel_username", "sentinel_password"} if scheme.endswith("+sentinel") else {"db"}
    if unknown := sorted(query.keys() - allowed):
        raise ValueError(f"The endpoint {shown} has unknown options {unknown}; allowed are {sorted(allowed)}.")
    endpoint = Endpoint(scheme, username=unquote(username) or None, password=unquote(password) or None)
    if scheme == "unix":
        if netloc or not parts.path:
            raise ValueError(f"The endpoint {shown} names no socket; use unix:///path/to/redis.sock.")
        return replace(endpoint, path=unquote(parts.path), db=_parse_db(query.get("db"), shown))
    hosts = tuple(_parse_host(host, shown) for host in netloc.split(","))
    segments = [unquote(s) for s in parts.path.strip("/").split("/") if s]
    if len(hosts) > 1 and scheme in ("redis", "rediss"):
        raise ValueError(f"The endpoint {shown} has several hosts; use {scheme}+sentinel:// or {scheme}+cluster://.")
    if scheme.endswith("+sentinel"):
        if not segments:
            raise ValueError(f"The endpoint {shown} lacks the master's name; use {scheme}://host:26379/mymaster.")
        endpoint = replace(
            endpoint,
            service=segments.pop(0),
            sentinel_username=query.get("sentinel_username"),
            sentinel_password=query.get("sentinel_password"),
        )
    db = _parse_db(query.get("db", segments.pop(0) if segments else None), shown)
    if segments or (db and scheme.endswith("+cluster")):
        raise ValueError(f"The endpoint {shown} has a path that means nothing here; use one of: {_FORMS}.")
    return replace(endpoint, hosts=hosts, db=db)


def _parse_db(text: str | None, shown: str) -> int:
    if text is None:
        return 0
    if not text.isascii() or not text.isdecimal():
        raise ValueError(f"The database {text!r} of the endpoint {shown} is not a number from 0.")
    return int(text)


def _parse_host(text: str, shown: str) -> tuple[str, int]:
    match = re.fullmatch(r"(?:\[(?P<v6>[0-9A-Fa-f:.%]+)\]|(?P<name>[\w.-]+))(?::(?P<port>\d{1,5}))?", text.strip())
    if not match or not 0 < int(match["port"] or DEFAULT_PORT) < 2**16:
        raise ValueError(
            f"The endpoint {shown} has no valid host and port (1 to 65535, IPv6 in brackets); use one of: {_FORMS}."
        )
    return match["v6"] or match["name"], int(match["port"] or DEFAULT_PORT)


def with_password(url: str, username: str, password: str) -> str:
    """Put a login into a URL that has none."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{quote(username, safe='')}:{quote(password, safe='')}@{rest}"
