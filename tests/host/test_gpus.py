"""Which GPU each worker gets: CUDA's rules, with a fake NVML and with the real one, which may find no driver."""

from __future__ import annotations

import inspect
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from redelastic.agent import AgentOptions, RedisElasticAgent
from redelastic.host import devices, gpu_memory, telemetry
from redelastic.host.devices import Inventory, list_devices, take_inventory
from redelastic.host.gpus import VISIBLE, Assignment, assign, why_hidden
from tests.support import fake_nvml
from tests.support.fake_nvml import (
    FakeGpu,
    FakeMig,
    FakeNvml,
    Install,
    install_driver,
    pynvml,
)
from tests.support.nodes import NodeFactory

A, B, C, D = (f"GPU-{letter * 8}-0000-0000-0000-000000000000" for letter in "abcd")
M1, M2, M3 = (f"MIG-{digit * 8}-0000-0000-0000-000000000000" for digit in "123")

install = fake_nvml.install


@pytest.fixture
def four(install: Install) -> FakeNvml:
    return install(*(FakeGpu(uuid) for uuid in (A, B, C, D)))


def torch_counts(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def ids(assignment: Assignment) -> list[str]:
    return [gpu.id for gpu in assignment.gpus]


def of(
    workers: int, visible: str | None = None, *, share: bool = False, isolate: bool = True, order: str | None = None
) -> Assignment:
    named = {"CUDA_VISIBLE_DEVICES": visible, "CUDA_DEVICE_ORDER": order}
    environ = {name: value for name, value in named.items() if value is not None}
    return assign(workers, share=share, isolate=isolate, environ=environ, ask=list_devices)


def isolated(assignment: Assignment, local_rank: int, **torchs: str) -> dict[str, str]:
    """The environment of a worker, after torch has set a part of it."""
    env = {"LOCAL_RANK": "0", **torchs}
    assignment.isolate_worker(local_rank, env)
    return env


# -- the fake, and the real module


def test_the_fake_and_the_real_module_have_what_the_package_calls() -> None:
    source = "".join(inspect.getsource(module) for module in (devices, gpu_memory, telemetry))
    used = set(re.findall(r"nvml\.((?:nvml|NVML)\w+)", source))
    assert len(used) > 15
    for name in used:
        assert hasattr(pynvml, name), name
        assert hasattr(FakeNvml(), name), name


def test_the_fakes_functions_have_the_real_parameters() -> None:
    functions = {name: f for name, f in vars(FakeNvml).items() if name.startswith("nvml")}
    assert len(functions) > 10
    for name, function in functions.items():
        _, *parameters = inspect.signature(function).parameters
        assert parameters == list(inspect.signature(getattr(pynvml, name)).parameters), name


@pytest.mark.skipif(devices.open_nvml() is not None, reason="there is a driver here")
def test_the_real_module_without_a_driver_finds_no_gpu_and_no_error() -> None:
    with pytest.raises(pynvml.NVMLError):
        pynvml.nvmlInit()
    assert list_devices().devices is None
    assert of(8) == of(8, "0,1") == of(8, A, share=True) == Assignment()


@pytest.mark.skipif(devices.open_nvml() is None, reason="there is no driver here")
def test_the_real_module_with_a_driver_agrees_with_torch() -> None:
    found = take_inventory().devices
    assert found == list_devices().devices
    assert found is not None
    assert all(d.uuid is not None and d.uuid.startswith("GPU-") and d.model for d in found)
    if torch.version.cuda and "CUDA_VISIBLE_DEVICES" not in os.environ and not any(d.instances for d in found):
        assert len(found) == torch.cuda.device_count()


# -- without CUDA_VISIBLE_DEVICES


def test_each_worker_gets_the_gpu_of_its_local_rank(four: FakeNvml) -> None:
    assignment = of(3)
    assert [(gpu.id, gpu.index, gpu.uuid) for gpu in assignment.gpus] == [("0", 0, A), ("1", 1, B), ("2", 2, C)]
    assert [gpu.uuid for gpu in assignment.visible] == [A, B, C, D]
    assert not assignment.isolate
    assert isolated(assignment, 2) == {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "2"}
    assert all(gpu.model == four.gpus[0].name and not gpu.mig for gpu in assignment.gpus)


def test_more_workers_than_gpus_is_refused_and_the_error_says_what_to_do(four: FakeNvml) -> None:
    assert len(of(len(four.gpus)).gpus) == 4
    with pytest.raises(ValueError, match=r"5 workers .* this host has 4 GPUs") as refused:
        of(5)
    assert "--nproc-per-node=4" in str(refused.value)
    assert "--share-gpus" in str(refused.value)
    assert "CUDA_VISIBLE_DEVICES to nothing" in str(refused.value)


@pytest.mark.usefixtures("four")
def test_gpus_are_shared_round_robin_and_in_isolation() -> None:
    assignment = of(6, share=True)
    assert ids(assignment) == ["0", "1", "2", "3", "0", "1"]
    assert assignment.isolate
    assert isolated(assignment, 5) == {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "1"}
    assert not of(4, share=True).isolate  # nothing is shared


def test_a_host_without_gpus_gets_none(install: Install) -> None:
    install()
    assert of(8) == of(8, "0") == Assignment()


def test_more_workers_than_gpus_is_a_warning_where_each_sees_all_gpus(
    four: FakeNvml, caplog: pytest.LogCaptureFixture
) -> None:
    """The job may use no GPU, and torchrun lets it run."""
    assignment = of(5, isolate=False)
    assert (assignment.gpus, assignment.isolate) == ((), False)
    assert len(assignment.visible) == len(four.gpus)
    assert "5 workers were requested, but this host has 4 GPUs" in caplog.text
    assert "--share-gpus" in caplog.text


def test_isolation_keeps_what_torch_sets_for_other_platforms(four: FakeNvml) -> None:
    """From 2.15 on torch's agent sets HIP_VISIBLE_DEVICES too; a worker that heeds both must not see two GPUs."""
    env = isolated(of(len(four.gpus)), 3, CUDA_VISIBLE_DEVICES="0", HIP_VISIBLE_DEVICES="0", OTHER="kept")
    assert env == {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "3", "HIP_VISIBLE_DEVICES": "3", "OTHER": "kept"}


def test_the_agent_isolates_its_workers(new_node: NodeFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install_driver(monkeypatch, tmp_path, f"nvml = FakeNvml(FakeGpu({A!r}), FakeGpu({B!r}))")
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(FakeGpu(A), FakeGpu(B)))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    writes = ("-c", f"echo $LOCAL_RANK $CUDA_VISIBLE_DEVICES > {tmp_path}/$RANK")
    spec = WorkerSpec("test", 3, new_node(1, 1), entrypoint="sh", args=writes, virtual_local_rank=True)
    RedisElasticAgent(spec, DefaultLogsSpecs(str(tmp_path)), options=AgentOptions(share_gpus=True)).run()
    assert [(tmp_path / str(rank)).read_text() for rank in range(3)] == ["0 0\n", "0 1\n", "0 0\n"]


# -- what NVML recommends


# -- memory that is not free yet


# -- CUDA_VISIBLE_DEVICES


def test_a_name_that_occurs_twice_is_no_error_on_a_host_without_gpus() -> None:
    assert assign(2, share=False, environ={VISIBLE: "0,0"}, ask=Inventory) == Assignment()


@pytest.mark.usefixtures("four")
@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("3", [("3", D)]),
        ("2, 0", [("2", C), ("0", A)]),
        ("0,2,-1,1", [("0", A), ("2", C)]),
        ("+1,01", "twice"),
        ("1,-1,1", [("1", B)]),
        ("1,", [("1", B)]),
        ("1,,2", [("1", B)]),
        (f"{C},{A}", [(C, C), (A, A)]),
        ("GPU-bb,GPU-d", [("GPU-bb", B), ("GPU-d", D)]),
        (f"0,{B}", [("0", A)]),  # CUDA takes names of one kind only
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("0,0", "twice"),
        (f"{A},GPU-aaaaaaaa", "twice"),
        ("0,4", [("0", A)]),
        ("0,4,1", [("0", A)]),
        (f"{A},GPU-e,{B}", [(A, A)]),
        ("4,0", "names 4, but the last GPU of this host is 3"),
        ("GPU-e", "names GPU-e, but no GPU's UUID"),
        ("GPU-", "names GPU-, but the UUIDs of 4 GPUs"),
        (M1, "no MIG device"),
    ],
)
def test_visible_devices_as_cuda_reads_them(visible: str, expected: list[tuple[str, str]] | str) -> None:
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            of(1, visible)
        return
    assignment = of(len(expected) or 3, visible)
    assert [(gpu.id, gpu.uuid) for gpu in assignment.gpus] == expected
    assert assignment.visible == assignment.gpus
    if expected:
        with pytest.raises(ValueError, match=rf"{len(expected) + 1} workers .* has {len(expected)} GPUs?\. "):
            of(len(expected) + 1, visible)


