"""The Trainer with the same global batch and data order on any number of nodes; start it as train_batches.py.

All nodes share the folder.
A small network learns from made-up numbers: replace the model and the data.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import PartialState
from torch.utils.data import TensorDataset
from transformers import Trainer, TrainingArguments

from redelastic.data import ElasticBatches, MicroBatch
from redelastic.integrations.transformers import ElasticCallback, last_checkpoint

Step = list[tuple[MicroBatch, dict[str, torch.Tensor]]]


class ElasticTrainer(Trainer):
    """A Trainer whose batch is all that this rank does for a step: it cuts it into micro-batches itself."""

    def __init__(
        self, model: torch.nn.Module, arguments: TrainingArguments, batches: ElasticBatches, **more: Any
    ) -> None:
        super().__init__(model, arguments, **more)
        self.batches = batches

    def get_train_dataloader(self) -> Iterator[Step]:
        """Yield the micro-batches of each step from the checkpoint's on."""
        self.batches.step = self.state.global_step  # the checkpoint is loaded when the first step is taken
        step: Step = []
        for micro_batch in self.batches.load(collate_fn=collate):
            step.append(micro_batch)
            if micro_batch[0].last:
                yield step
                self.batches.commit()  # the Trainer asks for more: it has stepped its optimizer
                step = []

    def training_step(self, model: torch.nn.Module, inputs: Step, _num_items_in_batch: None = None) -> torch.Tensor:
        """Accumulate the gradient of a step."""
        model.train()
        total = torch.zeros((), device=self.args.device)
        for batch, samples in inputs:
            with batch.sync(model):
                with self.compute_loss_context_manager():
                    mean = self.compute_loss(model, self._prepare_inputs(samples))
                loss = mean * len(batch.indices) * batch.loss_factor
                self.accelerator.backward(loss)
            total += loss.detach()
        self.accelerator.print(f"loss {float(self.accelerator.reduce(total, 'mean')):.6f}")
        return total


class Network(torch.nn.Module):
    """A regression that returns its mean loss, as transformers' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss."""
        return {"loss": torch.nn.functional.mse_loss(self.layers(inputs), labels)}


def collate(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Stack samples, under the names of the model's arguments."""
    inputs, labels = zip(*samples, strict=True)
    return {"inputs": torch.stack(inputs), "labels": torch.stack(labels)}


def main() -> None:
    """Train up to a number of steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", help="for checkpoints")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=10)
    options = parser.parse_args()

    arguments = TrainingArguments(
        output_dir=options.folder,
        max_steps=options.steps,
        save_steps=options.save_every,
        ignore_data_skip=True,  # the batches begin at the checkpoint's step
        lr_scheduler_type="constant",
        max_grad_norm=0,
        use_cpu=not torch.cuda.is_available(),  # else each process would train alone where there is no GPU
        report_to="none",
        disable_tqdm=True,
    )
    torch.manual_seed(0)
    inputs = torch.randn(4090, 16)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    batches = ElasticBatches(data, global_batch=64, micro_batch=16, epochs=None)
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    callbacks = [ElasticCallback()]
    trainer = ElasticTrainer(model, arguments, batches, optimizers=(optimizer, None), callbacks=callbacks)
    trainer.train(resume_from_checkpoint=last_checkpoint(options.folder))


if __name__ == "__main__":
    main()
    PartialState().destroy_process_group()  # not in main(): with gloo it can hang while the model exists
