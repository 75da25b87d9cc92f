"""Endpoints of Redis: parsed from a text or URL, checked once, printed without secrets."""

from __future__ import annotations

import ipaddress
import math
import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl, unquote

import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.retry import Retry

from .sentinels import Sentinels
from .sockets import (
    MasterConnection,
    MasterPool,
    MasterTlsConnection,
    Pool,
    TcpConnection,
    TlsConnection,
    keepalive,
    make_client,
)
from .wire import Client

URL_VARIABLE: Final = "REDELASTIC_REDIS_URL"
DEFAULT_PORT: Final = 6379
SCHEMES: Final = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster")
_FORMS: Final = (
    "host[:port], redis://[user:password@]host[:port][/db], rediss://…, unix://[user:password@]/path.sock[?db=N], "
    "redis+sentinel://[user:password@]host[:port],…/service[/db], redis+cluster://[user:password@]host[:port],…"
)


_HOSTS: Final = re.compile(
    r"(?:[^:\[]|\[[0-9A-Fa-f:.%]*\]|:(?:[0-9]{1,4}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])(?![^,/]))*"
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
        ca_cert, ssl_cert, ssl_cert_key: files for TLS; None means the system's own CAs and no client certificate.
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
    is_default: bool = field(default=False, compare=False)  # neither an argument nor the environment named one

    @property
    def tls(self) -> bool:
        """Whether connections are encrypted."""
        return self.scheme.startswith("rediss")

    def __str__(self) -> str:
        if self.scheme == "unix":
            return f"unix://{self.path}" + (f"?db={self.db}" if self.db else "")
        service = f"/{self.service}" if self.service else ""
        return f"{self.scheme}://{self._shown_hosts()}{service}" + (f"/{self.db}" if self.db else "")

    def _shown_hosts(self) -> str:
        return ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.hosts)

    def open(self, attempt_timeout: float, connect_timeout: float = math.inf) -> Client:
        """Make a client. It connects on first use.

        Args:
            attempt_timeout: how long one attempt at connecting or at one command may take, in seconds.
            connect_timeout: how long one attempt at connecting may take, if that is less.
        """
        options: dict[str, Any] = {
            "username": self.username,
            "password": self.password,
            "socket_timeout": attempt_timeout,
            "socket_connect_timeout": min(attempt_timeout, connect_timeout),
            "socket_keepalive": True,
            "socket_keepalive_options": keepalive(attempt_timeout),  # half a lease
            "protocol": 2,
            "driver_info": None,  # saves two round trips on each connect
            "retry": Retry(NoBackoff(), 0),  # `connection.Connection` retries: it knows which calls may be repeated
        }
        if self.tls:
            options |= {
                "ssl": True,
                "ssl_ca_certs": self.ca_cert,
                "ssl_certfile": self.ssl_cert,
                "ssl_keyfile": self.ssl_cert_key,
                "ssl_password": "",  # an encrypted key is an error: OpenSSL would ask for its password on the terminal
            }
        if self.scheme.endswith("+cluster"):
            return self._cluster(options)
        options |= {"db": self.db, "max_connections": 2**31}  # every blocked thread holds a connection
        return self._client(options)

    def _cluster(self, options: dict[str, Any]) -> RedisCluster:
        options.pop("ssl", None)
        return RedisCluster(
            url=f"redis://{self._shown_hosts().partition(',')[0]}",  # with a URL, redis-py takes a class of connections
            startup_nodes=[ClusterNode(host, port) for host, port in self.hosts],
            dynamic_startup_nodes=False,  # what the user named stays valid when all discovered addresses change
            connection_class=TlsConnection if self.tls else TcpConnection,
            connection_pool_class=Pool,
            max_connections=2**31,
            **options,
        )

    def _client(self, options: dict[str, Any]) -> redis.Redis:
        if self.scheme.endswith("+sentinel"):
            own = {"username": self.sentinel_username, "password": self.sentinel_password, "db": 0}
            sentinels = Sentinels(self.hosts, sentinel_kwargs={**options, **own}, **options)
            kind = MasterTlsConnection if self.tls else MasterConnection
            master: redis.Redis = sentinels.master_for(
                self.service, connection_pool_class=MasterPool, connection_class=kind
            )
            return master
        if self.scheme == "unix":
            del options["socket_keepalive"], options["socket_keepalive_options"]
            return make_client({**options, "path": self.path})
        [(host, port)] = self.hosts
        return make_client({**options, "host": host, "port": port})


