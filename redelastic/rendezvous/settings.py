"""The settings of a run, checked once, under torch's names: from ``RendezvousParameters`` or a URL."""

from __future__ import annotations

import math
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final
from urllib.parse import urlencode

from torch.distributed.elastic.rendezvous.api import RendezvousParameters

from redelastic.redis.endpoint import Endpoint, parse_endpoint, parse_query, split_url
from redelastic.redis.keys import DEFAULT_PREFIX, DEFAULT_TTL, check_key_part

PROTOCOLS: Final = ("native", "dynamic")
MIN_SECONDS: Final = 0.001  # Redis counts in whole ms
MAX_SECONDS: Final = 1e9
MAX_COUNT: Final = 1_000_000


def _seconds(name: str, value: object, *, zero: bool = False) -> float:
    try:
        seconds = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        seconds = math.nan
    if isinstance(value, bool) or not (MIN_SECONDS <= seconds <= MAX_SECONDS or (zero and seconds == 0)):
        allowed = f"{MIN_SECONDS:g} to {MAX_SECONDS:.0f}" + (", or 0" if zero else "")
        raise ValueError(f"The rendezvous parameter {name}={_shown(value)} must be a number of seconds: {allowed}.")
    return seconds


def _or_zero(name: str, value: object) -> float:
    return _seconds(name, value, zero=True)


def _or_forever(name: str, value: object) -> float:
    return math.inf if value in (math.inf, "inf") else _or_zero(name, value)


def _count(name: str, value: object) -> int:
    try:
        count = int(value) if not isinstance(value, bool | float) else -1  # type: ignore[call-overload]
    except (TypeError, ValueError):
        count = -1
    if not 1 <= count <= MAX_COUNT:
        raise ValueError(f"The rendezvous parameter {name}={_shown(value)} must be a whole number: 1 to {MAX_COUNT}.")
    return int(count)


def _count_or_zero(name: str, value: object) -> int:
    return 0 if value in (0, "0") and not isinstance(value, bool | float) else _count(name, value)


def _attempts(name: str, value: object) -> int:
    attempts = _count(name, value)
    if attempts < 2:
        raise ValueError(f"The rendezvous parameter {name}={value!r} must be 2 or more: a lease outlasts a heartbeat.")
    return attempts


def _protocol(name: str, value: object) -> str:
    if value in ("http", "https"):
        raise ValueError(
            f"The rendezvous parameter {name}={value!r} is for etcd: remove it. For TLS use a rediss:// endpoint."
        )
    if value not in PROTOCOLS:
        raise ValueError(f"The rendezvous parameter {name}={_shown(value)} must be one of {', '.join(PROTOCOLS)}.")
    return str(value)


def _path(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"The rendezvous parameter {name}={_shown(value)} must be the path of a PEM file.")
    return value


def _secret_path(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"The rendezvous parameter {name}={_shown(value)} must be the path of a file.")
    return value


def _shown(value: object) -> str:
    try:
        shown = repr(value)
    except ValueError:  # a number with more digits than Python prints
        shown = f"a {type(value).__name__}"
    return shown if len(shown) <= 80 else f"{shown[:80]}…"


def _unquoted(value: object) -> object:
    """The value without the quotes that torchrun leaves in place in ``--rdzv-conf 'topology="rack 1"'``."""
    if isinstance(value, str) and len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
        return value[1:-1]
    return value


def _without_outer_quotes(config: Mapping[str, object]) -> Mapping[str, object]:
    """The parameters without a pair of quotes around the whole of ``--rdzv-conf``, as a shell may leave it in place.

    Raises:
        ValueError: only the first of the two quotes is there.
    """
    given = [name for name in config if name not in _IGNORED]  # torchrun adds a timeout at the end
    if not given or given[0][:1] not in ("'", '"'):
        return config
    first, last, quote = given[0], config[given[-1]], given[0][0]
    if not isinstance(last, str) or not last.endswith(quote):
        raise ValueError(f"--rdzv-conf begins with {quote} and does not end with it: remove it, or close the quotes.")
    stripped = {**config, given[-1]: last[:-1]}
    return {name[1:] if name == first else name: value for name, value in stripped.items()}


def _is_tcp(value: object) -> bool:
    """Whether a ``store_type`` of c10d's is "tcp": workers find each other by a TCPStore with this backend, too.

    Raises:
        ValueError: it is another.
    """
    if value is None or str(value).strip().lower() == "tcp":
        return True
    raise ValueError(
        f"The rendezvous parameter store_type={_shown(value)} is for c10d: remove it. The rendezvous is in Redis."
    )


def _label(name: str, value: object) -> str:
    return check_key_part(name, value) if value != "" else ""