@pytest.mark.usefixtures("four")
@pytest.mark.parametrize(
    ("visible", "warned"), [("0,gpu1", True), ("0,9", True), ("none", True), ("0,-1", False), ("", False)]
)
def test_an_unknown_name_of_a_gpu_is_a_warning(visible: str, warned: bool, caplog: pytest.LogCaptureFixture) -> None:
    of(1, visible)
    assert ("CUDA_VISIBLE_DEVICES" in caplog.text) == warned


# -- the order of indices


def test_unequal_gpus_are_not_identified_by_an_index_in_cudas_default_order(install: Install) -> None:
    install(FakeGpu(A, name="NVIDIA T4"), FakeGpu(B, name="NVIDIA H200"))
    assignment = of(1, "1")
    assert [(gpu.id, gpu.index, gpu.uuid) for gpu in assignment.gpus] == [("1", None, None)]
    assert [gpu.uuid for gpu in assignment.visible] == [A, B]  # it is one of them
    assert of(1, "1", order="PCI_BUS_ID").gpus[0].uuid == B
    assert of(1, B).gpus[0].index == 1
    with pytest.raises(ValueError, match="the last GPU of this host is 1"):
        of(1, "2")
    with pytest.raises(ValueError, match="twice"):
        of(1, "1,1")


