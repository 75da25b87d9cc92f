"""LiveFailure: a worker that failed while still alive, in the form torch uses for one that has ended."""

from __future__ import annotations

from typing import Final

from torch.distributed.elastic.agent.server.api import RunResult, Worker
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from redelastic.torch_internals import exit_codes

UNKNOWN: Final = 1  # the exit code of a worker that cannot be killed


class LiveFailure(ProcessFailure):
    """A worker that hangs. Its exit code is the one with which the agent ended it: see :func:`fill_in_exit_codes`.

    Args:
        worker: torch's.
        why: what is wrong with it, worded to follow its name.
    """

    def __init__(self, worker: Worker, why: str) -> None:
        super().__init__(local_rank=worker.local_rank, pid=worker.id, exitcode=UNKNOWN, error_file="")
        self.message = why


def fill_in_exit_codes(result: RunResult, context: object) -> None:
    """Fill in how the hung workers ended, once they have.

    Args:
        result: of their group.
        context: torch's ``PContext`` that ran them.
    """
    codes = exit_codes(context)
    for failure in result.failures.values():
        if isinstance(failure, LiveFailure):
            failure.exitcode = codes.get(failure.local_rank, UNKNOWN)
