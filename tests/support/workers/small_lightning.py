"""Lightning's Trainer on one node: it evaluates after step 20, and saves after 15, 30 and 40.

Usage: small_lightning.py DIRECTORY. Checkpoints go into DIRECTORY/saved. Files in DIRECTORY steer it:
  finish      without it, each step of the evaluation takes 0.2 s
  slow-tests  each step of the test takes 0.2 s
  async       each checkpoint takes 2 s in the background, there is no evaluation, and the training does not end
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO
from torch.utils.data import DataLoader, TensorDataset

from redelastic.integrations.lightning import ElasticCallback, last_checkpoint

DIRECTORY = Path(sys.argv[1])
WORKERS = int(os.environ["LOCAL_WORLD_SIZE"])


def say(name: str, text: object) -> None:
    if os.environ["RANK"] == "0":
        with (DIRECTORY / name).open("a") as file:
            file.write(f"{text}\n")


class SlowCheckpointIO(TorchCheckpointIO):  # type: ignore[misc]  # lightning may be missing
    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **more: Any) -> None:
        time.sleep(2)
        super().save_checkpoint(checkpoint, *args, **more)


class Network(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def on_train_start(self) -> None:
        say("resumes", self.global_step)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch[0]).mean()
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        say("steps", self.global_step)
        if (DIRECTORY / "async").exists():
            time.sleep(0.05)

    def validation_step(self, batch: list[torch.Tensor]) -> None:
        del batch
        say("evaluates", "")
        if not (DIRECTORY / "finish").exists():
            time.sleep(0.2)

    def test_step(self, batch: list[torch.Tensor]) -> None:
        del batch
        if (DIRECTORY / "slow-tests").exists():
            time.sleep(0.2)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def data(batches: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(4 * batches, 4)), batch_size=4)


def main() -> None:
    is_async = (DIRECTORY / "async").exists()
    found = last_checkpoint(DIRECTORY / "saved")
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp" if WORKERS > 1 else "auto",
        devices=WORKERS,
        max_steps=-1 if is_async else 40,
        val_check_interval=20,
        limit_val_batches=0 if is_async else 1.0,
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[AsyncCheckpointIO(SlowCheckpointIO())] if is_async else [],
        callbacks=[ModelCheckpoint(DIRECTORY / "saved", every_n_train_steps=15, save_last=True), ElasticCallback()],
    )
    network = Network()
    trainer.fit(network, data(40), data(1000), ckpt_path=found)
    say("trained", trainer.global_step)
    trainer.test(network, data(40))


if __name__ == "__main__":
    main()
    if WORKERS > 1:
        torch.distributed.destroy_process_group()
