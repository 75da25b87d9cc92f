"""Lightning with the same global batch and data order on any number of nodes; start it as train_batches.py.

All nodes share the folder.
A small network learns from made-up numbers: replace the module and the data.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import TensorDataset

from redelastic.data import ElasticBatches, MicroBatch
from redelastic.integrations.lightning import ElasticCallback, last_checkpoint


class Network(lightning.LightningModule):
    """A regression that steps its optimizer itself: how many micro-batches a step has depends on the world size."""

    def __init__(self, batches: ElasticBatches) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.batches = batches
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
        self.total = 0.0

    def training_step(self, samples: tuple[MicroBatch, list[torch.Tensor]]) -> None:
        """Accumulate a micro-batch's gradient, and end the step with the last one."""
        batch, (inputs, targets) = samples
        loss = torch.nn.functional.mse_loss(self.layers(inputs), targets, reduction="sum") * batch.loss_factor
        self.manual_backward(loss)
        self.total += float(loss.detach())
        if batch.last:
            optimizer = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()
            self.batches.commit()
            loss = self.trainer.strategy.reduce(torch.tensor(self.total), reduce_op="mean")
            self.total = 0.0
            if self.trainer.is_global_zero:
                print(f"loss {float(loss):.6f}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the position in the data."""
        checkpoint["batches"] = self.batches.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore it."""
        self.batches.load_state_dict(checkpoint["batches"])


class Loader:
    """Begins at the committed step whenever Lightning iterates it."""

    def __init__(self, batches: ElasticBatches, steps: int) -> None:
        self._batches = batches
        self._most = steps * batches.global_batch  # a micro-batch has at least one sample

    def __len__(self) -> int:
        return self._most  # without a length, Lightning fetches ahead of the commit

    def __iter__(self) -> Iterator[Any]:
        return self._batches.load()


def main() -> None:
    """Train up to a number of steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", help="for checkpoints")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=10)
    options = parser.parse_args()

    torch.manual_seed(0)
    inputs = torch.randn(4090, 16)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    batches = ElasticBatches(data, global_batch=64, micro_batch=16, epochs=None)
    trainer = lightning.Trainer(
        strategy="ddp",
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),  # of this round
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        max_steps=options.steps,
        callbacks=[
            ModelCheckpoint(options.folder, every_n_train_steps=options.save_every, save_last=True),
            ElasticCallback(),
        ],
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(Network(batches), Loader(batches, options.steps), ckpt_path=last_checkpoint(options.folder))


if __name__ == "__main__":
    main()
    torch.distributed.destroy_process_group()  # not in main(): with gloo it can hang while the model exists
