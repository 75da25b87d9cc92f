"""RedisRendezvousBackend: the state of torch's own rendezvous in Redis, behind a compare-and-set on a fencing token."""

from __future__ import annotations

import logging
import time
import uuid
from typing import TYPE_CHECKING, Any, Final

from torch.distributed.elastic.rendezvous.api import RendezvousParameters
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

from redelastic.redis import scripts
from redelastic.redis.connection import Connection, require_keys_of_types
from redelastic.redis.errors import CorruptStateError, UnreachableError
from redelastic.redis.keys import DEFAULT_PREFIX, DEFAULT_TTL, RunKeys
from redelastic.store import RedisStore
from redelastic.torch_errors import torch_errors

from .settings import Settings

if TYPE_CHECKING:
    from redelastic.redis.wire import Client

log = logging.getLogger(__name__)

Token = int
QUIET_TIME: Final = 2.0  # in seconds, after which the log says that the node waits for Redis
MAX_TOKEN: Final = 19  # digits; a token is a time in microseconds since 1970, which has 16


class RedisRendezvousBackend(RendezvousBackend):
    """Holds a run's rendezvous in Redis; contract: ``torch…dynamic_rendezvous.RendezvousBackend``.

    It names the server and the run for :func:`redelastic.create_handler`, and serves torch's own
    ``DynamicRendezvousHandler`` with ``get_state`` and ``set_state``.

    Args:
        client: a redis-py client of bytes, or a :class:`Connection`.
        run_id: id of the run.
        key_prefix: prefix of all keys; None, as torch's etcd backend takes it: the default.
        ttl: how long the state outlives its last change, in seconds; None: the default of a day.

    Raises:
        ValueError: the run id or prefix cannot be part of a key, or the client decodes replies.
    """

    def __init__(
        self, client: Client | Connection, run_id: str, key_prefix: str | None = None, ttl: float | None = None
    ) -> None:
        self.keys = RunKeys(run_id, DEFAULT_PREFIX if key_prefix is None else key_prefix)
        self.connection = client if isinstance(client, Connection) else Connection(client)
        self.ttl = DEFAULT_TTL if ttl is None else ttl

    @property
    def name(self) -> str:
        """The backend's name, ``redis``."""
        return "redis"

    @torch_errors()
    def get_state(self) -> tuple[bytes, Token] | None:
        """Read the state.

        Returns:
            The state and its fencing token; None if there is no state.

        Raises:
            RendezvousConnectionError: Redis cannot be reached.
            RendezvousStateError: the key holds something that redelastic did not write.
        """
        key = self.keys.state
        try:
            reply: Any = self.connection.call(lambda client: client.hmget(key, "state", "token"))
        except CorruptStateError as e:
            require_keys_of_types(self.connection, {key: "hash"}, e)
        state, token = reply
        return None if state is None and token is None else self._checked(state, token)

    @torch_errors()
    def set_state(self, state: bytes, token: Token | Any | None = None) -> tuple[bytes, Token, bool] | None:
        """Replace the state, if ``token`` is still its fencing token (I4, I8).

        Args:
            state: the new state.
            token: of the state that the new one is based on; None if there must be no state yet.

        Returns:
            The state afterwards, its token, and whether it is the new one; None if there is no state although
            ``token`` is of one.

        Raises:
            RendezvousConnectionError: Redis cannot be reached.
            RendezvousStateError: the key holds something that redelastic did not write.
        """
        if not isinstance(state, bytes):
            raise TypeError(f"The state must be bytes, not {type(state).__name__}.")
        is_own = token is None or (isinstance(token, int) and not isinstance(token, bool))
        if not is_own:  # no token of this backend: it matches nothing
            existing = self.get_state()
            return existing and (*existing, False)
        key = self.keys.state
        args: list[str | bytes | int] = [
            state,
            "" if token is None else str(token),
            uuid.uuid4().hex,
            round(1000 * self.ttl),
        ]
        try:
            reply = scripts.SET_STATE(self.connection, [key], args)
        except CorruptStateError as e:
            require_keys_of_types(self.connection, {key: "hash"}, e)
        return reply and (*self._checked(*reply[:2]), reply[2] == 1)

    def store(self, settings: Settings, epoch: int | None = None) -> RedisStore:
        """The store of the whole run, or of the round with this epoch."""
        return RedisStore(
            self.connection,
            settings.run_id,
            epoch=epoch,
            key_prefix=settings.key_prefix,
            timeout=settings.read_timeout,
            ttl=settings.ttl,
        )

    def _checked(self, state: bytes | None, token: bytes | None) -> tuple[bytes, Token]:
        if state is None or not token or not token.isdigit() or len(token) > MAX_TOKEN:
            raise CorruptStateError(
                f"The key {self.keys.state!r} in Redis at {self.connection.name} is corrupt: its token is "
                f"{token and token[:80]!r}{' and it has no state' if state is None else ''}. Remove that key."
            )
        return state, int(token)


def open_backend(params: RendezvousParameters, connect_timeout: float | None = None) -> RedisRendezvousBackend:
    """Connect to the endpoint of ``params``.

    Args:
        params: as for :func:`create_backend`.
        connect_timeout: as for :meth:`Connection.open`.

    Raises:
        UnavailableError: no Redis answers at the endpoint, or it refuses the connection.
        ValueError: a parameter is unknown or wrong.
    """
    settings = Settings.from_parameters(params)
    endpoint = settings.endpoint(params.endpoint)
    connection = Connection.open(endpoint, settings.attempt_timeout, settings.read_timeout, connect_timeout)
    return RedisRendezvousBackend(connection, settings.run_id, settings.key_prefix, settings.ttl)


def wait_for_backend(params: RendezvousParameters) -> RedisRendezvousBackend:
    """As :func:`open_backend`, but wait for a Redis that does not answer yet, up to the join timeout.

    It may be about to start, as the job's other parts are. Does not wait for a Redis that refuses the connection.
    """
    timeout, started = Settings.from_parameters(params).join_timeout, time.monotonic()
    try:
        return open_backend(params, min(QUIET_TIME, timeout))
    except UnreachableError as e:
        left = timeout - (time.monotonic() - started)
        if left <= 0:
            raise
        log.warning(
            "%s Waiting for it, up to the join_timeout of %g s; `redelastic server` starts one here.", e, timeout
        )
        return open_backend(params, left)


@torch_errors()
def create_backend(params: RendezvousParameters) -> tuple[RedisRendezvousBackend, RedisStore]:
    """Connect to the endpoint of ``params``; contract: torch's ``c10d_rendezvous_backend.create_backend``.

    Args:
        params: endpoint, run id and the settings of :class:`redelastic.rendezvous.settings.Settings`.

    Returns:
        The backend, and a store of the whole run.

    Raises:
        RendezvousConnectionError: no Redis answers at the endpoint, or it refuses the connection.
        ValueError: a parameter is unknown or wrong.
    """
    backend, settings = open_backend(params), Settings.from_parameters(params)
    return backend, backend.store(settings)
