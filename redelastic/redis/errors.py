"""redelastic's errors, and the map to them from redis-py's; ``redelastic/torch_errors.py`` maps them to torch's."""

from __future__ import annotations

import re
from typing import Final

import redis.exceptions as rx
from redis.sentinel import MasterNotFoundError

from .sockets import tls_refusal
from .wire import is_of_replica

# The ACL rules that the user of one run needs; with ~<key_prefix>:*, the user of all runs under a prefix.
ACL_RULES: Final = (
    "~<key_prefix>:{<run_id>}:* "
    "+ping +time +type +del +exists +get +mget +set +pexpire +pttl +eval +evalsha +hget +hmget +hgetall "
    "+hset +hsetnx +hdel +hexists +hincrby +hkeys +hlen +sadd +srem +scard +sismember +smembers +zadd "
    "+zrem +zremrangebyrank +zcard +zcount +zrange +zrangebyscore +zscore +xadd +xread +xrevrange +rpush "
    "+lpop +llen"
)

_PASSING_REPLY: Final = re.compile(
    r"^(BUSY|LOADING|MASTERDOWN|CLUSTERDOWN|TRYAGAIN|NOREPLICAS|UNBLOCKED)\b"
    r"|[Ss]cript killed by user|max number of clients"
)
_PASSING: Final = (
    rx.ConnectionError,
    rx.TimeoutError,
    rx.ClusterDownError,
    rx.TryAgainError,
    rx.ClusterError,
    rx.RedisClusterException,
)
ERRORS: Final = (rx.RedisError, rx.RedisClusterException)
_FINAL: Final = (rx.AuthenticationError, rx.AuthorizationError, rx.MaxConnectionsError)
_SCRIPT_SUFFIX: Final = re.compile(r" script: [0-9a-f]{40}, on .*$")  # Redis 7 adds it to a script's error
_SENTINEL_REPR: Final = re.compile(r"<redis\.client\.Redis\(.*?host=(.*?),port=(\d+).*?\)>\)>\)>")
_DENIED: Final = re.compile(r"NOPERM|ACL failure in script|The user executing the script can't")
_NO_CLUSTER: Final = "Cluster mode is not enabled"


class RedelasticError(Exception):
    """A call to Redis failed, or its reply cannot be right; the message says why, and what to do."""


class UnavailableError(RedelasticError):
    """Redis does not answer, or refuses the connection or the call."""


class UnreachableError(UnavailableError):
    """Redis does not answer now; trying again may help."""


class RefusesWritesError(UnavailableError):
    """Redis refuses writes: it is a replica, or memory or disk is full. If it took writes before, it may recover."""


class CorruptStateError(RedelasticError):
    """A key in Redis holds something that redelastic did not write."""


class ProtocolError(CorruptStateError):
    """The run's record was written by a version of redelastic with another protocol."""


class FencedError(RedelasticError):
    """The caller's epoch is no longer the run's newest (I4)."""


def _cause(error: BaseException) -> BaseException:
    """The original error, where redis-py's Cluster client wrapped it in a less specific one."""
    if isinstance(error, rx.RedisClusterException) and isinstance(error.__cause__, Exception):
        return error.__cause__
    return error


def _is_passing(error: BaseException) -> bool:
    """Whether trying again may help."""
    error = _cause(error)
    if isinstance(error, _FINAL):
        return "max number of clients" in str(error)
    if isinstance(error, MasterNotFoundError) and "AuthenticationError" in str(error):
        return False
    if isinstance(error, _PASSING):
        return not tls_refusal(error) and _NO_CLUSTER not in str(error)
    return isinstance(error, rx.ResponseError) and bool(_PASSING_REPLY.search(str(error)))


def may_pass(error: BaseException, *, fail_over: bool) -> bool:
    """Whether trying again may help; with ``fail_over``, a read-only replica is a master that will be replaced."""
    return _is_passing(error) or (fail_over and is_of_replica(_cause(error)))


def translated(error: Exception, name: str, waited: float, *, fail_over: bool) -> RedelasticError:
    """The error of redelastic for one of redis-py's: it says what happened, at which server, and what to do.

    Args:
        error: one of ``ERRORS``.
        name: of the server, without secrets.
        waited: how long the call was tried, in seconds.
        fail_over: as in :func:`may_pass`.
    """
    failed, message = _translate(error, name, waited)
    return (UnreachableError if may_pass(error, fail_over=fail_over) else failed)(message)


