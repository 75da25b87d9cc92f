"""RegroupingAgent: torch's agent, except that a lost node costs no restart, and nodes wait for each other's ends."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.elastic.agent.server.api import (
    DEFAULT_ROLE,
    RunResult,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs, SubprocessContext
from torch.distributed.elastic.multiprocessing.api import LogsDest
from torch.distributed.elastic.rendezvous.api import RendezvousTimeoutError

from redelastic.monitoring.events import Failed, Left, is_fault
from redelastic.rendezvous.handler import RedisRendezvousHandler
from redelastic.rendezvous.keeper import RETRY_PAUSE
from redelastic.store import RedisStore, RoundBrokenError
from redelastic.store.exchange import Exchange
from redelastic.torch_internals import exit_barrier_timeout, replace_agent_of_launcher
from redelastic.workers.blame import failed_alive, fill_in_exit_codes
from redelastic.workers.deaths import error_in
from redelastic.workers.stacks import state_of

log = logging.getLogger(__name__)

ENDS_TIMEOUT: Final = timedelta(seconds=1)  # of one wait for the other nodes' ends
RESTART_COUNT: Final = "TORCHELASTIC_RESTART_COUNT"  # torch names a folder by it
UNINTERRUPTIBLE_TIMEOUT: Final = "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"


class RegroupingAgent(LocalElasticAgent):
    """Torch's ``LocalElasticAgent``, with the same arguments; with another handler than redelastic's it is torch's."""

    _charged = False  # whether a restart was spent on workers that failed in this round
    _exchange: Exchange | None = None  # of this round
    _finished: RunResult | None = None  # of this node's workers, once all have ended with 0 in this round
    _finished_at = math.inf  # on the monotonic clock
    _ends: EndExchange | None = None  # from then on, if there are other nodes
    _interval = 0.0  # between checks of the workers, in seconds
    _exit_limit: float | None = None  # for the other nodes' workers to end after this node's, in seconds

    def __new__(cls, spec: WorkerSpec, *args: Any, **more: Any) -> Any:
        """Make torch's agent if torchrun runs a job of another rendezvous in this process."""
        if cls is RegroupingAgent and not isinstance(spec.rdzv_handler, RedisRendezvousHandler):
            return LocalElasticAgent(spec, *args, **more)
        return super().__new__(cls)

    def __init__(self, spec: WorkerSpec, *args: Any, **more: Any) -> None:
        super().__init__(spec, *args, **more)
        handler: Any = spec.rdzv_handler
        self._handler: RedisRendezvousHandler = handler
        self._logs_specs: Any = FolderPerRound(self._logs_specs)
        self._exit_limit = exit_barrier_timeout(None)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Join a round; if it breaks while roles are exchanged through its store, join the next one.

        torch's agent does not handle an error there: it would exit, and the loss of one node would cost another. If the
        workers failed because a node was lost, the restart is refunded.
        """
        self._forget_end()
        lost, done = False, False
        while not done:
            try:
                super()._rendezvous(worker_group)
                done = True
            except RoundBrokenError as e:
                log.warning("%s", e)
            lost = lost or self._handler.node.view.nodes_lost > 0
        if self._charged and lost:
            self._remaining_restarts += 1
        self._charged = False

    def _assign_worker_ranks(self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec) -> Any:
        if self._exchange is not None:
            self._exchange.close()
        self._exchange = Exchange(store)
        workers = super()._assign_worker_ranks(self._exchange, group_rank, group_world_size, spec)
        if group_rank == 0 and group_world_size > 1:
            self._exchange.keep_resending()
        return workers

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Wait for news of the run, or for the monitor interval; then check the workers.

        A roll call separates workers that failed because a node was lost from workers that failed on their own. With no
        restart left the agent would exit, and the job with it; so it waits for the verdict first.
        """
        node = self._handler.node
        node.watch.wait_for_news(self._pause())
        failed_at = self._first_failure()  # now: torch may take long to end the node's other workers
        if failed_at is not None:
            node.call_roll(failed_at)
        result = self._check_workers(worker_group)
        if result.state == WorkerState.FAILED:
            if failed_at is None:
                node.call_roll(time.monotonic())
            self._charged = self._may_restart(result)
            if not self._charged:
                lost = self._wait_for_loss()
                self._give_up(result, lost=lost)
                if lost:
                    return RunResult(state=WorkerState.HEALTHY)  # num_nodes_waiting() is above 0: the agent regroups
        if result.state == WorkerState.SUCCEEDED and not self._is_end_of_round(result):
            return RunResult(state=WorkerState.HEALTHY)
        return result

    def _is_end_of_round(self, result: RunResult) -> bool:
        """Whether the round has ended as a whole, now that this node's workers have ended with 0.

        A node whose workers have finished stays a member while other nodes' workers run, and starts its own again
        with them if one of them fails or its node is lost. It waits for as long as they hold their leases, unless a
        limit was given.

        Raises:
            RendezvousTimeoutError: the other nodes' workers have not ended within the exit barrier's timeout.
            RendezvousClosedError: another node's workers have failed for good.
        """
        handler, group = self._handler, self._worker_group
        rank, size = int(group.group_rank or 0), int(group.group_world_size or 0)
        if size <= 1:
            return True
        if closing := handler.node.view.closing:
            if is_fault(closing):
                handler.node.raise_closed()
            return True  # another node knows that all have ended
        if self._finished is None:
            self._finished, self._finished_at = result, time.monotonic()
            watch, timeout = handler.node.watch, handler.settings.read_timeout
            self._ends = EndExchange(
                self._round_store, rank, size, is_patient=lambda: watch.away < timeout, notify=watch.notify
            )
            log.info("This node's workers have finished; it waits for the other nodes' workers.")
        limit = self._exit_limit
        if limit is not None and time.monotonic() - self._finished_at > limit and not (self._ends and self._ends.done):
            raise RendezvousTimeoutError(
                f"The workers of the other nodes of run {handler.settings.run_id!r} have not ended within "
                f"exit_barrier_timeout={limit:g} s after this node's; the run stays open for them."
            )
        return self._ends is not None and self._ends.done

    def _forget_end(self) -> None:
        if self._ends is not None:
            self._ends.close()
        self._finished, self._ends = None, None

    @property
    def _round_store(self) -> RedisStore:
        store: Any = self._worker_group.store  # torch declares None
        return store  # type: ignore[no-any-return]

    def _exit_barrier(self) -> None:
        """Skip torch's barrier: :meth:`_is_end_of_round` has waited until all nodes' workers have ended."""

    def _first_failure(self) -> float | None:
        """When the first worker failed, on the monotonic clock in seconds; None if none did or it is unknown."""
        return None

    def _wait_for_loss(self) -> bool:
        """Wait until the loss of another node is known; returns whether one is lost."""
        return self._handler.wait_for_loss()

    def _pause(self) -> float:
        """How many seconds to wait for news before checking the workers again."""
        return self._interval

    def _check_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Check the workers."""
        if self._finished is not None:
            return self._finished
        try:
            result: RunResult = super()._monitor_workers(worker_group)
        except (ValueError, LookupError, TypeError, AttributeError):
            if not isinstance(self._pcontext, SubprocessContext):
                raise
            remove_torn_errors(self._pcontext)
            result = super()._monitor_workers(worker_group)
        return _failed(worker_group.workers) if result.state == WorkerState.UNHEALTHY else result

    def _may_restart(self, result: RunResult) -> bool:  # noqa: ARG002
        """Whether workers that have failed may be restarted."""
        return bool(self._remaining_restarts > 0)

    def _give_up(self, result: RunResult, *, lost: bool) -> None:
        """Called when failed workers may not be restarted, unless another node was ``lost``."""

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the workers to their end; contract: torch's ``ElasticAgent.run``.

        A spare whose run is closed has succeeded: torch's agent would return None, and its launcher would fail.
        """
        spec = self._worker_group.spec
        self._interval = spec.monitor_interval
        spec.monitor_interval = 0.0  # torch's loop would sleep instead of waiting for news
        try:
            result: RunResult | None = super().run(role)
        except BaseException:
            # torch's launcher shuts the handler down as if the job had finished
            self._handler.ending = Left(cause="exited"), "goes on"
            raise
        finally:
            self._forget_end()
            spec.monitor_interval = self._interval
        if result is None:
            return RunResult(state=WorkerState.SUCCEEDED)
        fill_in_exit_codes(result, self._pcontext)
        if result.is_failed():
            self._handler.ending = Left(cause="failed"), "closes"
        return result


