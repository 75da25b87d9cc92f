"""Hugging Face's Trainer on one node: it evaluates after step 20, and saves after 15, 30 and 40.

Usage: small_transformers.py DIRECTORY. Checkpoints go into DIRECTORY/saved. Files in DIRECTORY steer it:
  finish      without it, each step of an evaluation during the training takes 0.2 s
  slow-tests  each step of the evaluation after the training takes 0.2 s
  slow-save   rank 0 takes 20 s more to save after step 15
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from redelastic.integrations.transformers import ElasticCallback, last_checkpoint

DIRECTORY = Path(sys.argv[1])


def say(name: str, text: object) -> None:
    if os.environ["RANK"] == "0":
        with (DIRECTORY / name).open("a") as file:
            file.write(f"{text}\n")


class SlowEvaluation(TrainerCallback):  # type: ignore[misc]  # transformers may be missing
    def on_train_begin(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        say("resumes", state.global_step)

    def on_prediction_step(self, *_: Any, **__: Any) -> None:
        say("evaluates", "")
        pace = "slow-tests" if (DIRECTORY / "trained").exists() else "finish"
        if (DIRECTORY / pace).exists() == (pace == "slow-tests"):
            time.sleep(0.2)


class SlowSaveTrainer(Trainer):  # type: ignore[misc]
    def save_model(self, *args: Any, **more: Any) -> None:
        if os.environ["RANK"] == "0" and (DIRECTORY / "slow-save").exists() and self.state.global_step == 15:
            time.sleep(20)
        super().save_model(*args, **more)


def main() -> None:
    arguments = TrainingArguments(
        str(DIRECTORY / "saved"),
        max_steps=40,
        save_steps=15,
        eval_strategy="steps",
        eval_steps=20,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=1,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        logging_steps=1000,
    )
    config = GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0)
    one = {"input_ids": torch.zeros(8, dtype=torch.long), "labels": torch.zeros(8, dtype=torch.long)}
    trainer = SlowSaveTrainer(
        GPT2LMHeadModel(config),
        arguments,
        train_dataset=[one] * 400,
        eval_dataset=[one] * 1000,
        callbacks=[SlowEvaluation(), ElasticCallback()],
    )
    found = last_checkpoint(arguments.output_dir)
    trainer.train(resume_from_checkpoint=found)
    say("trained", trainer.state.global_step)
    trainer.evaluate([one] * 40)


if __name__ == "__main__":
    main()
    PartialState().destroy_process_group()  # not in main(): with gloo it can hang while the model exists
