"""The callbacks of `redelastic.integrations`, with stand-ins for the libraries that `test_trainers.py` uses."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import redelastic


@pytest.fixture
def wanted(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The results of `should_checkpoint`, in turn."""
    answers: list[bool] = []
    monkeypatch.setattr(redelastic, "should_checkpoint", lambda: answers.pop(0), raising=False)
    return answers


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps that were reported to the agent."""
    steps: list[int] = []
    monkeypatch.setattr(redelastic, "progress", steps.append, raising=False)
    return steps


class AsyncCheckpointIO:
    """The part of Lightning's class that the callback uses."""

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def teardown(self) -> None:
        self._calls.append("is written")


class Plugins(ModuleType):
    """Lightning's `plugins`."""

    AsyncCheckpointIO = AsyncCheckpointIO


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    """Imports a module of `redelastic.integrations` with a stand-in for its library: these empty classes."""

    def load(name: str, library: str, *classes: str) -> ModuleType:
        stand_in = ModuleType(library)
        vars(stand_in).update({one: type(one, (), {}) for one in classes})
        monkeypatch.setitem(sys.modules, library.partition(".")[0], stand_in)
        monkeypatch.setitem(sys.modules, library, stand_in)
        plugins = Plugins(f"{library}.plugins")
        monkeypatch.setitem(sys.modules, plugins.__name__, plugins)
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


def test_the_package_imports_no_library() -> None:
    code = "import sys, redelastic.integrations; print({'torch', 'transformers', 'lightning'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "set()\n"


def test_the_trainer_saves_before_it_reports_the_step(
    transformers: ModuleType, wanted: list[bool], reported: list[int]
) -> None:
    callback, args = transformers.ElasticCallback(), SimpleNamespace(device="cpu", fsdp="full_shard", deepspeed=None)
    state, control = SimpleNamespace(global_step=1), SimpleNamespace(should_save=False, should_evaluate=True)
    wanted[:] = [True, False, False, True, True]
    callback.on_prediction_step(args, state, control)
    assert reported == [1], "before the training there is nothing to save"
    reported.clear()
    callback.on_train_begin(args, state, control)
    callback.on_substep_end(args, state, control)
    callback.on_step_end(args, state, control)
    callback.on_prediction_step(args, state, control)
    assert reported == [1, 1, 1]
    assert (control.should_save, control.should_evaluate) == (False, True)

    state.global_step = 2
    callback.on_step_end(args, state, control)
    callback.on_prediction_step(args, state, control)  # as when the script asks for an evaluation
    assert reported == [1, 1, 1], "no report before the save"
    assert (control.should_save, control.should_evaluate) == (True, False), "the drain does not wait for an evaluation"
    callback.on_save(args, state, control)
    assert reported == [1, 1, 1, 2]

    control.should_save = False
    callback.on_prediction_step(args, state, control)
    callback.on_prediction_step(args, state, control)
    assert reported == [1, 1, 1, 2], "with FSDP it saves after the evaluation"
    assert control.should_save
    callback.on_save(args, state, control)
    assert reported == [1, 1, 1, 2, 2]


def whole(folder: Path, *files: str) -> None:
    """Write files as the libraries do."""
    for name in files:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".safetensors":
            header = json.dumps({"w": {"dtype": "F32", "shape": [250], "data_offsets": [0, 1000]}}).encode()
            path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(1000))
        elif path.name.endswith(".index.json"):
            path.write_text(json.dumps({"weight_map": {"w": "model-1.safetensors", "x": "model-2.safetensors"}}))
        elif path.name == "latest":
            path.write_text("global_step9")
        elif path.suffix == ".json":
            path.write_text("{}")
        elif path.name == ".metadata":
            import torch.distributed.checkpoint as dcp  # takes more than a second, in each process of xdist

            with warnings.catch_warnings():  # about saving without a process group
                warnings.simplefilter("ignore")
                dcp.save({"w": torch.zeros(1000)}, checkpoint_id=path.parent, no_dist=True)
        else:
            torch.save({"w": torch.zeros(1000)}, path)


PLAIN = ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json")
SHARDED = ("model.safetensors.index.json", "model-1.safetensors", "model-2.safetensors", "trainer_state.json")
FSDP = ("pytorch_model_fsdp_0/.metadata", "optimizer_0/.metadata", "trainer_state.json")
STATES = ("global_step9/mp_rank_00_model_states.pt", "global_step9/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")
DEEPSPEED = ("latest", *STATES, "trainer_state.json")