class EndExchange:
    """Waits, in a thread and through the round's store, until the workers of all its nodes have ended with 0.

    The thread keeps writing that this node's workers have ended, in case the server has lost it, until :attr:`done`,
    the round is broken, or :meth:`close` is called.

    Args:
        store: of the round.
        rank: of this node.
        size: number of nodes.
        is_patient: whether to keep trying while Redis is away, or refuses writes.
        notify: called when it is done.

    Attributes:
        done: whether all have ended, or Redis was away for so long that it cannot be known.
    """

    def __init__(
        self, store: RedisStore, rank: int, size: int, *, is_patient: Callable[[], bool], notify: Callable[[], None]
    ) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._is_patient, self._notify = is_patient, notify
        self._over = threading.Event()
        self.done = False
        threading.Thread(target=self._learn, name="redelastic-ends", daemon=True).start()

    def close(self) -> None:
        """Stop it."""
        self._over.set()

    def _learn(self) -> None:
        ended = [f"redelastic/exit/{r}" for r in range(self._size)]
        awaited = ended if self._rank == 0 else ["redelastic/exited"]
        while not (self.done or self._over.is_set()):
            try:
                self._store.set(ended[self._rank], b"")
                self._store.wait(awaited, ENDS_TIMEOUT)
                if self._rank == 0:
                    self._store.set("redelastic/exited", b"")
                self.done = True
            except RoundBrokenError:  # noqa: PERF203  # this node regroups with the others
                return
            except DistStoreError:
                pass  # they have not ended yet
            except DistNetworkError as e:
                if not self._is_patient():
                    log.warning(
                        "This node's workers have finished; whether the other nodes' workers have is unknown: %s", e
                    )
                    self.done = True
                self._over.wait(RETRY_PAUSE)  # Redis may refuse at once
        self._notify()