def _hostname() -> str:
    """The name of this host as part of a key: any character not allowed there becomes a hyphen."""
    return re.sub(r"[^\w.-]", "-", socket.gethostname())[:100] or "host"


_CHECKS: Final[Mapping[str, Callable[[str, object], Any]]] = {
    "join_timeout": _seconds,
    "last_call_timeout": _or_zero,
    "close_timeout": _seconds,
    "heartbeat_timeout": _seconds,
    "read_timeout": _seconds,
    "replacement_timeout": _or_zero,
    "roll_call_timeout": _or_zero,
    "admit_timeout": _or_forever,
    "admit_interval": _or_zero,
    "min_replicas": _count_or_zero,
    "keep_alive_interval": _seconds,
    "keep_alive_max_attempt": _attempts,
    "ttl": _seconds,
    "key_prefix": check_key_part,
    "protocol": _protocol,
    "node_name": check_key_part,
    "topology": _label,
    "join_secret_file": _secret_path,
    "ca_cert": _path,
    "ssl_cert": _path,
    "ssl_cert_key": _path,
}
# torchrun adds `timeout` to every rendezvous, and c10d's users pass `is_host`; redelastic has no use for either.
_IGNORED: Final = frozenset({"timeout", "is_host"})
# Names that torch's other backends use, in `--rdzv-conf` and in URLs. The table of torch's `create_handler` calls the
# `heartbeat_timeout` heartbeat.
_ALIASES: Final = {"heartbeat": "heartbeat_timeout", "etcd_prefix": "key_prefix"}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a node's run. All times are in seconds.

    Names and defaults are the same as in torch's ``create_handler`` and ``etcd_rendezvous_backend.create_backend``,
    except that the heartbeat is faster (torch: every 5 s).

    Attributes:
        run_id: id of the run.
        min_nodes, max_nodes: how many nodes a round may have.
        local_addr: address of this node for its peers, its name, or the interface that has it; None finds it.
        join_timeout: within which a rendezvous has to complete.
        last_call_timeout: how long a new group waits for more nodes once ``min_nodes`` have joined.
        close_timeout: within which closing has to succeed.
        heartbeat_timeout: how long one attempt at a call may take, a heartbeat among them.
        keep_alive_interval: time between two heartbeats of a node.
        keep_alive_max_attempt: how many heartbeats may be missed before the node's lease is lost.
        roll_call_timeout: within which nodes have to answer when workers have failed and a lost node may be the reason;
            0 leaves it to their leases.
        replacement_timeout: how long the survivors of a round wait for replacements before they go on with fewer.
        admit_timeout: how long workers that train have to save before this node is let in, which restarts them; 0: it
            is let in at once; infinite: they are not asked, and it waits until they save by themselves.
        admit_interval: how old their round has to be by then, so that nodes that come at about the same time share one
            restart; a round that is short of a lost node waits for nobody.
        min_replicas: how many replicas of Redis have to hold a completed round before a node enters it (WAIT).
        read_timeout: within which an operation on a store has to succeed; also the timeout of the round's store.
        ttl: how long a run's keys in Redis outlive its last live node.
        key_prefix: prefix of all keys.
        protocol: ``native``, or ``dynamic`` for torch's own state machine on Redis.
        node_name: what people call this host; its hostname by default.
        topology: label of the node's location; new nodes get ranks in the order of their labels.
        join_secret_file: file of the secret that all nodes of the run have to have; None asks for none.
        ca_cert, ssl_cert, ssl_cert_key: files for TLS.
    """

    run_id: str
    min_nodes: int
    max_nodes: int
    local_addr: str | None = None
    join_timeout: float = 600.0
    last_call_timeout: float = 30.0
    close_timeout: float = 30.0
    heartbeat_timeout: float = 5.0
    keep_alive_interval: float = 2.0
    keep_alive_max_attempt: int = 3
    roll_call_timeout: float = 0.5
    replacement_timeout: float = 0.0
    admit_timeout: float = 0.0
    admit_interval: float = 0.0
    min_replicas: int = 0
    read_timeout: float = 60.0
    ttl: float = DEFAULT_TTL
    key_prefix: str = DEFAULT_PREFIX
    protocol: str = "native"
    node_name: str = field(default_factory=_hostname)
    topology: str = ""
    join_secret_file: str | None = None
    ca_cert: str | None = None
    ssl_cert: str | None = None
    ssl_cert_key: str | None = None

    @property
    def lease(self) -> float:
        """How long a silent node stays in its round, in seconds."""
        return self.keep_alive_interval * self.keep_alive_max_attempt

    @property
    def attempt_timeout(self) -> float:
        """How long one attempt at a call may take, in seconds: half a lease, so that another can follow; at least 1."""
        return min(self.heartbeat_timeout, self.read_timeout, max(1.0, self.lease / 2))

    def endpoint(self, text: str) -> Endpoint:
        """The endpoint that a text describes, with these settings' files for TLS."""
        return parse_endpoint(text, ca_cert=self.ca_cert, ssl_cert=self.ssl_cert, ssl_cert_key=self.ssl_cert_key)

    @classmethod
    def from_parameters(cls, params: RendezvousParameters) -> Settings:
        """Check torch's parameters.

        Raises:
            ValueError: a parameter is unknown or wrong; the message names it, its value and what is allowed.
        """
        config: dict[str, object] = {}
        for name, value in _without_outer_quotes(params.config).items():
            if name in _IGNORED or (name == "store_type" and _is_tcp(value)):
                continue
            target = _ALIASES.get(name, name)
            if target in config:
                raise ValueError(f"The rendezvous parameter {target} is given under two of its names: give it once.")
            config[target] = _unquoted(value)
        if unknown := sorted(config.keys() - _CHECKS.keys()):  # its value may be a secret
            raise ValueError(f"Unknown rendezvous parameter {unknown[0]!r}; allowed: {', '.join(sorted(_CHECKS))}.")
        checked = {name: _CHECKS[name](name, value) for name, value in config.items() if value is not None}
        settings = cls(
            run_id=_check_run_id(params.run_id),
            min_nodes=_count("min_nodes", params.min_nodes),
            max_nodes=_count("max_nodes", params.max_nodes),
            local_addr=None if params.local_addr is None else check_key_part("local_addr", params.local_addr),
            **checked,
        )
        if settings.min_nodes > settings.max_nodes:  # torch checks this too, when the parameters are made
            raise ValueError(
                f"min_nodes={settings.min_nodes} is above max_nodes={settings.max_nodes}: give --nnodes=MIN:MAX with "
                "MIN <= MAX."
            )
        if settings.join_secret_file and settings.protocol == "dynamic":
            raise ValueError("The rendezvous parameter join_secret_file needs protocol=native: remove one of the two.")
        if settings.ttl < 2 * settings.lease:
            raise ValueError(
                f"The rendezvous parameter ttl={settings.ttl:g} must be at least twice the lease of {settings.lease:g} "
                "s (keep_alive_interval times keep_alive_max_attempt)."
            )
        return settings


