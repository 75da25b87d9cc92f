"""For the Trainer of Hugging Face's ``transformers``: a callback, and the checkpoint to resume from."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

import redelastic

from . import checkpoints
from .phases import PHASE_TIMEOUT, CurrentPhase

__all__ = ["ElasticCallback", "last_checkpoint"]

INCOMPLETE: Final = "checkpoint-is-incomplete.txt"  # transformers' own mark of a checkpoint that is being written
WEIGHTS: Final = ("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors", "adapter_model.bin")
SHARDS: Final = ("pytorch_model_fsdp_0", "optimizer_0")  # of FSDP: folders of torch.distributed.checkpoint
STATES: Final = (
    "optimizer*.pt",
    "optimizer*.bin",
    "scheduler.pt",
    "scaler.pt",
    "rng_state*.pth",
    "pytorch_model_*.bin",
)

_has_callback = False  # whether a Trainer of this process has an ElasticCallback


class ElasticCallback(TrainerCallback):
    """Reports each step to the agent, and saves on all ranks when a node drains.

    Each step costs an ``all_reduce`` of one number, in which the ranks agree on whether to save, and on a GPU a wait
    for its result; so does each step of an evaluation during the training. Evaluations, predictions, saves and what
    follows the training may take longer than ``--hang-timeout``: up to ``timeout`` between two reports. During an
    evaluation the callback itself writes the checkpoint, without the state of random number generators; with FSDP or
    DeepSpeed the Trainer saves after the evaluation instead. Give the Trainer ``max_steps``: how many steps an epoch
    has depends on the world size. ::

        trainer = Trainer(model, args, train_dataset=data, callbacks=[ElasticCallback()])
        trainer.train(resume_from_checkpoint=last_checkpoint(args.output_dir))

    Args:
        timeout: in place of ``--hang-timeout`` in all that is not a training step, in seconds.
    """

    def __init__(self, timeout: float = PHASE_TIMEOUT) -> None:
        self._phase = CurrentPhase(timeout)
        self._training = False
        self._saving = False  # whether a checkpoint is due: the next progress() will report it as saved
        self._awaits_save = False  # whether any rank saves after this step

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Note that a training will say whether its checkpoint could be loaded."""
        global _has_callback  # noqa: PLW0603
        _has_callback = True

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Note that the checkpoint could be loaded."""
        checkpoints.end_loading()
        self._training, self._saving, self._awaits_save = True, False, False

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Begin what follows the training, such as an export."""
        self._training = False
        self._phase.enter("after the training")

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Begin a training step, for which ``--hang-timeout`` counts; not before all ranks have saved."""
        if self._awaits_save:
            self._awaits_save = False
            _any_rank(args, False)
        self._phase.leave()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Agree with the other ranks on whether to save now, and report the step if not."""
        # One rank may see a drain a step before the others; and only one of them may save.
        wanted, saves = _any_rank(args, redelastic.should_checkpoint(), control.should_save)
        self._awaits_save = wanted or saves
        if wanted:
            self._saving = control.should_save = True
            control.should_evaluate = False  # the Trainer would evaluate first, and the node may be gone by then
        else:
            redelastic.progress(state.global_step)
        self.on_epoch_end(args, state, control)

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Begin an evaluation or a save, if there is to be one."""
        if control.should_evaluate:
            self._phase.enter("evaluation")
        elif control.should_save or self._awaits_save:
            self._phase.enter("save")

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Report that the checkpoint is saved."""
        self._saving = False
        redelastic.begin_save().complete()
        redelastic.progress(state.global_step)

    def on_substep_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Report a part of a step, with gradient accumulation."""
        if not self._saving:
            redelastic.progress(state.global_step)

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **trained: Any
    ) -> None:
        """Save if any rank was asked to, and report that evaluation is running."""
        if self._saving:
            return
        wanted = redelastic.should_checkpoint()
        if self._training and any(_any_rank(args, wanted)):
            if args.fsdp or args.deepspeed:
                self._saving = control.should_save = True  # after the evaluation
                return
            self._phase.enter("save")
            if args.should_save:
                _save(Path(args.output_dir), state, **trained)
            _any_rank(args, False)
            self._phase.enter("evaluation")
        redelastic.progress(state.global_step)  # outside training there is nothing to save


def _any_rank(args: TrainingArguments, *own: bool) -> list[bool]:
    """For each answer, whether any rank gives it; all ranks must ask together, and wait for each other."""
    answers = torch.tensor([int(answer) for answer in own], device=args.device)
    if dist.is_initialized():
        dist.all_reduce(answers, op=dist.ReduceOp.MAX)
    return [bool(answer) for answer in answers.tolist()]


def _save(folder: Path, state: TrainerState, *, model: Any, optimizer: Any, lr_scheduler: Any, **_: Any) -> None:
    """Write what the Trainer writes, under another name until it is complete."""
    checkpoint = folder / f"checkpoint-{state.global_step}"
    if checkpoint.exists():
        if _problem_of(checkpoint) == "":
            return
        shutil.rmtree(checkpoint)
    new = folder / "new"
    shutil.rmtree(new, ignore_errors=True)
    model.save_pretrained(new)
    torch.save(optimizer.state_dict(), new / "optimizer.pt")
    torch.save(lr_scheduler.state_dict(), new / "scheduler.pt")
    state.save_to_json(str(new / "trainer_state.json"))
    new.rename(checkpoint)


def last_checkpoint(folder: str | Path) -> str | None:
    """Find the newest complete checkpoint that can be loaded.

    A node that dies while saving leaves one that cannot be loaded; so may a host that loses its power. Checkpoints of
    FSDP and DeepSpeed are known. One whose loading has raised in this run is passed over, if the Trainer has an
    :class:`ElasticCallback`: ``.redelastic-failed.json`` in the folder notes it.

    Call it on all ranks, after creating the Trainer: rank 0 decides for all.

    Args:
        folder: the Trainer's ``output_dir``.

    Returns:
        The path for ``resume_from_checkpoint``; None if there is none yet.

    Raises:
        CheckpointError: there are checkpoints, but none of them can be loaded.
    """
    box: list[Any] = [None, ""]
    if not dist.is_initialized() or dist.get_rank() == 0:
        folder = folder if isinstance(folder, Path) else Path(folder)
        found = [path for path in folder.glob("checkpoint-*") if path.name.rpartition("-")[2].isdigit()]
        found.sort(key=lambda path: int(path.name.rpartition("-")[2]), reverse=True)
        try:
            box[0] = checkpoints.newest_complete(folder, found, _problem_of)
        except checkpoints.CheckpointError as e:
            box[1] = str(e)
    if dist.is_initialized():
        dist.broadcast_object_list(box)
    path, error = box
    if error:
        raise checkpoints.CheckpointError(error)
    if path is not None and _has_callback:
        checkpoints.begin_loading(Path(path))
    return path if path is None else str(path)


def _problem_of(folder: Path) -> str:
    return next(filter(None, _problems(folder)), "")


def _problems(folder: Path) -> Iterator[str]:
    """What a checkpoint of the Trainer lacks; nothing but "" if it is complete."""
    if (folder / INCOMPLETE).exists():
        yield f"{INCOMPLETE} is there"
    state = folder / "trainer_state.json"  # rank 0 writes it last
    yield "" if state.is_file() and _is_json(state) else f"{state.name} is missing or cut off"
    if (folder / "latest").is_file():
        yield checkpoints.problem_of_deepspeed(folder)
        return
    shards = [folder / name for name in SHARDS if (folder / name).is_dir()]
    yield from map(checkpoints.problem_of_dcp, shards)
    weights = [folder / name for name in WEIGHTS if (folder / name).exists()]
    for index in folder.glob("*.index.json"):
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        weights += [folder / name for name in set(names)]
    if not (weights or shards):
        yield "the weights are missing"
    states = (path for pattern in STATES for path in folder.glob(pattern))
    for path in (*weights, *states):
        yield checkpoints.problem_of_file(path) if path.exists() else f"{path.name} is missing"


def _is_json(path: Path) -> bool:
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return False
    return True