def parse_endpoint(
    text: str, *, ca_cert: str | None = None, ssl_cert: str | None = None, ssl_cert_key: str | None = None
) -> Endpoint:
    """Parse an endpoint as torchrun gives it, or a URL.

    A plain ``host[:port]`` keeps the scheme, user, password and database of the environment's ``REDELASTIC_REDIS_URL``,
    so that command lines need no secret; an empty text means that URL, or else ``localhost:6379``.

    Args:
        text: one of ``host[:port]``, ``redis://``, ``rediss://``, ``unix://``, ``redis+sentinel://``, ``redis+cluster://``
            and the TLS forms of the last two.
        ca_cert: file of the CAs to trust instead of the system's; needs a ``rediss`` scheme, as do the next two.
        ssl_cert: file of the client's certificate.
        ssl_cert_key: file of its key, if it is not in ``ssl_cert``.

    Raises:
        ValueError: the text is none of these; the message never holds the password.
    """
    text = text.strip()
    if "://" in text:
        endpoint = _parse_url(text)
    elif not text:
        endpoint = _environment_endpoint() or Endpoint("redis", (("localhost", DEFAULT_PORT),), is_default=True)
    else:
        base = _environment_endpoint() or Endpoint("redis")
        if base.scheme not in ("redis", "rediss"):
            base = Endpoint("rediss" if base.tls else "redis", username=base.username, password=base.password)
        if "@" in text:
            raise ValueError("The endpoint has a login but no scheme; use redis://user:password@host[:port].")
        endpoint = replace(base, hosts=(_parse_host(text, _without_secrets(text)),))
    if (ca_cert or ssl_cert or ssl_cert_key) and not endpoint.tls:
        raise ValueError(f"ca_cert, ssl_cert and ssl_cert_key need TLS, but the endpoint is {endpoint}: use rediss://.")
    for name, path in (("ca_cert", ca_cert), ("ssl_cert", ssl_cert), ("ssl_cert_key", ssl_cert_key)):
        if path and not (Path(path).is_file() and os.access(path, os.R_OK)):
            raise ValueError(f"{name}={path!r} is not a readable file: give the path of a PEM file.")
    if ssl_cert_key and not ssl_cert:
        raise ValueError(f"ssl_cert_key={ssl_cert_key!r} needs its certificate: give ssl_cert too.")
    return replace(endpoint, ca_cert=ca_cert, ssl_cert=ssl_cert, ssl_cert_key=ssl_cert_key)


@dataclass(frozen=True)
class UrlParts:
    """The parts of a URL; printed without its login and query, which may hold secrets."""

    scheme: str
    login: str = field(repr=False)
    hosts: str
    path: str
    query: str = field(repr=False)

    def __str__(self) -> str:
        return f"{self.scheme}://{_without_secrets(self.hosts + self.path)}"


def _without_secrets(hosts: str) -> str:
    """Hosts as far as they are well-formed: what follows a colon, and is no port, may be a password."""
    found = _HOSTS.match(hosts)
    known = found[0] if found else ""
    return hosts if known == hosts else f"{known}:…" if hosts.startswith(":", len(known)) else f"{known}…"


def split_url(url: str) -> UrlParts:
    """Split a URL, so that an error about one of its parts can leave out the others.

    ``urlsplit`` is no use here: its errors may quote the password, and it takes a ``/``, ``?`` or ``#`` in a password
    for the end of the host.

    Raises:
        ValueError: its scheme is unknown, its user or password is not percent-encoded, or options are in the wrong
            place.
    """
    scheme, separator, rest = url.partition("://")
    if not separator or not re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]{0,39}", scheme):
        raise ValueError(f"The endpoint has no scheme; use one of: {_FORMS}.")
    if scheme not in SCHEMES:
        raise ValueError(f"The endpoint's scheme {scheme!r} is unknown; use one of: {_FORMS}.")
    authority, path, query = re.match(r"([^/?#]*)([^?#]*)\??([^#]*)", rest).groups()  # type: ignore[union-attr]
    login, _, hosts = authority.rpartition("@")
    behind = rest[len(authority) :]
    if "#" in behind or ("@" in behind and (scheme != "unix" or hosts)):
        raise ValueError(
            f"The {scheme}:// endpoint has a '#', or an '@' after a '/' or '?'; percent-encode them in the user "
            "and password: %23 for '#', %2F for '/', %3F for '?', %40 for '@'."
        )
    if scheme != "unix" and "=" in hosts + path:
        raise ValueError(f"The {scheme}:// endpoint has an '=' before any '?'; options follow a '?': …?name=value.")
    return UrlParts(scheme, login, hosts, path, query)