MAY_BE_LEFT_OUT = ("optimizer.pt", STATES[1])
PARTS = [
    (PLAIN, "trainer_state.json"),
    (PLAIN, "model.safetensors"),
    (PLAIN, "optimizer.pt"),
    (SHARDED, "model-2.safetensors"),
    (FSDP, "pytorch_model_fsdp_0/__0_0.distcp"),
    (FSDP, "optimizer_0/.metadata"),
    (DEEPSPEED, STATES[0]),
    (DEEPSPEED, STATES[1]),
]


@pytest.mark.parametrize(
    ("files", "part", "damage"),
    [
        (files, part, damage)
        for files, part in PARTS
        for damage in ("cut off", "empty", "missing")
        if damage != "missing" or part not in MAY_BE_LEFT_OUT
    ],
)
def test_an_incomplete_checkpoint_is_skipped(
    transformers: ModuleType, tmp_path: Path, files: tuple[str, ...], part: str, damage: str
) -> None:
    assert transformers.last_checkpoint(tmp_path / "nowhere") is None
    (tmp_path / "checkpoint-best").mkdir()
    assert transformers.last_checkpoint(tmp_path) is None
    for step in (9, 10, 100):
        whole(tmp_path / f"checkpoint-{step}", *files)
    newest, before = tmp_path / "checkpoint-100", tmp_path / "checkpoint-10"
    assert transformers.last_checkpoint(tmp_path) == str(newest)
    path = newest / part
    if damage == "missing":
        path.unlink()
    else:
        os.truncate(path, path.stat().st_size - 1 if damage == "cut off" else 0)
    assert transformers.last_checkpoint(str(tmp_path)) == str(before)
    (before / "checkpoint-is-incomplete.txt").touch()
    assert transformers.last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-9")
    shutil.rmtree(tmp_path / "checkpoint-9")
    with pytest.raises(
        RuntimeError, match=r"^No checkpoint in .* can be loaded\. checkpoint-100: .*To start over, remove"
    ):
        transformers.last_checkpoint(tmp_path)


def test_lightnings_newest_complete_checkpoint_is_found(lightning: ModuleType, tmp_path: Path) -> None:
    assert lightning.last_checkpoint(tmp_path / "nowhere") is None
    names = ("epoch=0-step=10.ckpt", "last.ckpt", "epoch=0-step=20.ckpt", "sharded.ckpt")
    first, second, third, folder = (tmp_path / name for name in names)
    whole(tmp_path, *names[:3], "sharded.ckpt/.metadata", "sharded.ckpt/meta.pt")
    for at, path in enumerate((first, second, third, folder)):
        os.utime(path, (at, at))
    assert lightning.last_checkpoint(tmp_path) == str(folder), "as FSDP leaves it"
    (folder / "meta.pt").unlink()  # the last file to be written
    os.utime(folder, (3, 3))
    assert lightning.last_checkpoint(tmp_path) == str(third)
    os.truncate(third, third.stat().st_size - 1)
    os.utime(third, (2, 2))
    assert lightning.last_checkpoint(str(tmp_path)) == str(second)
    for path in (first, second):
        path.write_bytes(b"")
    with pytest.raises(
        RuntimeError, match=r" last\.ckpt: last\.ckpt is cut off; .* sharded\.ckpt: meta\.pt is missing"
    ):
        lightning.last_checkpoint(tmp_path)


def test_lightnings_deepspeed_folders_and_dangling_links(lightning: ModuleType, tmp_path: Path) -> None:
    whole(tmp_path / "step=5.ckpt", "latest", *STATES)
    (tmp_path / "last.ckpt").symlink_to("step=10.ckpt")
    assert lightning.last_checkpoint(tmp_path) == str(tmp_path / "step=5.ckpt")
    os.truncate(tmp_path / "step=5.ckpt" / STATES[0], 10)
    with pytest.raises(RuntimeError, match=r"last\.ckpt: the file that it links to is missing"):
        lightning.last_checkpoint(tmp_path)


