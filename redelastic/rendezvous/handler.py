"""RedisRendezvousHandler: torch's ``RendezvousHandler``, made of a node of a run and its keeper."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from datetime import timedelta
from multiprocessing.util import Finalize
from typing import Final

from torch.distributed.elastic.events import NodeState, construct_and_record_rdzv_event
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from redelastic.monitoring.control import RunControl
from redelastic.monitoring.events import Left, Unreached
from redelastic.monitoring.sentences import sentence
from redelastic.redis.errors import RedelasticError, UnreachableError
from redelastic.redis.routes import is_loopback
from redelastic.store import RedisStore
from redelastic.torch_errors import torch_errors

from .addresses import LocalAddress, find_address, why_unreached
from .admittance import Admittance, read_secret
from .backend import RedisRendezvousBackend, wait_for_backend
from .bootstrap import BootstrapPort
from .candidate import Candidate
from .keeper import Keeper
from .node import Node, RunThen
from .settings import Settings, parameters_from_url
from .view import Round

log = logging.getLogger(__name__)

EPOCH_VARIABLE: Final = "REDELASTIC_EPOCH"
PREFIX_VARIABLE: Final = "REDELASTIC_KEY_PREFIX"
DETECTION: Final = 0.2  # a lost lease is known everywhere within this time, with slack for a busy machine, in seconds
REACH_THREAD: Final = "redelastic-reach"
REACH_TIMEOUT: Final = 10.0  # in seconds, within which a node has to connect to rank 0
EXIT_TIMEOUT: Final = 2.0  # in seconds, for which a process that exits tries to leave the run


class RedisRendezvousHandler(RendezvousHandler):
    """An event-driven rendezvous that lives on leases.

    Contract: ``torch.distributed.elastic.rendezvous.RendezvousHandler``; guarantees I1 to I8 of PROTOCOL.md.
    Once it has joined, its node stays in the run until it is shut down or its process exits, even if nothing refers to
    it.

    Args:
        backend: names the server and the run.
        settings: of the run.

    Raises:
        ValueError: the backend's client waits for a reply for as long as a lease, or longer.

    Attributes:
        backend, settings: as given.
        address: that this node announces to its peers.
        node: this host's node of the run.
        keeper: keeps it in the run.
        ending: why this node will leave when it is shut down, and what then becomes of the run.
        exports_environment: whether this process starts workers, so that its environment has to name the round.
    """

    exports_environment = True

    @torch_errors()
    def __init__(self, backend: RedisRendezvousBackend, settings: Settings) -> None:
        _check_attempts(backend.connection.attempt_timeout, settings)
        self.backend = backend
        self.settings = settings
        self.address = find_address(settings.local_addr, backend.connection.local_address())
        self.node = Node(backend.connection, backend.keys, settings, self.address.host)
        self.keeper = Keeper(self.node)
        log.info("Node %s announces the address %s to its peers.", self.node.id, self.address)
        control = RunControl(backend.connection, backend.keys)
        path = settings.join_secret_file
        self._admittance = Admittance(self.node, control, read_secret(path)) if path else None
        self._stores: list[RedisStore] = []
        self._bootstrap: BootstrapPort | None = None
        self._entered: Round | None = None
        self._not_yet_reached = False  # whether a connection to rank 0 of that round is still to be tried
        self.ending: tuple[Left, RunThen] = Left(cause="finished"), "closes"
        self._shut_down = self._has_left = False
        self._at_exit: Finalize | None = None

    def get_backend(self) -> str:
        """The backend's name, ``redis``."""
        return self.backend.name

    def get_run_id(self) -> str:
        """The run's id."""
        return self.settings.run_id

    @property
    def use_agent_store(self) -> bool:
        """Whether workers share the bootstrap store that rank 0's agent serves; torch's own switch turns it off."""
        return os.getenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") != "1"

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the run's next round and block until it is complete.

        Sets ``REDELASTIC_EPOCH`` and ``REDELASTIC_KEY_PREFIX`` in this process' environment, which torch's agents pass
        on to their workers; and ``GLOO_SOCKET_IFNAME``, if it is not set and gloo would listen on a loopback or on
        an interface other than the given ``local_addr``.

        Raises:
            RendezvousClosedError: the run is closed.
            RendezvousGracefulExitError: the run was closed while this node waited as a spare.
            RendezvousTimeoutError: the round was not complete within ``join_timeout``.
            RendezvousConnectionError: Redis could not be reached, or it refuses the call.
            RendezvousStateError: the run's keys in Redis are corrupt.
            RendezvousError: other nodes of the run have another ``min_nodes`` or ``max_nodes``.
            JoinSecretError: other nodes of the run have another join secret, or none.
        """
        while (info := self._join_round()) is None:
            pass
        return info

    def _join_round(self) -> RendezvousInfo | None:
        """Join one round; None if some of its members do not have the join secret, or it broke meanwhile."""
        started = time.monotonic()
        self._raise_if_shut_down()
        if self._at_exit is None:
            # If a signal ends torchrun, it does not shut its handler down, since that would close the run: the node
            # only leaves. Unlike atexit's, this runs in multiprocessing's forks, too, but in no fork of this process.
            leave = Left(cause="exited"), "goes on", EXIT_TIMEOUT
            self._at_exit = Finalize(None, self.end, leave, exitpriority=0)
        self._close_bootstrap()  # a round never sees the keys of the one before
        self._bootstrap = BootstrapPort(self.node.host)
        try:
            with torch_errors():
                deadline = started + self.settings.join_timeout
                entered = Candidate(self.keeper, self._bootstrap.port, deadline).join()
            self._raise_if_shut_down()  # a signal handler may have shut it down
            info = self._open_round(entered)
        except Exception as e:
            self._record(f"{type(e).__name__}: {e}", NodeState.FAILED)
            raise
        if info is None:
            return None
        seconds = time.monotonic() - started
        message = (
            f"Node {self.node.id} is rank {entered.rank} of {entered.size} in round {entered.epoch} of run "
            f"{self.settings.run_id!r}, after {seconds:.3f} s."
        )
        self._record(message, NodeState.RUNNING, entered.rank)
        log.warning(message)  # shown by default, at the first round too: it says that all nodes are there
        return info

    def _raise_if_shut_down(self) -> None:
        if self._shut_down:
            raise RendezvousClosedError(
                f"This handler of run {self.settings.run_id!r} was shut down; create a new one."
            )

    def _open_round(self, entered: Round) -> RendezvousInfo | None:
        store = self.backend.store(self.settings, entered.epoch)
        self._stores.append(store)
        while len(self._stores) > 2:  # a caller that finds the last round broken may still hold its store
            self._stores.pop(0).close()
        if self._admittance is not None and not self._admittance.admit(entered, store):
            return None
        if self.exports_environment:
            os.environ[EPOCH_VARIABLE], os.environ[PREFIX_VARIABLE] = str(entered.epoch), self.settings.key_prefix
        self.address.export_interface()
        self._entered, self._not_yet_reached = entered, entered.rank > 0 and self.use_agent_store
        if entered.rank == 0 and self.use_agent_store and self._bootstrap is not None:
            self._bootstrap.serve(self.settings.read_timeout)
        else:
            self._close_bootstrap()
        return RendezvousInfo(store, entered.rank, entered.size, RendezvousStoreInfo(entered.host, entered.port))

    def _close_bootstrap(self) -> None:
        bootstrap, self._bootstrap = self._bootstrap, None
        if bootstrap is not None:
            bootstrap.close()

    def num_nodes_waiting(self) -> int:
        """How many nodes wait for this one to regroup; from memory, and never an error.

        It is also above 0 when a member of this node's round died, left or regroups: torch's agent then restarts
        its workers in a new round.

        The first call in a round, when the agent has started its workers, starts a thread that checks whether this host
        can connect to rank 0: torch's own error comes after half an hour, and does not say what to do.
        """
        if self._shut_down:
            return 0
        if self._not_yet_reached and self._entered:
            self._not_yet_reached = False
            thread = threading.Thread(target=self._try_to_reach, args=(self._entered,), name=REACH_THREAD, daemon=True)
            with contextlib.suppress(RuntimeError):  # no more threads can start: the round works without this diagnosis
                thread.start()
        return self.node.view.nodes_waiting

    def _try_to_reach(self, entered: Round) -> None:
        def is_over() -> bool:
            return self._shut_down or self._entered is not entered or self.node.view.nodes_waiting > 0

        host, port = entered.host, entered.port
        if not (why := why_unreached(host, port, REACH_TIMEOUT, is_over)):
            return
        control = RunControl(self.backend.connection, self.backend.keys)
        try:
            rank_0 = control.state().members[0].id
        except (RedelasticError, LookupError):  # the run's events name it
            rank_0 = "?"
        if is_over():
            return
        event = Unreached(
            node=self.node.id,
            master=rank_0,
            address=f"{host} port {port}",
            seen_from=self.address.host,
            reason=why,
        )
        log.error("Round %s of run %r: %s.", entered.epoch, self.settings.run_id, sentence(event))
        with contextlib.suppress(RedelasticError):
            control.note(event)

    def wait_for_loss(self) -> bool:
        """Wait for as long as Redis may take to notice the loss of a member; returns whether one is lost."""
        s = self.settings
        return self.node.watch.wait_for_loss(s.lease + DETECTION, patience=s.read_timeout)

    @torch_errors()
    def is_closed(self) -> bool:
        """Whether the run is closed.

        Raises:
            RendezvousConnectionError: Redis could not be reached.
        """
        return bool(self.node.view.closed) or self.node.is_run_closed()

    @torch_errors()
    def set_closed(self) -> None:
        """Close the run, permanently and for every node (I5).

        Raises:
            RendezvousTimeoutError: Redis could not be reached within ``close_timeout``.
            RendezvousConnectionError: Redis refuses the call.
        """
        try:
            self.node.close(self.settings.close_timeout)
        except UnreachableError as e:
            raise RendezvousTimeoutError(f"Run {self.settings.run_id!r} could not be closed in time: {e}") from e

    def shutdown(self) -> bool:
        """End this node's part as :attr:`ending` says: by default, a member of the newest round closes the run.

        A node that is no longer a member closes nothing (I4).

        Returns:
            Whether Redis took note; if not, another call tries again.
        """
        return self.end(*self.ending)

    def end(self, why: Left, run_then: RunThen, timeout: float | None = None) -> bool:
        """As :meth:`shutdown`, for another reason or with another outcome for the run.

        Args:
            why: the reason, for people and the other nodes.
            run_then: ``goes on`` without this node, ``closes``, or ``stops``: the other nodes end their workers.
            timeout: in seconds; None for ``close_timeout``.
        """
        timeout = self.settings.close_timeout if timeout is None else timeout
        if self._has_left:
            return True
        self._shut_down = True
        self.node.stop()
        try:
            self.node.leave(why, run_then=run_then, timeout=timeout)
        except RedelasticError as e:
            # No other node waits for one that was in no round.
            level = logging.WARNING if self._entered else logging.INFO
            log.log(level, "Could not report to run %r that this node is leaving: %s", self.settings.run_id, e)
            return False
        finally:
            self._close_bootstrap()
            if self._admittance is not None:
                self._admittance.close()
            for store in self._stores:
                store.close()
            self.backend.connection.close()
            if self._at_exit is not None:
                self._at_exit.cancel()
        self._has_left = True
        return True

    def _record(self, message: str, state: NodeState, rank: int | None = None) -> None:
        construct_and_record_rdzv_event(
            run_id=self.settings.run_id,
            message=message,
            node_state=state,
            name="RedisRendezvousHandler.next_rendezvous",
            hostname=self.address.host,
            pid=os.getpid(),
            rank=rank,
        )


def _check_attempts(attempt_timeout: float, settings: Settings) -> None:
    """Refuse a user's client that may wait for one reply until the lease has run out; warn of one that may come close.

    Args:
        attempt_timeout: how long the client waits for a reply, in seconds.
        settings: of the run.
    """
    if attempt_timeout <= settings.attempt_timeout:
        return
    wrong = (
        f"The Redis client of run {settings.run_id!r} waits up to socket_timeout={attempt_timeout:g} s for a reply, "
        f"and the lease is {settings.lease:g} s: if its connection dies, this node loses its lease before it tries "
        f"another. Create the client with socket_timeout={settings.attempt_timeout:g}, or raise keep_alive_interval."
    )
    if attempt_timeout >= settings.lease:
        raise ValueError(wrong)
    log.warning("%s", wrong.replace("this node loses", "this node may lose"))


def _require_reachable(address: LocalAddress, backend: RedisRendezvousBackend, settings: Settings) -> None:
    """Refuse to announce a loopback to nodes on other hosts: Redis is on another host, but no address leads there."""
    found = settings.local_addr is None and settings.max_nodes > 1
    if found and is_loopback(address.host) and backend.connection.is_remote():
        raise ValueError(
            f"This host has no address at which the other nodes of run {settings.run_id!r} could reach it, only "
            "loopbacks and link-local ones (fe80::), which are valid on one link, by an interface that other hosts "
            "call otherwise. Give its interface an IPv4 address, or an IPv6 address that is not link-local."
        )


@torch_errors()
def create_handler(backend: RedisRendezvousBackend, params: RendezvousParameters) -> RendezvousHandler:
    """Make a handler; contract: torch's ``dynamic_rendezvous.create_handler``.

    Args:
        backend: from :func:`create_backend` or :class:`RedisRendezvousBackend`.
        params: the parameters of :class:`redelastic.rendezvous.settings.Settings`.

    Returns:
        The native handler; with ``protocol=dynamic`` torch's own ``DynamicRendezvousHandler`` on ``backend``.

    Raises:
        RendezvousConnectionError: Redis could not be reached.
        ValueError: a parameter is unknown or wrong, or does not fit the backend's run; ``local_addr`` is not of
            this host; the backend's client waits for a reply for as long as a lease; or the run has several nodes, and
            this host has no address for the others.
    """
    settings = Settings.from_parameters(params)
    if (settings.run_id, settings.key_prefix) != (backend.keys.run_id, backend.keys.prefix):
        raise ValueError(
            f"The parameters are for run {settings.run_id!r} with key_prefix={settings.key_prefix!r}, but the backend "
            f"is for run {backend.keys.run_id!r} with {backend.keys.prefix!r}; use the same for both."
        )
    if settings.protocol == "native":
        node = RedisRendezvousHandler(backend, settings)
        _require_reachable(node.address, backend, settings)
        return node
    store = backend.store(settings)
    seconds = ("join_timeout", "last_call_timeout", "close_timeout", "heartbeat_timeout")
    handler: RendezvousHandler = dynamic_rendezvous.DynamicRendezvousHandler.from_backend(
        settings.run_id,
        store,
        backend,
        settings.min_nodes,
        settings.max_nodes,
        find_address(settings.local_addr, backend.connection.local_address()).host,
        dynamic_rendezvous.RendezvousTimeout(*(timedelta(seconds=getattr(settings, name)) for name in seconds)),
        keep_alive_interval=settings.keep_alive_interval,  # type: ignore[arg-type]
        keep_alive_max_attempt=settings.keep_alive_max_attempt,
    )
    return handler


@torch_errors()
def handler_from_parameters(params: RendezvousParameters) -> RendezvousHandler:
    """Connect to the endpoint of ``params`` and make its handler: what torchrun's registry calls.

    Raises:
        RendezvousConnectionError: no Redis answers at the endpoint within the ``join_timeout``, or it refuses the
            connection.
        ValueError: a parameter is unknown or wrong.
    """
    return create_handler(wait_for_backend(params), params)


def handler_from_url(url: str) -> RendezvousHandler:
    """Make a handler from one URL, as torch's legacy etcd handler allowed.

    Args:
        url: such as ``redis://host:6379/0?run_id=job&min_nodes=1&max_nodes=3&last_call_timeout=5``; see
            :func:`redelastic.rendezvous.settings.parameters_from_url`.

    Raises:
        RendezvousConnectionError: no Redis answers there, or it refuses the connection.
        ValueError: a part of the URL is missing, unknown or wrong.
    """
    return handler_from_parameters(parameters_from_url(url))
