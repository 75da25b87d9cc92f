"""Hugging Face's Trainer on as many nodes as there are. Any node may die or drain; the rest resume.

    redelastic run --rdzv-endpoint=redis.example --rdzv-id=my-job --nnodes=1:4 --nproc-per-node=8 \
        train_transformers.py /shared/my-job

or with ``torchrun --rdzv-backend=redis``. All nodes share the folder.
A tiny GPT-2 learns made-up sequences: replace the model and the data.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import PartialState
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from redelastic.integrations.transformers import ElasticCallback, last_checkpoint


def main() -> None:
    """Train up to a number of steps: how many an epoch has depends on the number of nodes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", help="for checkpoints")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=10)
    options = parser.parse_args()

    arguments = TrainingArguments(
        output_dir=options.folder,
        max_steps=options.steps,
        save_steps=options.save_every,
        save_total_limit=3,
        logging_steps=10,
        per_device_train_batch_size=8,
        use_cpu=not torch.cuda.is_available(),  # else each process would train alone where there is no GPU
        report_to="none",
        disable_tqdm=True,
    )
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    starts = torch.randint(64, (1024, 1), generator=torch.Generator().manual_seed(0))
    sequences = (starts + torch.arange(32)) % 64
    trainer = Trainer(
        GPT2LMHeadModel(config),
        arguments,
        train_dataset=[{"input_ids": one, "labels": one} for one in sequences],
        callbacks=[ElasticCallback()],
    )
    trainer.train(resume_from_checkpoint=last_checkpoint(options.folder))


if __name__ == "__main__":
    main()
    PartialState().destroy_process_group()  # not in main(): with gloo it can hang while the model exists