def _failed(workers: Sequence[Worker]) -> RunResult:
    """The result of workers that hang in the kernel, which torch calls unhealthy.

    torch's launcher, like ``RunResult.is_failed``, takes anything but ``FAILED`` for success.
    """
    stuck = [worker for worker in workers if state_of(worker.id) == "D"] or workers  # all, if they have just woken up
    why = f"hangs in the kernel (state D), for longer than {UNINTERRUPTIBLE_TIMEOUT} allows"
    return failed_alive(dict.fromkeys(stuck, Failed(message=why)))


def install_agent_in_torchrun() -> None:
    """Have torchrun use this agent."""
    replace_agent_of_launcher(LocalElasticAgent, RegroupingAgent)


class FolderPerRound(LogsSpecs):
    """Torch's log folders, a new one for each round.

    Torch names a folder by the number of restarts, which regrouping does not raise, and deletes an older one of that
    name. So after ``attempt_0`` come ``attempt_0.1``, ``attempt_0.2``, …

    Args:
        given: what names and makes the folders; contract: torch's ``LogsSpecs``.
    """

    def __init__(self, given: LogsSpecs) -> None:
        self._given, self._made = given, Counter[str]()

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Make the folders for a group of workers, whose environments get their error files."""
        count = envs[0].get(RESTART_COUNT, "0") if envs else "0"
        number = self._made[count]
        self._made[count] += 1
        for env in envs.values() if number else ():
            env[RESTART_COUNT] = f"{count}.{number}"
        try:
            return self._given.reify(envs)
        finally:
            for env in envs.values() if number else ():
                env[RESTART_COUNT] = count

    @property
    def root_log_dir(self) -> str:
        """The folder that holds all of them."""
        return self._given.root_log_dir


def remove_torn_errors(context: Any) -> None:
    """Remove error files that torch cannot read, and would raise for: a worker may be killed while it writes one.

    Args:
        context: the ``PContext`` of workers that have ended.
    """
    for path in context.error_files.values():
        with contextlib.suppress(OSError):
            if Path(path).is_file() and error_in(path) is None:
                Path(path).unlink()