def _translate(  # noqa: C901, PLR0911, PLR0912  (a list, to be read from the top)
    error: Exception, name: str, waited: float
) -> tuple[type[RedelasticError], str]:
    """The one map from redis-py's errors to redelastic's."""
    cause, within = _cause(error), f" within {waited:.1f} s" if waited >= 0.05 else ""
    reply = _SCRIPT_SUFFIX.sub("", _SENTINEL_REPR.sub(r"\1:\2", str(cause))).rstrip(". ")
    if "FENCED " in reply:
        return FencedError, reply.partition("FENCED ")[2]
    if "PROTOCOL " in reply:
        recorded, own = reply.partition("PROTOCOL ")[2].split()[:2]
        return ProtocolError, (
            f"The run's record in Redis at {name} has protocol {recorded}, and this version of redelastic has {own}: "
            "start all nodes of a run with the same version, or use a new run id."
        )
    if "CORRUPT " in reply:
        return CorruptStateError, (
            f"Redis at {name} contains a value that redelastic did not write: {reply.partition('CORRUPT ')[2]}. "
            "Remove that key once no node of the run is alive."
        )
    if "WRONGTYPE" in reply:
        return CorruptStateError, (
            f"Redis at {name} has a key of the wrong type: {reply}. Remove it, or use another key_prefix."
        )
    if isinstance(cause, MasterNotFoundError) and "AuthenticationError" in reply:
        return UnavailableError, (
            f"The sentinels of {name} refused the login: {reply}. Append ?sentinel_password=… (and "
            "&sentinel_username=… if they have users) to the endpoint's URL, and check the sentinels' ports."
        )
    if isinstance(cause, rx.AuthenticationError | rx.AuthorizationError):
        return UnavailableError, (
            f"Redis at {name} refused the login: {reply}. Put the correct user and password into its URL, or "
            "into REDELASTIC_REDIS_URL with the endpoint as host:port."
        )
    if isinstance(cause, rx.NoPermissionError) or _DENIED.search(reply):
        return UnavailableError, (
            f"Redis at {name} denies this user a key or command: {reply}. Check that the user is for this run id and "
            f"key_prefix; it needs the rules '{ACL_RULES}' (SECURITY.md)."
        )
    if is_of_replica(cause):
        return RefusesWritesError, (
            f"Redis at {name} is a read-only replica. Name its master, or use redis+sentinel:// to follow it."
        )
    if isinstance(cause, rx.OutOfMemoryError) or "OOM command not allowed" in reply:
        return RefusesWritesError, (f"Redis at {name} is out of memory: {reply}. Raise its maxmemory, or free memory.")
    if reply.startswith("MISCONF"):
        return RefusesWritesError, (
            f"Redis at {name} cannot save its data and refuses writes: {reply}. Check its log and its disk, or turn "
            "off stop-writes-on-bgsave-error."
        )
    if isinstance(cause, rx.MovedError | rx.AskError):
        return UnavailableError, (
            f"Redis at {name} is a Cluster node, and this run's keys are on another one. Use redis+cluster://."
        )
    if _NO_CLUSTER in reply:
        return UnavailableError, f"Redis at {name} is not a Cluster. Use redis://, or rediss:// with TLS."
    if "DB index" in reply or "SELECT is not allowed" in reply:
        return UnavailableError, (
            f"Redis at {name} does not have that database: {reply}. Omit the number, or raise its 'databases'."
        )
    if refusal := tls_refusal(cause):
        reason = getattr(refusal, "verify_message", "") or refusal.reason or str(refusal)
        return UnavailableError, (
            f"TLS with Redis at {name} failed: {reason}. Check that the port serves TLS, that ca_cert is its "
            "CA's file, that its certificate is for that host, and that it accepts ssl_cert and ssl_cert_key."
        )
    if isinstance(cause, rx.InvalidResponse):
        return UnavailableError, (
            f"The server at {name} is not Redis: {reply}. Check host and port; for TLS use rediss://."
        )
    if "invalid bulk length" in reply or "invalid multibulk length" in reply:
        return UnavailableError, (
            f"Redis at {name} takes no request of this size: {reply}. Raise its proto-max-bulk-len, or send less."
        )
    if isinstance(cause, rx.ResponseError) and not _is_passing(cause):
        if "user_script" in reply:
            return CorruptStateError, f"Redis at {name} contains a value that redelastic's script cannot read: {reply}."
        if reply.startswith("unknown command 'SENTINEL'"):
            return (
                UnavailableError,
                f"The server at {name} is not a sentinel. Use redis://, or the sentinel's port.",
            )
        if reply.startswith("unknown command"):
            return UnavailableError, (
                f"The server at {name} lacks a command that redelastic needs: {reply}. It must be Redis 6.2 or "
                "later, or Valkey. If it is a sentinel, use redis+sentinel://host:port/master-name."
            )
        return RedelasticError, f"Redis at {name} answered with an error: {reply}."
    if isinstance(cause, MasterNotFoundError):
        return UnreachableError, (
            f"The sentinels of {name} named no master{within}: {reply}. Check that they run there, "
            "that they watch a master of that name, and that it is up."
        )
    if "NOREPLICAS" in reply:
        return UnreachableError, (
            f"Redis at {name} refuses writes: {reply}. Check why its replicas lag, or lower its min-replicas-to-write."
        )
    if _is_passing(error):
        return UnreachableError, (
            f"Redis at {name} could not be reached{within}: {reply or type(cause).__name__}. "
            "Check that it runs there, that this host may connect to it, and that both sides or neither use TLS (rediss://)."
        )
    return RedelasticError, f"redis-py rejected a call to Redis at {name}: {reply or type(cause).__name__}."