def test_a_checkpoint_that_is_removed_during_the_search_is_skipped(
    lightning: ModuleType, transformers: ModuleType, tmp_path: Path
) -> None:
    class Racing(type(Path())):  # type: ignore[misc]
        def glob(self, pattern: str) -> Iterator[Path]:
            found = list(super().glob(pattern))
            for name in ("2.ckpt", "checkpoint-2"):
                shutil.rmtree(self / name, ignore_errors=True)
            return iter(found)

    whole(tmp_path, "1.ckpt", "2.ckpt/meta.pt", *(f"checkpoint-{n}/{name}" for n in (1, 2) for name in PLAIN))
    assert lightning.last_checkpoint(tmp_path).endswith("/2.ckpt")
    assert transformers.last_checkpoint(tmp_path).endswith("/checkpoint-2")
    assert transformers.last_checkpoint(Racing(tmp_path)).endswith("/checkpoint-1")
    assert lightning.last_checkpoint(tmp_path).endswith("/1.ckpt")
    whole(tmp_path, "2.ckpt/meta.pt")
    assert lightning.last_checkpoint(Racing(tmp_path)).endswith("/1.ckpt")

    whole(tmp_path / "only", *(f"checkpoint-2/{name}" for name in PLAIN))
    assert transformers.last_checkpoint(Racing(tmp_path / "only")) is None, "none is left that could not be loaded"


class Trainer:
    """The part of Lightning's class that the callback uses; another rank may ask it to save."""

    def __init__(self, *checkpoints: Any, others: bool = False) -> None:
        self.checkpoint_callbacks, self.global_step, self.saved = checkpoints, 7, list[str]()
        self.strategy = SimpleNamespace(reduce_boolean_decision=lambda own, **how: not how["all"] and (own or others))
        self.strategy.checkpoint_io = SimpleNamespace(checkpoint_io=AsyncCheckpointIO(self.saved))
        self.strategy.barrier = lambda _: self.saved.append("all have saved")
        self.strategy.root_device, self.num_val_batches = "cpu", [1, 1]
        self.strategy.reduce = lambda value, reduce_op: torch.min(value, torch.tensor(1.0)) if reduce_op == "min" else 0
        self.state, self.sanity_checking = SimpleNamespace(fn="fit"), False
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
    callback = lightning.ElasticCallback()
    saved = ["/last/last.ckpt", "is written", "all have saved"] if own or others else []
    callback.on_train_batch_end(trainer, None, None, None, 0)
    assert trainer.saved == saved
    assert reported == [7]

    callback.on_validation_start(trainer, None)
    wanted[:] = [own]
    for _ in range(2):  # the other rank has one batch only
        callback.on_validation_batch_end(trainer, None, None, None, 0)
    assert trainer.saved == 2 * saved
    assert reported == [7, 7, 7]

    wanted[:] = [own] * 3
    callback.on_test_batch_end(trainer, None, None, None, 0)
    trainer.sanity_checking = True
    callback.on_validation_start(trainer, None)
    callback.on_validation_batch_end(trainer, None, None, None, 0)
    trainer.state.fn, trainer.sanity_checking = "validate", False
    callback.on_validation_batch_end(trainer, None, None, None, 0)
    assert trainer.saved == 2 * saved, "there is nothing to save"
    assert reported == [7] * 6
    assert wanted == [], "each request is read, and answered by the report"


@pytest.mark.parametrize("checkpoints", [(), (keeps("/a", last=None),), (keeps(None, last=True),)])
def test_a_trainer_that_could_not_resume_is_refused(lightning: ModuleType, checkpoints: tuple[Any, ...]) -> None:
    callback, trainer = lightning.ElasticCallback(), Trainer(*checkpoints)
    with pytest.raises(ValueError, match="save_last=True"):
        callback.setup(trainer, None, "fit")
    callback.setup(trainer, None, "test")


def test_the_handler_of_sigterm_is_restored_after_lightnings(lightning: ModuleType) -> None:
    before, callback = signal.getsignal(signal.SIGTERM), lightning.ElasticCallback()
    try:
        callback.on_fit_start(Trainer(), None)
        signal.signal(signal.SIGTERM, lambda *_: None)  # Lightning's
        callback.on_train_start(Trainer(), None)
        assert signal.getsignal(signal.SIGTERM) == before
    finally:
        signal.signal(signal.SIGTERM, before)
