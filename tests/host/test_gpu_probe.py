"""The process that asks the driver: what it finds, and a driver that hangs or ends it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from redelastic.host import gpu_probe
from redelastic.host.devices import DriverError, list_devices, take_inventory
from redelastic.host.gpus import Assignment, assign
from tests.support import fake_nvml
from tests.support.fake_nvml import (
    UUIDS,
    FakeGpu,
    FakeMig,
    FakeNvml,
    Install,
    install_device_nodes,
    install_driver,
)

install = fake_nvml.install
A, B, C = UUIDS
M1 = "MIG-11111111-0000-0000-0000-000000000000"

Driver = Callable[[str], None]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Driver:
    return partial(install_driver, monkeypatch, tmp_path)


@pytest.mark.fault(
    "NVML recommends a reset of a GPU, or a reboot", "the health check `gpu` refuses the node, by its name"
)
@pytest.mark.parametrize(
    ("action", "needed"), [(1, "a reset"), (2, "a reboot of the host"), (4, "an end of its work, then a reset")]
)
def test_the_probe_names_a_gpu_that_needs_a_recovery(
    install: Install, monkeypatch: pytest.MonkeyPatch, action: int, needed: str
) -> None:
    install(FakeGpu(A), FakeGpu(B, recovery=action))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(SystemExit, match=rf"^GPU 1 \({B}\) needs {needed}, says NVML$"):
        gpu_probe.ask_nvml()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    gpu_probe.ask_nvml()


@pytest.mark.parametrize("gpu", [FakeGpu(A), FakeGpu(A, recovery=None), FakeGpu(A, broken={"*": 999})])
def test_a_gpu_without_a_known_recovery_action_is_not_refused(
    install: Install, monkeypatch: pytest.MonkeyPatch, gpu: FakeGpu
) -> None:
    install(gpu)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpu_probe.ask_nvml()


def test_an_older_pynvml_knows_no_recovery(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(FakeGpu(A, recovery=1))
    monkeypatch.delattr(FakeNvml, "nvmlDeviceGetFieldValues")
    gpu_probe.ask_nvml()


@pytest.mark.fault("the GPUs' driver hangs when an agent starts", "the agent ends, and says that it was the driver")
def test_a_driver_that_hangs_is_an_error_after_a_timeout(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver("nvml = FakeNvml(); nvml.nvmlInit = lambda: time.sleep(600)")
    with pytest.raises(DriverError, match=r"driver cannot be queried: .* did not end within 0\.5 s.*nvidia-smi"):
        assign(1, share=False, environ={}, ask=lambda: take_inventory(0.5))
    assert assign(1, share=False, environ={"CUDA_VISIBLE_DEVICES": ""}) == Assignment(), "the driver is not queried"
    install_device_nodes(monkeypatch, "no-such-driver*")
    assert assign(1, share=False, environ={}) == Assignment(), "there is no driver to query"


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("nvml = FakeNvml(); nvml.nvmlInit = os.abort", "was killed by SIGABRT"),
        ("raise ImportError('libnvidia-ml.so: odd')", "exited with 1: ImportError: libnvidia-ml.so: odd"),
    ],
)
def test_a_driver_that_ends_the_query_process_is_an_error(driver: Driver, program: str, error: str) -> None:
    driver(program)
    with pytest.raises(DriverError, match=error):
        take_inventory()


def test_the_query_process_finds_the_same_devices_as_this_process(driver: Driver, install: Install) -> None:
    driver(
        f"nvml = FakeNvml(FakeGpu({A!r}), FakeGpu({B!r}, mig=[FakeMig({M1!r})]), FakeGpu({C!r}, broken={{'*': 999}}))"
    )
    found = take_inventory()
    install(FakeGpu(A), FakeGpu(B, mig=[FakeMig(M1)]), FakeGpu(C, broken={"*": 999}))
    assert found == list_devices()
    assert found.devices
    assert found.devices[1].instances
    assert found.devices[2].fault