# Parameters by their names in torch's legacy etcd URL.
_URL_ALIASES: Final = {
    **_ALIASES,
    "min_workers": "min_nodes",
    "max_workers": "max_nodes",
    "timeout": "join_timeout",
    "prefix": "key_prefix",
}


def _check_run_id(run_id: str) -> str:
    """Return ``run_id`` if it can be part of a key's name and of a folder's: torch's agent names log folders by it.

    Raises:
        ValueError: it is invalid.
    """
    if "/" in check_key_part("run id", run_id):
        raise ValueError(f"The run id {run_id!r} contains '/', and log folders are named by it; use another character.")
    return run_id


def parameters_from_url(url: str) -> RendezvousParameters:
    """Split a URL such as ``redis://host/0?run_id=job&min_nodes=1&max_nodes=3`` into an endpoint and parameters.

    Args:
        url: an endpoint's URL whose query holds ``run_id``, ``min_nodes``, ``max_nodes`` (or ``min_workers``,
            ``max_workers``) and any parameter of :class:`Settings`; ``timeout`` is ``join_timeout``, ``prefix`` is
            ``key_prefix``, as in torch's legacy etcd URL.

    Raises:
        ValueError: one of them is missing, unknown, wrong, or given twice.
    """
    parts = split_url(url)  # names the URL without its login and its query, where passwords may be
    given: dict[str, str] = {}
    endpoint_options: dict[str, str] = {}
    own = {f.name for f in fields(Settings)}
    for name, value in parse_query(parts.query, str(parts)):
        target = _URL_ALIASES.get(name, name)
        into = given if target in own else endpoint_options
        if target in into:
            raise ValueError(f"The URL {parts} gives {target} twice (as {name}): give it once.")
        into[target] = value
    try:
        run_id, low, high = (given.pop(name) for name in ("run_id", "min_nodes", "max_nodes"))
    except KeyError as e:
        raise ValueError(
            f"The URL {parts} lacks {e.args[0]}; it needs ?run_id=…&min_nodes=…&max_nodes=… in its query."
        ) from None
    endpoint = url.partition("?")[0] + ("?" + urlencode(endpoint_options) if endpoint_options else "")
    local_addr = given.pop("local_addr", None)
    min_nodes, max_nodes = _count("min_nodes", low), _count("max_nodes", high)
    if min_nodes > max_nodes:
        raise ValueError(f"The URL {parts} has min_nodes={low} above max_nodes={high}: lower it.")
    return RendezvousParameters("redis", endpoint, run_id, min_nodes, max_nodes, local_addr, **given)
