"""Blame: which worker of a group failed first, when and why; and its failure, as torch and Redis get it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Final

from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerState
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from redelastic.host.cgroups import oom_kills
from redelastic.monitoring.events import Failed
from redelastic.monitoring.sentences import idleness, out_of_memory
from redelastic.torch_internals import exit_codes

from .deaths import Deaths, Error, error_in, last_exception, names_a_peer, signal_name
from .logs import last_lines, log_files, own_log, redacted, tail
from .relays import FLUSH_TIMEOUT, Relay, without_relays

UNKNOWN_EXIT_CODE: Final = 1  # the exit code of a worker that cannot be killed


class Blame:
    """Finds the worker of a group that failed first, from before the group's start.

    Attributes:
        logs: log files of the workers that write to one, by local rank.
        cause: local rank of the worker that failed first, once :meth:`find_cause` has found it.
        failed_at: when it raised, on the monotonic clock in seconds; None if no cause has been found.
    """

    def __init__(self) -> None:
        self.logs: Mapping[int, str] = {}
        self._error_files: Mapping[int, str] = {}
        self._relays: Mapping[int, list[Relay]] = {}
        self._deaths: Deaths | None = None
        self._started_at = 0.0
        self._own_log = own_log()
        self._ooms = oom_kills()
        self.begin_round({})

    def started(self, deaths: Deaths) -> None:
        """The workers run."""
        self._deaths, self._started_at = deaths, time.monotonic()

    def read_from(self, context: Any, relays: Mapping[int, list[Relay]]) -> None:
        """Learn where the workers write.

        Args:
            context: torch's ``PContext`` that runs them; it names their logs, and the files to which torch has them
                write the exceptions that end them.
            relays: of the output that has no file, by local rank: of stderr first. They are closed with this object.
        """
        self._error_files, self._relays = dict(context.error_files), relays
        self.logs = log_files(*(without_relays(paths, relays) for paths in (context.stdouts, context.stderrs)))

    def close(self) -> None:
        """Close the relays, once they have passed on what they have, or after a while."""
        until = time.monotonic() + FLUSH_TIMEOUT
        for relay in chain.from_iterable(self._relays.values()):
            relay.close(until)
        self._relays = {}

    def begin_round(self, ranks: Mapping[int, int]) -> None:
        """Begin a round, whose failures are all to come: the workers may have survived the one before.

        Args:
            ranks: of the workers in the job, by local rank.
        """
        self._ranks = ranks
        self.cause: int | None = None
        self.failed_at: float | None = None
        self._follows = False  # whether a peer is the cause of all failures
        self._is_judged = False  # whether the first failure has been found for good
        self._words: dict[int, str] = {}  # of workers that have ended

    def find_cause(self, result: RunResult | None = None) -> bool:
        """Find the worker that failed first, of all that have failed by now, and set :attr:`cause`.

        That is the one that raised first, even if it ends later; not one whose last words say that a peer is gone.

        Args:
            result: in which torch has reported failures, if they were not known before it ended the other workers.

        Returns:
            Whether a peer, on this node or another one, is the cause of all failures so far; False once torch has ended
            the other workers, which are no causes.
        """
        if self._is_judged:
            return False
        failed = self._deaths.failed if self._deaths else {}
        if result is not None:
            _, first = self.first_of(result)
            failed = {first.local_rank: failed.get(first.local_rank, time.monotonic())}
            if isinstance(first, LiveFailure):
                self._words.setdefault(first.local_rank, first.message)
        if not failed:
            return False
        found = [(names_a_peer(self._last_words(r)), self._raised_at(r, at), r) for r, at in failed.items()]
        self._follows, self.failed_at, self.cause = min(found)
        return self._follows

    def follow_a_peer(self) -> None:
        """Count their failure from now on: the peer's, which was their cause, comes first."""
        self.failed_at = time.monotonic()

    def find_raised(self, group: Sequence[Worker]) -> RunResult | None:
        """Find running workers that have raised by themselves, and are about to end; sets :attr:`cause`.

        Args:
            group: torch's, by local rank.
        """
        running = [r for r in self._error_files if self._deaths and not self._deaths.ended(r)]
        errors = {r: error for r in running if (error := self._error(r)) and not names_a_peer(error.message)}
        if not errors:
            return None
        now = time.monotonic()
        self.failed_at, self.cause = min((self._raised_at(r, now), r) for r in errors)
        how = {group[r]: Failed(exit_code=UNKNOWN_EXIT_CODE, message=_safe(e.message)) for r, e in errors.items()}
        return failed_alive(how)

    def _error(self, local_rank: int) -> Error | None:
        return error_in(self._error_files.get(local_rank, ""))

    def _raised_at(self, local_rank: int, ended_at: float) -> float:
        """When a worker raised the exception that ended it, on the monotonic clock in seconds; its end if not known."""
        if (error := self._error(local_rank)) is None:
            return ended_at
        age = time.time() - error.at  # on this host's clock, which wrote it
        return min(ended_at, max(self._started_at, time.monotonic() - age))

    def _last_words(self, local_rank: int) -> str:
        """How a worker that has ended says why; read once, since others may write to the same log."""
        if local_rank not in self._words:
            if error := self._error(local_rank):
                self._words[local_rank] = _safe(error.message)
            else:
                path = self.logs.get(local_rank, "")
                ends = [relay.end() for relay in self._relays.get(local_rank, ())[:1]]
                log = next(filter(None, ends), "") or tail(path, start=self._log_start(path))
                self._words[local_rank] = last_exception(log, self._ranks.get(local_rank))
        return self._words[local_rank]

    def last_lines(self, local_rank: int) -> str:
        """The last lines that a worker has written, to its log or through relays."""
        ends = [relay.end() for relay in self._relays.get(local_rank, ())]
        if path := self.logs.get(local_rank, ""):
            ends.append(last_lines(path, self._log_start(path)))
        return "\n".join(filter(None, reversed(ends)))

    def _log_start(self, path: str) -> int:
        """Where this group's lines begin in a log, in bytes: the agent's own log has earlier ones."""
        name, size = self._own_log
        return size if path == name else 0

    def failure(self, result: RunResult, usage: Mapping[str, Any]) -> Failed:
        """Describe the failure of the worker that failed first.

        Args:
            result: of the group.
            usage: what each worker used at the last sample, by local rank.
        """
        if not result.failures:
            return Failed(message=f"worker group is {result.state.name}")
        rank, failure = self.first_of(result)
        worker: dict[str, Any] = {"local_rank": failure.local_rank, "rank": rank, "pid": failure.pid}
        if isinstance(failure, LiveFailure):
            return replace(failure.failed, **worker, follows=self._follows or failure.failed.follows)
        # An uncaught exception ends Python with 1, and C++ with SIGABRT; other logs may end with one that was handled.
        raised = failure.exitcode in {1, -signal.SIGABRT} or (failure.exitcode > 0 and self._error(failure.local_rank))
        words = self._last_words(failure.local_rank) if raised else ""
        if failure.exitcode < 0:
            how = {"signal": signal_name(-failure.exitcode), **self._starved(failure, usage)}
            return Failed(**worker, **how, message=words, follows=self._follows)
        return Failed(**worker, exit_code=failure.exitcode, message=words, follows=self._follows)

    def first_of(self, result: RunResult) -> tuple[int, ProcessFailure]:
        """The rank and the failure of the worker that failed first."""
        first = {rank: failure for rank, failure in result.failures.items() if failure.local_rank == self.cause}
        return min((first or result.failures).items(), key=lambda item: item[1].timestamp)

    def explain(self, result: RunResult, usage: Mapping[str, Any]) -> None:
        """Add to torch's report which worker was first, and that it was killed for lack of memory."""
        self._is_judged = True
        rank, failure = self.first_of(result)
        failure.timestamp = min(one.timestamp for one in result.failures.values())  # torch's report names the first
        rest = dict(result.failures)
        result.failures.clear()
        result.failures.update({rank: failure, **rest})
        if starved := self._starved(failure, usage):
            failure.message = f"It {out_of_memory(Failed(**starved))}"

    def _starved(self, failure: ProcessFailure, usage: Mapping[str, Any]) -> dict[str, Any]:
        """How the kernel killed a worker for lack of memory; empty if nothing suggests that it did."""
        ooms = oom_kills() - self._ooms if failure.exitcode == -signal.SIGKILL else 0
        if ooms <= 0:
            return {}
        memory = usage.get(str(failure.local_rank), {}).get("memory")
        return {"oom_kills": ooms, "memory": memory}


