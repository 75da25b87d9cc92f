"""Lightning's Trainer on as many nodes as there are. Any node may die or drain; the rest resume.

    redelastic run --rdzv-endpoint=redis.example --rdzv-id=my-job --nnodes=1:4 --nproc-per-node=8 \
        train_lightning.py /shared/my-job

or with ``torchrun --rdzv-backend=redis``. All nodes share the folder.
A small network learns from made-up numbers: replace the module and the data.
"""

from __future__ import annotations

import argparse
import os

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from redelastic.integrations.lightning import ElasticCallback, last_checkpoint


class Network(lightning.LightningModule):
    """A regression."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        """Return the loss of a batch."""
        inputs, targets = batch
        return torch.nn.functional.mse_loss(self.layers(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    """Train up to a number of steps: how many an epoch has depends on the number of nodes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", help="for checkpoints")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=10)
    options = parser.parse_args()

    inputs = torch.randn(4096, 16, generator=torch.Generator().manual_seed(0))
    data = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=16, shuffle=True)
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
    trainer.fit(Network(), data, ckpt_path=last_checkpoint(options.folder))


if __name__ == "__main__":
    main()
    torch.distributed.destroy_process_group()  # not in main(): with gloo it can hang while the model exists