# -- MIG


@pytest.fixture
def sliced(install: Install) -> FakeNvml:
    """A whole GPU, and one that is split into three MIG devices with a gap between them."""
    migs = [FakeMig(M1, (1, 0)), None, FakeMig(M2, (2, 0)), FakeMig(M3, (2, 1))]
    return install(FakeGpu(A), FakeGpu(B, mig=list(migs)))


@pytest.mark.usefixtures("sliced")
@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (f"{M2},{M1}", [M2, M1]),
        ("MIG-11111111", [M1]),  # CUDA might not know short names of MIG devices: workers get the whole one
        (f"MIG-{B}/2/1,MIG-{B}/1/0", [f"MIG-{B}/2/1", f"MIG-{B}/1/0"]),
        ("1", [M1, M2, M3]),
        (B, [M1, M2, M3]),
        (None, [A, M1, M2, M3]),
        (f"{M1},MIG-{B}/1/0", "twice"),
        (f"MIG-{B}/7/0", "no MIG device"),
        ("MIG-", "3 MIG devices"),
    ],
)
def test_mig_devices(visible: str | None, expected: list[str] | str) -> None:
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            of(1, visible)
        return
    assignment = of(len(expected), visible)
    assert ids(assignment) == expected
    assert assignment.isolate
    assert isolated(assignment, 0)["CUDA_VISIBLE_DEVICES"] == expected[0]
    assert {gpu.index for gpu in assignment.gpus if gpu.mig} == {1}
    assert all(gpu.uuid in (A, M1, M2, M3) for gpu in assignment.visible)
    with pytest.raises(ValueError, match=f"{len(expected) + 1} workers"):
        of(len(expected) + 1, visible)


@pytest.mark.usefixtures("sliced")
def test_a_whole_gpu_beside_mig_devices_needs_no_isolation() -> None:
    assert not of(1, "0").isolate
    assert not of(1, A).isolate


def test_a_gpu_in_mig_mode_without_a_mig_device_cannot_be_used(install: Install) -> None:
    install(FakeGpu(A, mig=[None, None]))
    with pytest.raises(ValueError, match="nvidia-smi mig"):
        of(1)
    with pytest.raises(ValueError, match="nvidia-smi mig"):
        of(1, "0")


