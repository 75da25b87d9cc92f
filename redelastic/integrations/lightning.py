"""For the Trainer of ``lightning`` or ``pytorch_lightning``: a callback, and the checkpoint to resume from."""

from __future__ import annotations

import os
import signal
import threading
import zipfile
from pathlib import Path
from typing import Any

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError:
    from pytorch_lightning import Callback, LightningModule, Trainer

import redelastic

__all__ = ["ElasticCallback", "last_checkpoint"]


class ElasticCallback(Callback):
    """Reports each batch to the agent, and saves on all ranks when a node drains.

    Each batch costs an ``all_reduce`` of one number, in which the ranks agree on whether to save, and on a GPU a wait
    for its result. It saves the ``ModelCheckpoint``'s ``last.ckpt``. Give the Trainer ``max_steps``: how many steps an
    epoch has depends on the world size. ::

        checkpoint = ModelCheckpoint(folder, every_n_train_steps=100, save_last=True)  # on storage that all nodes share
        trainer = Trainer(
            strategy="ddp",
            num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
            devices=int(os.environ["LOCAL_WORLD_SIZE"]),
            max_steps=10_000,
            callbacks=[checkpoint, ElasticCallback()],
        )
        trainer.fit(model, data, ckpt_path=last_checkpoint(folder))
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a trainer whose restarted workers would start over.

        Raises:
            ValueError: its ``ModelCheckpoint`` is missing, or does not keep the last checkpoint in a folder of its own.
        """
        if stage == "fit":
            self._path(trainer)

    def on_fit_start(self, *_: Any) -> None:
        """Remember what SIGTERM does before Lightning installs its handler."""
        self._on_sigterm = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL

    def on_train_start(self, *_: Any) -> None:
        """Have SIGTERM end the worker at once: Lightning's handler waits for peers, which may be gone."""
        if threading.current_thread() is threading.main_thread():  # as Lightning does
            signal.signal(signal.SIGTERM, self._on_sigterm)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Save if any rank was asked to, and report the step."""
        wanted = redelastic.should_checkpoint()
        if trainer.strategy.reduce_boolean_decision(wanted, all=False):  # one may see it before the others
            trainer.save_checkpoint(self._path(trainer))
        redelastic.progress(trainer.global_step)

    def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Report that validation is running: it is not a hang."""
        redelastic.progress(trainer.global_step)

    def _path(self, trainer: Trainer) -> str:
        for callback in trainer.checkpoint_callbacks:
            if getattr(callback, "save_last", None) and getattr(callback, "dirpath", None):
                name = callback.CHECKPOINT_NAME_LAST + callback.FILE_EXTENSION
                return str(os.path.join(callback.dirpath, name))  # noqa: PTH118  # a URL stays one
        raise ValueError(
            "ElasticCallback needs a ModelCheckpoint with dirpath and save_last=True, or restarted workers start over: "
            "callbacks=[ModelCheckpoint(folder, save_last=True), ElasticCallback()]."
        )


def last_checkpoint(folder: str | Path) -> str | None:
    """Find the newest whole checkpoint: a node that dies while saving may leave part of one.

    Lightning writes a file to the host's temporary folder and moves it into place, which to another file system, such
    as one that all nodes share, means copying it. ``ckpt_path="last"`` would take a partial copy, and no worker could
    resume. In an object store a file appears only when it is whole, so ``"last"`` is safe there.

    Args:
        folder: the ``dirpath`` of the ``ModelCheckpoint``, in a file system.

    Returns:
        The path for ``ckpt_path``; None if there is none yet.
    """
    found = [(path.stat().st_mtime_ns, path) for path in Path(folder).glob("*.ckpt")]
    return next((str(path) for _, path in sorted(found, reverse=True) if _is_whole(path)), None)


def _is_whole(path: Path) -> bool:
    last_part = path / "meta.pt" if path.is_dir() else path  # FSDP: each rank writes its part, and this comes last
    return zipfile.is_zipfile(last_part)  # torch.save's format ends with its table of contents
