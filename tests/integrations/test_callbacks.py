"""The callbacks of `redelastic.integrations` with stand-ins for the libraries; `test_trainers.py` has the real ones."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import redelastic


@pytest.fixture
def wanted(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What `should_checkpoint` answers, in turn."""
    answers: list[bool] = []
    monkeypatch.setattr(redelastic, "should_checkpoint", lambda: answers.pop(0), raising=False)
    return answers


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps that were reported to the agent."""
    steps: list[int] = []
    monkeypatch.setattr(redelastic, "progress", steps.append, raising=False)
    return steps


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    """Imports one of our modules while its library is nothing but these classes."""

    def load(name: str, library: str, *classes: str) -> ModuleType:
        stand_in = ModuleType(library)
        vars(stand_in).update({one: type(one, (), {}) for one in classes})
        monkeypatch.setitem(sys.modules, library.partition(".")[0], stand_in)
        monkeypatch.setitem(sys.modules, library, stand_in)
        monkeypatch.delitem(sys.modules, f"redelastic.integrations.{name}", raising=False)
        loaded = import_module(f"redelastic.integrations.{name}")
        monkeypatch.delitem(sys.modules, loaded.__name__)
        return loaded

    return load


@pytest.fixture
def transformers(module: Callable[..., ModuleType]) -> ModuleType:
    classes = "TrainerCallback", "TrainerControl", "TrainerState", "TrainingArguments"
    return module("transformers", "transformers", *classes)


@pytest.fixture(params=["lightning.pytorch", "pytorch_lightning"])
def lightning(module: Callable[..., ModuleType], request: Any, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)  # not installed
    return module("lightning", request.param, "Callback", "LightningModule", "Trainer")


def test_nothing_is_imported_unasked() -> None:
    code = "import sys, redelastic.integrations; print({'torch', 'transformers', 'lightning'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "set()\n"


def test_the_trainer_saves_before_the_agent_hears_that_it_has(
    transformers: ModuleType, wanted: list[bool], reported: list[int]
) -> None:
    callback, args = transformers.ElasticCallback(), SimpleNamespace(device="cpu")
    state, control = SimpleNamespace(global_step=1), SimpleNamespace(should_save=False, should_evaluate=True)
    wanted[:] = [False, True]
    callback.on_substep_end(args, state, control)
    callback.on_step_end(args, state, control)
    callback.on_prediction_step(args, state, control)
    assert reported == [1, 1, 1]
    assert (control.should_save, control.should_evaluate) == (False, True)

    state.global_step = 2
    callback.on_step_end(args, state, control)
    callback.on_prediction_step(args, state, control)  # as where somebody else asked for an evaluation
    assert reported == [1, 1, 1], "until it is saved"
    assert (control.should_save, control.should_evaluate) == (True, False), "the drain does not wait for an evaluation"
    callback.on_save(args, state, control)
    assert reported == [1, 1, 1, 2]


@pytest.mark.parametrize("state", [None, "", '{"global_step"'], ids=["missing", "empty", "torn"])
def test_a_checkpoint_that_is_not_whole_is_passed_over(
    transformers: ModuleType, tmp_path: Path, state: str | None
) -> None:
    assert transformers.last_checkpoint(tmp_path / "nowhere") is None
    for step in (9, 10, 100):
        (tmp_path / f"checkpoint-{step}").mkdir()
    (tmp_path / "checkpoint-best").mkdir()
    assert transformers.last_checkpoint(tmp_path) is None
    for step in (9, 10):
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
    if state is not None:
        (tmp_path / "checkpoint-100" / "trainer_state.json").write_text(state)
    assert transformers.last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-10")


def test_of_lightnings_checkpoints_the_newest_whole_one_is_found(lightning: ModuleType, tmp_path: Path) -> None:
    assert lightning.last_checkpoint(tmp_path / "nowhere") is None
    names = ("epoch=0-step=10.ckpt", "last.ckpt", "epoch=0-step=20.ckpt", "sharded.ckpt")
    first, second, third, folder = (tmp_path / name for name in names)
    for path in (first, second, third):
        torch.save({"state_dict": {"weight": torch.zeros(1000)}}, path)
    folder.mkdir()
    shutil.copy(first, folder / "meta.pt")
    for at, path in enumerate((first, second, third, folder)):
        os.utime(path, (at, at))
    assert lightning.last_checkpoint(tmp_path) == str(folder), "as FSDP leaves it"
    (folder / "meta.pt").unlink()  # which is written last
    os.utime(folder, (3, 3))
    assert lightning.last_checkpoint(tmp_path) == str(third)
    os.truncate(third, third.stat().st_size - 1)
    os.utime(third, (2, 2))
    assert lightning.last_checkpoint(str(tmp_path)) == str(second)
    for path in (first, second):
        path.write_bytes(b"")
    assert lightning.last_checkpoint(tmp_path) is None


class Trainer:
    """As much of Lightning's as the callback uses; another rank may ask it to save."""

    def __init__(self, *checkpoints: Any, others: bool = False) -> None:
        self.checkpoint_callbacks, self.global_step, self.saved = checkpoints, 7, list[str]()
        self.strategy = SimpleNamespace(reduce_boolean_decision=lambda own, **how: not how["all"] and (own or others))
        self.save_checkpoint = self.saved.append


def keeps(folder: str | None, *, last: bool | str | None) -> Any:
    """A `ModelCheckpoint`."""
    return SimpleNamespace(dirpath=folder, save_last=last, CHECKPOINT_NAME_LAST="last", FILE_EXTENSION=".ckpt")


@pytest.mark.parametrize(("own", "others"), [(False, False), (True, False), (False, True)])
def test_lightning_saves_if_any_rank_was_asked(
    lightning: ModuleType, wanted: list[bool], reported: list[int], own: bool, others: bool
) -> None:
    trainer = Trainer(keeps("/best", last=None), keeps("/last", last="link"), others=others)
    wanted[:] = [own]
    lightning.ElasticCallback().on_train_batch_end(trainer, None, None, None, 0)
    assert trainer.saved == (["/last/last.ckpt"] if own or others else [])
    assert reported == [7]
    lightning.ElasticCallback().on_validation_batch_end(trainer, None, None, None, 0)
    assert reported == [7, 7]


@pytest.mark.parametrize("checkpoints", [(), (keeps("/a", last=None),), (keeps(None, last=True),)])
def test_a_trainer_that_would_begin_anew_is_refused(lightning: ModuleType, checkpoints: tuple[Any, ...]) -> None:
    callback, trainer = lightning.ElasticCallback(), Trainer(*checkpoints)
    with pytest.raises(ValueError, match="save_last=True"):
        callback.setup(trainer, None, "fit")
    callback.setup(trainer, None, "test")


def test_sigterm_is_as_it_was_before_lightning_took_it(lightning: ModuleType) -> None:
    before, callback = signal.getsignal(signal.SIGTERM), lightning.ElasticCallback()
    try:
        callback.on_fit_start(Trainer(), None)
        signal.signal(signal.SIGTERM, lambda *_: None)  # Lightning's
        callback.on_train_start(Trainer(), None)
        assert signal.getsignal(signal.SIGTERM) == before
    finally:
        signal.signal(signal.SIGTERM, before)
