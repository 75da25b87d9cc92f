"""Send a run's events to Weights & Biases: the number of nodes and of failures as curves, and an alert for each fault.

    pip install wandb
    python events_to_wandb.py redis.example:6379 night

It needs no torch, and runs beside the job, anywhere: it ends with the run.
"""

from __future__ import annotations

import sys

import wandb

import redelastic
from redelastic.monitoring.events import is_fault
from redelastic.monitoring.sentences import sentence

with redelastic.Run(*sys.argv[1:3]) as run, wandb.init(project="redelastic", id=run.id, resume="allow") as board:
    failures = 0
    for event in run.follow("0"):
        failures += event.event == "failed"
        if event.event == "completed":
            board.log({"epoch": event.epoch, "nodes": event.size, "failures": failures, "time": event.time})
        if is_fault(event):
            board.alert(f"{run.id}: {event.event}", f"{event.node} {sentence(event)}")
        if event.event in ("closed", "stopped"):
            break
