"""A worker of torchft for `benchmarks.peers`, which steps as those of `recovery_processes.py` do.

Usage: peers_worker.py TIMEOUT RECORD NODE, with the timeout in seconds. It runs where torchft is installed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torchft import Manager, ProcessGroupGloo

PACE = 0.02  # between two steps, in seconds


def main(timeout: timedelta, record: Path, number: str) -> None:
    """Step with all others; counts as another worker in each group."""
    file = os.open(record, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    state: dict[str, Any] = {"model": torch.zeros(1)}
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timeout),
        state_dict=lambda: state,
        load_state_dict=state.update,
        min_replica_size=2,
        timeout=timeout,
        quorum_timeout=timeout,
        replica_id=f"node_{number}_",
    )

    def tell(**what: float) -> None:
        os.write(file, (json.dumps({"pid": os.getpid(), **what}) + "\n").encode())

    group = None
    while True:
        manager.start_quorum()
        manager.allreduce(torch.ones(1)).wait()
        if manager.should_commit() and (rank := manager.participating_rank()) is not None:  # None: it gets the state
            now, world = time.monotonic(), manager.num_participants()
            if group != (rank, world):
                group = rank, world
                tell(node=int(number), rank=rank, world=world, born=now)
                tell(ready=now)
            tell(step=now)
        time.sleep(PACE)


if __name__ == "__main__":
    main(timedelta(seconds=float(sys.argv[1])), Path(sys.argv[2]), sys.argv[3])
