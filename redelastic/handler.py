"""RedisRendezvousHandler: torch's ``RendezvousHandler`` on a run's membership in Redis."""

from __future__ import annotations

import atexit
import logging
import os
import socket
import time
import weakref
from datetime import timedelta
from typing import Final

from torch.distributed.elastic.events import NodeState, construct_and_record_rdzv_event
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from .backend import RedisRendezvousBackend, open_backend
from .bootstrap import BootstrapPort
from .connection import UnreachableError
from .membership import Membership, Round
from .settings import Settings, parameters_from_url
from .store import RedisStore

log = logging.getLogger(__name__)

EPOCH_VARIABLE: Final = "REDELASTIC_EPOCH"
PREFIX_VARIABLE: Final = "REDELASTIC_KEY_PREFIX"
DETECTION: Final = 0.2  # a lost lease is known everywhere within this time, and some for a busy machine, in seconds
EXIT_TIMEOUT: Final = 2.0  # how long a process that exits tries to say so, in seconds


class RedisRendezvousHandler(RendezvousHandler):
    """An event-driven rendezvous that lives on leases.

    Contract: ``torch.distributed.elastic.rendezvous.RendezvousHandler``; guarantees I1 to I8 of PROTOCOL.md.

    Args:
        backend: names the server and the run.
        settings: of the run.
    """

    def __init__(self, backend: RedisRendezvousBackend, settings: Settings) -> None:
        self._backend = backend
        self._settings = settings
        self._host = settings.local_addr or _reachable_host(backend.connection.local_address())
        self._membership = Membership(backend.connection, backend.keys, settings, self._host)
        self._stores: list[RedisStore] = []
        self._bootstrap: BootstrapPort | None = None
        self._shut_down = False
        _handlers.add(self)

    def get_backend(self) -> str:
        """The backend's name, ``redis``."""
        return self._backend.name

    def get_run_id(self) -> str:
        """The run's id."""
        return self._settings.run_id

    @property
    def use_agent_store(self) -> bool:
        """Whether workers share the bootstrap store that rank 0's agent serves; torch's own switch turns it off."""
        return os.getenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") != "1"

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the run's next round and block until it is complete.

        Sets ``REDELASTIC_EPOCH`` and ``REDELASTIC_KEY_PREFIX`` in this process' environment, which torch's agents hand
        on to their workers.

        Raises:
            RendezvousClosedError: the run is closed.
            RendezvousGracefulExitError: the run was closed while this node waited as a spare.
            RendezvousTimeoutError: the round was not complete within ``join_timeout``.
            RendezvousConnectionError: Redis could not be reached, or it refuses us.
            RendezvousStateError: the run's keys in Redis are corrupt.
            RendezvousError: other nodes of the run have another ``min_nodes`` or ``max_nodes``.
        """
        started = time.monotonic()
        if self._shut_down:
            raise RendezvousClosedError(f"This handler of run {self._settings.run_id!r} was shut down; make a new one.")
        self._close_bootstrap()  # a round never sees the keys of the one before
        self._bootstrap = BootstrapPort()
        try:
            entered = self._membership.join(self._bootstrap.port, started + self._settings.join_timeout)
            info = self._open_round(entered)
        except Exception as e:
            self._record(f"{type(e).__name__}: {e}", NodeState.FAILED)
            raise
        seconds = time.monotonic() - started
        message = (
            f"Node {self._membership.node} is rank {entered.rank} of {entered.size} in round {entered.epoch} of run "
            f"{self._settings.run_id!r}, after {seconds:.3f} s."
        )
        self._record(message, NodeState.RUNNING, entered.rank)
        log.log(logging.WARNING if entered.again else logging.INFO, message)
        return info

    def _open_round(self, entered: Round) -> RendezvousInfo:
        s = self._settings
        store = RedisStore(
            self._backend.connection,
            s.run_id,
            epoch=entered.epoch,
            key_prefix=s.key_prefix,
            timeout=s.read_timeout,
            ttl=s.ttl,
        )
        self._stores.append(store)
        while len(self._stores) > 2:  # the last round's may still be in the hands of somebody who finds it broken
            self._stores.pop(0).close()
        os.environ[EPOCH_VARIABLE], os.environ[PREFIX_VARIABLE] = str(entered.epoch), s.key_prefix
        if entered.rank == 0 and self.use_agent_store and self._bootstrap is not None:
            self._bootstrap.serve(s.read_timeout)
        else:
            self._close_bootstrap()
        return RendezvousInfo(store, entered.rank, entered.size, RendezvousStoreInfo(entered.host, entered.port))

    def _close_bootstrap(self) -> None:
        bootstrap, self._bootstrap = self._bootstrap, None
        if bootstrap is not None:
            bootstrap.close()

    def num_nodes_waiting(self) -> int:
        """How many nodes wait for this one to regroup; from memory, and never an error.

        It is above 0 as well when a member of this node's round died, left or regroups: torch's agent then restarts
        its workers in a new round.
        """
        return 0 if self._shut_down else self._membership.nodes_waiting

    @property
    def nodes_lost(self) -> int:
        """How many nodes of the round before did not come back for this one."""
        return self._membership.nodes_lost

    def wait_for_loss(self) -> bool:
        """Wait for as long as it can take until the loss of a member is known; returns whether one is lost."""
        return self._membership.wait_for_loss(self._settings.lease + DETECTION)

    def is_closed(self) -> bool:
        """Whether the run is closed.

        Raises:
            RendezvousConnectionError: Redis could not be reached.
        """
        return bool(self._membership.closed) or self._membership.ask_whether_closed()

    def set_closed(self) -> None:
        """Close the run, for ever and for every node (I5).

        Raises:
            RendezvousTimeoutError: Redis could not be reached within ``close_timeout``.
            RendezvousConnectionError: Redis refuses us.
        """
        try:
            self._membership.close(self._settings.close_timeout)
        except UnreachableError as e:
            raise RendezvousTimeoutError(f"Run {self._settings.run_id!r} could not be closed in time: {e}") from e

    def shutdown(self) -> bool:
        """End this node's part: it leaves, and if it is a member of the newest round it closes the run.

        A node that is no member has no say in the run any more, and closes nothing (I4).

        Returns:
            Whether Redis could be told.
        """
        return self._end("finished", finished=True, timeout=self._settings.close_timeout)

    def _end(self, reason: str, *, finished: bool, timeout: float) -> bool:
        if self._shut_down:
            return True
        self._shut_down = True
        self._membership.stop()
        try:
            self._membership.leave(reason, finished=finished, timeout=timeout)
        except RendezvousError as e:
            log.warning("Run %r could not be told that this node leaves: %s", self._settings.run_id, e)
            return False
        finally:
            self._close_bootstrap()
            for store in self._stores:
                store.close()
            self._backend.connection.close()
            _handlers.discard(self)
        return True

    def _record(self, message: str, state: NodeState, rank: int | None = None) -> None:
        construct_and_record_rdzv_event(
            run_id=self._settings.run_id,
            message=message,
            node_state=state,
            name="RedisRendezvousHandler.next_rendezvous",
            hostname=self._host,
            pid=os.getpid(),
            rank=rank,
        )


def create_handler(backend: RedisRendezvousBackend, params: RendezvousParameters) -> RendezvousHandler:
    """Make a handler; contract: torch's ``dynamic_rendezvous.create_handler``.

    Args:
        backend: as :func:`create_backend` or :class:`RedisRendezvousBackend` makes it.
        params: the parameters of :class:`redelastic.settings.Settings`.

    Returns:
        The native handler; with ``protocol=dynamic`` torch's own ``DynamicRendezvousHandler`` on ``backend``.

    Raises:
        ValueError: a parameter is unknown or wrong, or is another run's than the backend.
    """
    settings = Settings.from_parameters(params)
    if (settings.run_id, settings.key_prefix) != (backend.keys.run_id, backend.keys.prefix):
        raise ValueError(
            f"The parameters are for run {settings.run_id!r} with key_prefix={settings.key_prefix!r}, but the backend "
            f"is for run {backend.keys.run_id!r} with {backend.keys.prefix!r}; give both the same."
        )
    if settings.protocol == "native":
        return RedisRendezvousHandler(backend, settings)
    store = RedisStore(
        backend.connection,
        settings.run_id,
        key_prefix=settings.key_prefix,
        timeout=settings.read_timeout,
        ttl=settings.ttl,
    )
    seconds = ("join_timeout", "last_call_timeout", "close_timeout", "heartbeat_timeout")
    handler: RendezvousHandler = dynamic_rendezvous.DynamicRendezvousHandler.from_backend(
        settings.run_id,
        store,
        backend,
        settings.min_nodes,
        settings.max_nodes,
        settings.local_addr,
        dynamic_rendezvous.RendezvousTimeout(*(timedelta(seconds=getattr(settings, name)) for name in seconds)),
        keep_alive_interval=settings.keep_alive_interval,  # type: ignore[arg-type]
        keep_alive_max_attempt=settings.keep_alive_max_attempt,
    )
    return handler


def handler_from_parameters(params: RendezvousParameters) -> RendezvousHandler:
    """Connect to the endpoint of ``params`` and make its handler: what torchrun's registry calls.

    Raises:
        RendezvousConnectionError: no Redis answers at the endpoint, or it refuses us.
        ValueError: a parameter is unknown or wrong.
    """
    return create_handler(open_backend(params), params)


def handler_from_url(url: str) -> RendezvousHandler:
    """Make a handler from one URL, as torch's legacy etcd handler allowed.

    Args:
        url: such as ``redis://host:6379/0?run_id=job&min_nodes=1&max_nodes=3&last_call_timeout=5``; see
            :func:`redelastic.settings.parameters_from_url`.

    Raises:
        RendezvousConnectionError: no Redis answers there, or it refuses us.
        ValueError: a part of the URL is missing, unknown or wrong.
    """
    return handler_from_parameters(parameters_from_url(url))


def _reachable_host(towards_redis: str | None) -> str:
    """The address that peers are given: that of the way to Redis, which they take too; else a name that resolves."""
    if towards_redis:
        return towards_redis
    name = socket.gethostname()  # not getfqdn, which asks a name server for names that nobody gave
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return "127.0.0.1"
    return name


# torchrun does not shut a handler down when a signal ends it: leaving would close the run. But it is gone, and says so.
_handlers: weakref.WeakSet[RedisRendezvousHandler] = weakref.WeakSet()
_pid = os.getpid()


def _leave_at_exit() -> None:
    if os.getpid() == _pid:
        for handler in list(_handlers):
            handler._end("exited", finished=False, timeout=EXIT_TIMEOUT)  # noqa: SLF001


atexit.register(_leave_at_exit)