def _safe(words: str) -> str:
    return redacted(words, os.environ)


class LiveFailure(ProcessFailure):
    """A worker that has failed and runs. :func:`fill_in_exit_codes` adds with which exit code the agent ended it.

    Args:
        worker: torch's.
        failed: how it has failed.
    """

    def __init__(self, worker: Worker, failed: Failed) -> None:
        super().__init__(local_rank=worker.local_rank, pid=worker.id, exitcode=UNKNOWN_EXIT_CODE, error_file="")
        self.failed = failed
        self.message = failed.message or idleness(failed)


def failed_alive(failed: Mapping[Worker, Failed]) -> RunResult:
    """The result of a group of which workers have failed that still run."""
    failures: dict[int, ProcessFailure] = {one.global_rank: LiveFailure(one, how) for one, how in failed.items()}
    return RunResult(WorkerState.FAILED, failures=failures)


def fill_in_exit_codes(result: RunResult, context: object) -> None:
    """Fill in how workers ended that had failed alive, once they have.

    Args:
        result: of their group.
        context: torch's ``PContext`` that ran them.
    """
    codes = exit_codes(context)
    for failure in result.failures.values():
        if isinstance(failure, LiveFailure):
            failure.exitcode = codes.get(failure.local_rank, UNKNOWN_EXIT_CODE)
