"""For the Trainer of ``lightning`` or ``pytorch_lightning``: a callback, and the checkpoint to resume from."""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.plugins import AsyncCheckpointIO
except ImportError:
    from pytorch_lightning import Callback, LightningModule, Trainer
    from pytorch_lightning.plugins import AsyncCheckpointIO

import torch

import redelastic

from . import checkpoints
from .phases import PHASE_TIMEOUT, CurrentPhase

__all__ = ["ElasticCallback", "last_checkpoint"]

_offered: Path | None = None  # what last_checkpoint() has found


class ElasticCallback(Callback):
    """Reports each batch to the agent, and saves on all ranks when a node drains.

    Each batch of training, and of its validation, costs an ``all_reduce`` of one number, in which the ranks agree on
    whether to save, and on a GPU a wait for its result. It saves the ``ModelCheckpoint``'s ``last.ckpt``, and waits
    until it is written, also where ``AsyncCheckpointIO`` writes it in the background. Validation, testing, prediction,
    saves and what follows the training may take longer than ``--hang-timeout``: up to ``timeout`` between two reports.
    Give the Trainer ``max_steps``: how many steps an epoch has depends on the world size. ::

        checkpoint = ModelCheckpoint(folder, every_n_train_steps=100, save_last=True)  # on storage that all nodes share
        trainer = Trainer(
            strategy="ddp",
            num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
            devices=int(os.environ["LOCAL_WORLD_SIZE"]),
            max_steps=10_000,
            callbacks=[checkpoint, ElasticCallback()],
        )
        trainer.fit(model, data, ckpt_path=last_checkpoint(folder))

    Args:
        timeout: in place of ``--hang-timeout`` in all that is not a training step, in seconds.
    """

    def __init__(self, timeout: float = PHASE_TIMEOUT) -> None:
        super().__init__()
        self._phase = CurrentPhase(timeout)
        self._has_saved = False  # since the last batch
        self._common_batches = 0.0  # of this validation: how many all ranks have, so that all can agree on a save

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a trainer whose restarted workers would start over.

        Raises:
            ValueError: its ``ModelCheckpoint`` is missing, or does not keep the last checkpoint in a folder of its own.
        """
        if stage == "fit":
            self._path(trainer)
            if _offered is not None:
                checkpoints.begin_loading(_offered)

    def on_fit_start(self, *_: Any) -> None:
        """Remember what SIGTERM does before Lightning installs its handler."""
        self._on_sigterm = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL

    def on_sanity_check_start(self, *_: Any) -> None:
        """Note that the checkpoint could be loaded."""
        checkpoints.end_loading()

    def on_train_start(self, *_: Any) -> None:
        """Have SIGTERM end the worker at once: Lightning's handler waits for peers, which may be gone."""
        checkpoints.end_loading()
        if threading.current_thread() is threading.main_thread():  # as Lightning does
            signal.signal(signal.SIGTERM, self._on_sigterm)

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Begin a training step, for which ``--hang-timeout`` counts."""
        self._phase.leave()
        if self._has_saved:
            self._has_saved = False
            if not any(_asynchronous_writers(trainer)):
                redelastic.begin_save().complete()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Save if any rank was asked to, and report the step."""
        self._save_if_asked(trainer)
        redelastic.progress(trainer.global_step)

    def on_save_checkpoint(self, *_: Any) -> None:
        """Begin to save, on behalf of any callback."""
        self._has_saved = True
        self._phase.enter("save")

    def on_validation_start(self, trainer: Trainer, *_: Any) -> None:
        """Count the batches that all ranks have: only for these can they agree on a save."""
        self._phase.enter("validation")
        self._common_batches = 0.0
        if self._is_training(trainer):
            own = float(sum(trainer.num_val_batches))
            batches = torch.tensor(own if math.isfinite(own) else 0.0, device=trainer.strategy.root_device)
            self._common_batches = float(trainer.strategy.reduce(batches, reduce_op="min"))

    def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Save if any rank was asked to, and report that validation is running."""
        if not self._is_training(trainer):
            self._report_without_saving(trainer)
            return
        if self._common_batches > 0:
            self._common_batches -= 1
            self._save_if_asked(trainer)
        redelastic.progress(trainer.global_step)

    def on_test_start(self, *_: Any) -> None:
        """Begin to test."""
        self._phase.enter("test")

    def on_predict_start(self, *_: Any) -> None:
        """Begin to predict."""
        self._phase.enter("prediction")

    def _report_without_saving(self, trainer: Trainer, *_: Any) -> None:
        """Report that the worker is alive; outside training there is nothing to save."""
        redelastic.should_checkpoint()  # the report that follows answers a request
        redelastic.progress(trainer.global_step)

    on_test_batch_end = on_predict_batch_end = _report_without_saving

    def on_fit_end(self, *_: Any) -> None:
        """Begin what follows the training, such as an export."""
        self._phase.enter("after the training")

    def _save_if_asked(self, trainer: Trainer) -> None:
        wanted = redelastic.should_checkpoint()
        if trainer.strategy.reduce_boolean_decision(wanted, all=False):  # one may see it before the others
            trainer.save_checkpoint(self._path(trainer))
            for writer in _asynchronous_writers(trainer):
                writer.teardown()  # waits for its thread, and raises if it has failed; the next save starts another
            trainer.strategy.barrier("redelastic")  # the other ranks wait here, where `timeout` counts

    @staticmethod
    def _is_training(trainer: Trainer) -> bool:
        return bool(trainer.state.fn == "fit" and not trainer.sanity_checking)

    def _path(self, trainer: Trainer) -> str:
        for callback in trainer.checkpoint_callbacks:
            if getattr(callback, "save_last", None) and getattr(callback, "dirpath", None):
                name = callback.CHECKPOINT_NAME_LAST + callback.FILE_EXTENSION
                return str(os.path.join(callback.dirpath, name))  # noqa: PTH118  # a URL stays one
        raise ValueError(
            "ElasticCallback needs a ModelCheckpoint with dirpath and save_last=True, or restarted workers start over: "
            "callbacks=[ModelCheckpoint(folder, save_last=True), ElasticCallback()]."
        )


def _asynchronous_writers(trainer: Trainer) -> Iterator[AsyncCheckpointIO]:
    io: Any = trainer.strategy.checkpoint_io
    while io is not None:
        if isinstance(io, AsyncCheckpointIO):
            yield io
        io = getattr(io, "checkpoint_io", None)


def last_checkpoint(folder: str | Path) -> str | None:
    """Find the newest complete checkpoint that can be loaded.

    A node that dies while saving may leave part of one: Lightning writes a file to the host's temporary folder and
    moves it into place, which to another file system, such as one that all nodes share, means copying it.
    ``ckpt_path="last"`` would take a partial copy, and no worker could resume. In an object store a file appears only
    when it is whole, so ``"last"`` is safe there. Checkpoints of FSDP and DeepSpeed are folders; each of their files
    is looked at. One whose loading has raised in this run is passed over; :class:`ElasticCallback` notes that beside
    it, in ``.redelastic-failed.json``.

    Args:
        folder: the ``dirpath`` of the ``ModelCheckpoint``, in a file system.

    Returns:
        The path for ``ckpt_path``; None if there is none yet.

    Raises:
        CheckpointError: there are checkpoints, but none of them can be loaded.
    """
    global _offered  # noqa: PLW0603  # the Trainer does not say which one it is about to load
    folder = folder if isinstance(folder, Path) else Path(folder)
    found = sorted(folder.glob("*.ckpt"), key=_time, reverse=True)
    path = checkpoints.newest_complete(folder, found)
    _offered = None if path is None else Path(path)
    return path


def _time(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:  # a link to a file that is missing; or another node has just removed it
        return 0
