"""For the Trainer of Hugging Face's ``transformers``: a callback, and the checkpoint to resume from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

import redelastic

__all__ = ["ElasticCallback", "last_checkpoint"]


class ElasticCallback(TrainerCallback):
    """Reports each step to the agent, and saves on all ranks when a node drains.

    Each step costs an ``all_reduce`` of one number, in which the ranks agree on whether to save, and on a GPU a wait
    for its result. Give the Trainer ``max_steps``: how many steps an epoch has depends on the world size. ::

        trainer = Trainer(model, args, train_dataset=data, callbacks=[ElasticCallback()])
        trainer.train(resume_from_checkpoint=last_checkpoint(args.output_dir))
    """

    def __init__(self) -> None:
        self._saving = False  # whether a checkpoint is due: the next progress() will report it as saved

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Agree with the other ranks on whether to save now, and report the step if not."""
        wanted = torch.tensor(int(redelastic.should_checkpoint()), device=args.device)
        if dist.is_initialized():
            dist.all_reduce(wanted, op=dist.ReduceOp.MAX)  # one rank may see a drain a step before the others
        if wanted.item():
            self._saving = control.should_save = True
            control.should_evaluate = False  # the Trainer would evaluate first, and the node may be gone by then
        else:
            redelastic.progress(state.global_step)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Report that the checkpoint is saved."""
        self._saving = False
        redelastic.progress(state.global_step)

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Report that evaluation is running: it is not a hang."""
        if not self._saving:
            redelastic.progress(state.global_step)

    on_substep_end = on_prediction_step  # a part of a step, with gradient accumulation


def last_checkpoint(folder: str | Path) -> str | None:
    """Find the newest complete checkpoint: a node that dies while saving leaves one that cannot be loaded.

    Call it on all ranks, after creating the Trainer: rank 0 decides for all.

    Args:
        folder: the Trainer's ``output_dir``.

    Returns:
        The path for ``resume_from_checkpoint``; None if there is none yet.
    """
    box = [_newest_complete(Path(folder)) if not dist.is_initialized() or dist.get_rank() == 0 else None]
    if dist.is_initialized():
        dist.broadcast_object_list(box)
    return box[0]


def _newest_complete(folder: Path) -> str | None:
    found = [path for path in folder.glob("checkpoint-*") if path.name.rpartition("-")[2].isdigit()]
    for path in sorted(found, key=lambda path: int(path.name.rpartition("-")[2]), reverse=True):
        try:
            json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))  # rank 0 writes it last
        except (OSError, ValueError):
            continue
        return str(path)
    return None