def _environment_endpoint() -> Endpoint | None:
    text = os.environ.get(URL_VARIABLE, "").strip()
    try:
        if not text or "://" in text or "@" in text:
            return _parse_url(text) if text else None
        return Endpoint("redis", (_parse_host(text, _without_secrets(text)),))
    except ValueError as e:
        raise ValueError(f"The environment variable {URL_VARIABLE} is invalid. {e}") from None


def _parse_url(url: str) -> Endpoint:
    parts = split_url(url)
    scheme, shown = parts.scheme, str(parts)
    username, _, password = parts.login.partition(":")
    pairs = parse_query(parts.query, shown)
    query = dict(pairs)
    allowed = {"db", "sentinel_username", "sentinel_password"} if scheme.endswith("+sentinel") else {"db"}
    if unknown := sorted(query.keys() - allowed):
        raise ValueError(f"The endpoint {shown} has unknown options {unknown}; allowed: {sorted(allowed)}.")
    if len(query) < len(pairs):
        raise ValueError(f"The endpoint {shown} repeats one of the options {sorted(query)}: give each once.")
    endpoint = Endpoint(
        scheme, username=_decode(username, "user", shown) or None, password=_decode(password, "password", shown) or None
    )
    if scheme == "unix":
        if parts.hosts or not parts.path:
            raise ValueError("The unix:// endpoint names no socket; use unix://[user:password@]/path/to/redis.sock.")
        return replace(endpoint, path=_decode(parts.path, "path", shown), db=_parse_db(query.get("db"), shown))
    hosts = tuple(_parse_host(host, shown) for host in parts.hosts.split(","))
    segments = [_decode(s, "path", shown) for s in parts.path.strip("/").split("/") if s]
    if len(hosts) > 1 and scheme in ("redis", "rediss"):
        raise ValueError(f"The endpoint {shown} has several hosts; use {scheme}+sentinel:// or {scheme}+cluster://.")
    if scheme.endswith("+sentinel"):
        if not segments:
            raise ValueError(f"The endpoint {shown} lacks the master's name: use {scheme}://host:26379/mymaster.")
        endpoint = replace(
            endpoint,
            service=segments.pop(0),
            sentinel_username=query.get("sentinel_username"),
            sentinel_password=query.get("sentinel_password"),
        )
    if segments and "db" in query:
        raise ValueError(f"The endpoint {shown} gives the database twice, in its path and as db: give it once.")
    db = _parse_db(query.get("db", segments.pop(0) if segments else None), shown)
    if segments or (db and scheme.endswith("+cluster")):
        raise ValueError(
            f"The endpoint {shown} has a path or database that this form does not take; use one of: {_FORMS}."
        )
    return replace(endpoint, hosts=hosts, db=db)


def _decode(text: str, what: str, shown: str) -> str:
    try:
        decoded = unquote(text, errors="strict")
        decoded.encode()
    except UnicodeError:
        raise ValueError(f"The {what} of the endpoint {shown!r} is not UTF-8 when percent-decoded.") from None
    return decoded


def parse_query(text: str, shown: str) -> list[tuple[str, str]]:
    """Names and values of a URL's query; ``shown`` is the URL without secrets, for errors.

    Raises:
        ValueError: they are not valid text.
    """
    try:
        pairs = parse_qsl(text, keep_blank_values=True, errors="strict")
        "".join(part for pair in pairs for part in pair).encode()
    except UnicodeError:
        raise ValueError(f"An option of {shown} is not UTF-8 when percent-decoded.") from None
    return pairs


def _parse_db(text: str | None, shown: str) -> int:
    if text is None:
        return 0
    if not re.fullmatch("[0-9]{1,9}", text):
        raise ValueError(f"The database {text!r} of the endpoint {shown} is not a whole number, 0 or more.")
    return int(text)


def _parse_host(text: str, shown: str) -> tuple[str, int]:
    match = re.fullmatch(r"(?:\[(?P<v6>[^]]+)\]|(?P<name>[\w.-]+))(?::(?P<port>[0-9]{1,5}))?", text.strip())
    host, port = (match["v6"] or match["name"], int(match["port"] or DEFAULT_PORT)) if match else ("", 0)
    try:
        if match and match["v6"]:
            ipaddress.IPv6Address(host)
        else:
            host.encode("idna")  # as a look-up would, with a less helpful error
    except ValueError:
        port = 0
    if not 0 < port < 2**16:
        raise ValueError(
            f"The endpoint {shown!r} has no valid host and port (1 to 65535, IPv6 in brackets); use one of: {_FORMS}."
        )
    return host, port
