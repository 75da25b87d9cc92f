"""When a node of a job takes part in a preflight: before the first round, and after a round in which a host failed."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from concurrent.futures import Future, wait
from typing import Any, Final

from torch.distributed import DistError
from torch.distributed.elastic.rendezvous.api import RendezvousError, RendezvousParameters

from redelastic.monitoring.control import RunControl, UnknownRunError
from redelastic.monitoring.events import Failed, Hung, Lost
from redelastic.preflight.host import Host
from redelastic.preflight.options import Options
from redelastic.redis.errors import UnavailableError
from redelastic.rendezvous.handler import RedisRendezvousHandler

log = logging.getLogger(__name__)

MEET_TIMEOUT: Final = 60.0  # for the other nodes to come after a round that failed, in seconds
LAST_CALL_TIMEOUT: Final = 10.0  # for more nodes, once there are enough, in seconds
LOOK_INTERVAL: Final = 10.0  # between looks whether the job has begun without this node, in seconds
POLL_INTERVAL: Final = 1.0  # of one wait for the end of a preflight, in seconds
EVENTS: Final = 1000  # of the run, the last ones, in which a failure is looked for


class Preflights:
    """Takes part in preflights with the other nodes of a job; called before each rendezvous.

    Each node decides for itself whether one is due, by the run in Redis. One that is wrong about it waits in vain for
    the others, for a minute, and joins the next round all the same.

    Args:
        handler: of this node.
        params: of its rendezvous.
        options: how to measure.
    """

    def __init__(self, handler: RedisRendezvousHandler, params: RendezvousParameters, options: Options) -> None:
        self._handler, self._params, self._options = handler, params, options
        self._control = RunControl(handler.backend.connection, handler.backend.keys)

    def __call__(self) -> None:
        """Measure this host with the others, if that is due.

        Raises:
            RendezvousError: before the first round, too few nodes came, or Redis cannot be reached.
        """
        held = self._handler.node.view.epoch_held
        if not (self._failed(held) if held else self._begins()):
            return
        try:
            for outlier in self._measure(held)["outliers"]:
                log.warning("Preflight: host %s stands out: %s.", outlier["host"], outlier["text"])
        except (RendezvousError, DistError) as e:
            if isinstance(e, RendezvousError) and not held:
                raise
            log.warning("The preflight was not completed: %s", e)

    def _measure(self, held: int) -> dict[str, Any]:
        """What comes of a preflight; no outlier if this node is needed elsewhere, and gives it up."""
        measured: Future[dict[str, Any]] = Future()

        def measure(host: Host) -> None:
            try:
                measured.set_result(host.run())
            except BaseException as e:  # noqa: BLE001 - it is raised again
                measured.set_exception(e)

        with contextlib.closing(Host(self._params_after(held), self._options)) as host:
            threading.Thread(target=measure, args=(host,), name="redelastic-preflight", daemon=True).start()
            look_at = time.monotonic() + LOOK_INTERVAL
            while not self._handler.node.must_leave():
                if not held and time.monotonic() >= look_at:
                    look_at += LOOK_INTERVAL
                    if not self._begins():
                        break
                if wait([measured], POLL_INTERVAL).done:
                    return measured.result()
        return {"outliers": []}

    def _params_after(self, held: int) -> RendezvousParameters:
        """Of the rendezvous: after a round, the nodes that live come at once."""
        params, settings = self._params, self._handler.settings
        if not held:
            return params
        longest = {
            "join_timeout": min(MEET_TIMEOUT, settings.join_timeout),
            "last_call_timeout": min(LAST_CALL_TIMEOUT, settings.last_call_timeout),
        }
        place = params.endpoint, params.run_id, params.min_nodes, params.max_nodes, params.local_addr
        return RendezvousParameters("redis", *place, **{**params.config, **longest})

    def _begins(self) -> bool:
        """Whether no round of the job stands: a node that joins one that trains does not stop it to be measured."""
        try:
            run = self._control.state()
        except (UnknownRunError, UnavailableError):  # the rendezvous waits for Redis
            return True
        if run.epoch > 0 and run.broken is None and any(node.silence < run.lease for node in run.nodes):
            log.warning("Run %r trains already: this host joins without a preflight.", run.run_id)
            return False
        return True

    def _failed(self, held: int) -> bool:
        """Whether a worker failed or a node was lost in the round that this node held."""
        try:
            events = self._control.events(count=EVENTS)
        except UnavailableError:
            return False
        return any(isinstance(event, Failed | Hung | Lost) and event.epoch == held for event in events)