# -- GPUs and drivers that fail


def test_a_lost_gpu_is_assigned_to_no_worker_but_watched(four: FakeNvml) -> None:
    four.gpus[1].lose()
    assignment = of(3)
    assert ids(assignment) == [A, C, D]  # by UUID, as indices may have moved
    assert [gpu.index for gpu in assignment.visible] == [0, 1, 2, 3]
    with pytest.raises(ValueError, match=r"has 3 GPUs\. GPU 1 cannot be used: GPU is lost"):
        of(4)
    with pytest.raises(ValueError, match="names 1, but that GPU cannot be used: GPU is lost"):
        of(1, "1", order="PCI_BUS_ID")
    for gpu in four.gpus:
        gpu.lose()
    with pytest.raises(ValueError, match=r"No GPU of this host can be used\. GPU 0 cannot be used: GPU is lost"):
        of(1)


def test_gpus_that_a_scheduler_denies_do_not_count(four: FakeNvml) -> None:
    for gpu in four.gpus[:2]:
        gpu.broken["nvmlDeviceGetHandleByIndex"] = pynvml.NVML_ERROR_NO_PERMISSION
    assert [(gpu.id, gpu.index, gpu.uuid) for gpu in of(2).gpus] == [("0", 2, C), ("1", 3, D)]
    with pytest.raises(ValueError, match="last GPU of this host is 1"):
        of(1, "2")


@pytest.mark.parametrize("error", ["NVML_ERROR_LIBRARY_NOT_FOUND", "NVML_ERROR_DRIVER_NOT_LOADED", None])
def test_without_nvml_torch_counts(error: str | None, install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    if error is None:
        monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed: import raises
    else:
        install(FakeGpu(A), init_error=getattr(pynvml, error))
    torch_counts(monkeypatch, 2)
    assert ids(of(2)) == ["0", "1"]
    assert ids(of(2, "5,7,9")) == ["5", "7"]  # only torch's count is checked
    assert of(2).visible == ()
    assert all(gpu.uuid is None for gpu in of(2).gpus)
    with pytest.raises(ValueError, match=r"3 workers .* 2 GPUs"):
        of(3)
    assert ids(of(3, share=True)) == ["0", "1", "0"]
    torch_counts(monkeypatch, 1)  # torch counts one, however many MIG devices there are
    migs = of(2, f"{M1},{M2}")
    assert ids(migs) == [M1, M2]
    assert migs.isolate
    torch_counts(monkeypatch, 0)
    assert of(3) == of(3, "0") == of(3, M1) == Assignment()
    torch_counts(monkeypatch, 2)
    assert of(3, "") == of(3, "-1,0") == Assignment()


def test_an_nvml_that_cannot_count_is_logged_and_torch_counts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Countless(FakeNvml):
        def nvmlDeviceGetCount(self) -> int:  # noqa: N802
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)

    monkeypatch.setitem(sys.modules, "pynvml", Countless(FakeGpu(A)))
    torch_counts(monkeypatch, 1)
    assert ids(of(1)) == ["0"]
    assert "NVML cannot list" in caplog.text


@pytest.mark.parametrize(
    "function",
    ["nvmlDeviceGetUUID", "nvmlDeviceGetName", "nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetHandleByIndex"],
)
def test_an_nvml_error_names_the_gpu(install: Install, function: str) -> None:
    broken = FakeGpu(B, mig=[FakeMig(M1)], broken={function: pynvml.NVML_ERROR_UNKNOWN})
    install(FakeGpu(A), broken)
    assert ids(of(1)) == [A]
    with pytest.raises(ValueError, match=r"has 1 GPU\. GPU 1 cannot be used: Unknown Error"):
        of(2)


def test_why_the_gpus_of_a_host_are_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "0000:01:00.0").mkdir()
    assert why_hidden(tmp_path) == ""
    monkeypatch.setitem(sys.modules, "pynvml", None)  # as if it were not installed
    assert why_hidden(tmp_path) == "redelastic[gpu] is not installed"
    assert why_hidden(tmp_path / "no-driver") == ""
    assert why_hidden(tmp_path / "0000:01:00.0") == "", "a driver without a GPU"
