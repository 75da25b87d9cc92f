"""NVML without a GPU: pynvml's functions that redelastic calls, on made-up GPUs, with pynvml's constants and errors.

``test_gpus.py`` compares each function with the installed nvidia-ml-py, so that this fake stays like it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NoReturn

import pytest

from redelastic.host import devices

pynvml: Final[Any] = importlib.import_module("pynvml")
MIB: Final = 2**20
UUIDS: Final = [f"GPU-{letter * 8}-0000-0000-0000-000000000000" for letter in "abc"]


@dataclass(eq=False)
class FakeMig:
    """A MIG device: ``place`` is its GPU instance and its compute instance."""

    uuid: str
    place: tuple[int, int] = (1, 0)


@dataclass(eq=False)
class FakeGpu:
    """A GPU; ``broken`` has the error of each function that fails ("*": all), ``xids`` the events not yet fetched."""

    uuid: str
    name: str = "NVIDIA H200"
    used: int = 10 * MIB
    total: int = 1000 * MIB
    utilization: int = 42
    temperature: int = 61
    ecc: int = 0
    recovery: int | None = 0  # the action that NVML recommends; None: not supported
    mig: list[FakeMig | None] | None = None  # None: no MIG mode; a None in the list: an empty place
    users: list[int] = field(default_factory=list)  # pids of the processes that use it
    broken: dict[str, int] = field(default_factory=dict)
    xids: list[int] = field(default_factory=list)

    def lose(self) -> None:
        """Fall off the bus."""
        self.broken["*"] = pynvml.NVML_ERROR_GPU_IS_LOST


class FakeNvml:
    """Stands in for the module ``pynvml``."""

    def __init__(self, *gpus: FakeGpu, init_error: int = 0) -> None:
        self.gpus = gpus
        self.init_error = init_error
        self.waited: list[int] = []  # timeout of each wait for an event, in milliseconds
        self.event_sets = 0  # not yet freed

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("__spec__", "NVML", "nvmlEventType")):  # all but functions
            return getattr(pynvml, name)
        raise AttributeError(name)

    def _fail(self, error: int) -> NoReturn:
        raise pynvml.NVMLError(error)

    def _check(self, device: FakeGpu | FakeMig, function: str, *, mig: bool = False) -> Any:
        if isinstance(device, FakeMig):
            return device if mig else self._fail(pynvml.NVML_ERROR_NOT_SUPPORTED)
        if error := device.broken.get(function) or device.broken.get("*"):
            self._fail(error)
        return device

    def nvmlInit(self) -> None:  # noqa: N802
        if self.init_error:
            self._fail(self.init_error)

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "570.86"

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:  # noqa: N802
        if index >= len(self.gpus):
            self._fail(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return self._check(self.gpus[index], "nvmlDeviceGetHandleByIndex")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any:  # noqa: N802
        for gpu in self.gpus:  # NVML asks one after the other, and fails at one that has fallen off the bus
            self._check(gpu, "nvmlDeviceGetHandleByUUID")
            for device in (gpu, *(gpu.mig or ())):
                if device is not None and device.uuid == uuid:
                    return self._check(device, "nvmlDeviceGetHandleByUUID", mig=True)
        return self._fail(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetUUID(self, handle: Any) -> str:  # noqa: N802
        return str(self._check(handle, "nvmlDeviceGetUUID", mig=True).uuid)

    def nvmlDeviceGetName(self, handle: Any) -> str:  # noqa: N802
        return str(self._check(handle, "nvmlDeviceGetName").name)

    def nvmlDeviceGetMemoryInfo(self, handle: Any, version: Any = None) -> Any:  # noqa: N802
        assert version is None
        device = self._check(handle, "nvmlDeviceGetMemoryInfo", mig=True)
        if isinstance(device, FakeMig):
            return SimpleNamespace(used=MIB, total=100 * MIB)
        return SimpleNamespace(used=device.used, total=device.total)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> list[Any]:  # noqa: N802
        device = self._check(handle, "nvmlDeviceGetComputeRunningProcesses", mig=True)
        return [SimpleNamespace(pid=pid) for pid in getattr(device, "users", ())]

    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Any:  # noqa: N802
        return SimpleNamespace(gpu=self._check(handle, "nvmlDeviceGetUtilizationRates").utilization, memory=7)

    def nvmlDeviceGetTemperature(self, handle: Any, sensor: int) -> int:  # noqa: N802
        assert sensor == pynvml.NVML_TEMPERATURE_GPU
        return int(self._check(handle, "nvmlDeviceGetTemperature").temperature)

    def nvmlDeviceGetTotalEccErrors(self, handle: Any, errorType: int, counterType: int) -> int:  # noqa: N802, N803
        assert (errorType, counterType) == (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
        return int(self._check(handle, "nvmlDeviceGetTotalEccErrors").ecc)

    def nvmlDeviceGetFieldValues(self, handle: Any, fieldIds: list[int]) -> list[Any]:  # noqa: N802, N803
        assert fieldIds == [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION]
        action = self._check(handle, "nvmlDeviceGetFieldValues").recovery
        status = pynvml.NVML_ERROR_NOT_SUPPORTED if action is None else pynvml.NVML_SUCCESS
        return [SimpleNamespace(nvmlReturn=status, value=SimpleNamespace(uiVal=action or 0))]

    def nvmlDeviceGetMigMode(self, device: Any) -> list[int]:  # noqa: N802
        gpu = self._check(device, "nvmlDeviceGetMigMode")
        if gpu.mig is None:
            self._fail(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [pynvml.NVML_DEVICE_MIG_ENABLE] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, device: Any) -> int:  # noqa: N802
        return len(self._check(device, "nvmlDeviceGetMaxMigDeviceCount").mig)

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: Any, index: int) -> Any:  # noqa: N802
        return device.mig[index] or self._fail(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetGpuInstanceId(self, device: Any) -> int:  # noqa: N802
        return int(device.place[0])

    def nvmlDeviceGetComputeInstanceId(self, device: Any) -> int:  # noqa: N802
        return int(device.place[1])

    def nvmlEventSetCreate(self) -> Any:  # noqa: N802
        self.event_sets += 1
        return []

    def nvmlDeviceRegisterEvents(self, handle: Any, eventTypes: int, eventSet: Any) -> None:  # noqa: N802, N803
        assert eventTypes == pynvml.nvmlEventTypeXidCriticalError
        eventSet.append(self._check(handle, "nvmlDeviceRegisterEvents"))

    def nvmlEventSetWait(self, eventSet: Any, timeoutms: int) -> Any:  # noqa: N802, N803
        self.waited.append(timeoutms)
        for gpu in eventSet:
            if gpu.xids:
                return SimpleNamespace(eventType=pynvml.nvmlEventTypeXidCriticalError, eventData=gpu.xids.pop(0))
        return self._fail(pynvml.NVML_ERROR_TIMEOUT)

    def nvmlEventSetFree(self, eventSet: Any) -> None:  # noqa: N802, N803
        eventSet.clear()
        self.event_sets -= 1


def install_device_nodes(monkeypatch: pytest.MonkeyPatch, *patterns: str) -> None:
    """Have redelastic take the files in /dev that match these patterns for those of a GPU driver."""
    monkeypatch.setattr(devices, "DEVICE_NODES", patterns)


def install_driver(monkeypatch: pytest.MonkeyPatch, folder: Path, program: str) -> None:
    """Make this a host with a driver: the process that queries NVML uses ``nvml``, which the code ``program`` sets."""
    script = folder / "program.py"
    script.write_text(
        f"import os, runpy, sys, time\nsys.path.append({str(Path(__file__).parent)!r})\n"
        f"from fake_nvml import FakeGpu, FakeMig, FakeNvml\n{program}\n"
        "sys.modules['pynvml'] = nvml\nrunpy.run_module('redelastic.host.devices', run_name='__main__')\n"
    )
    monkeypatch.setattr(devices, "PROGRAM", (sys.executable, str(script)))
    install_device_nodes(monkeypatch, "nul[l]")


Install = Callable[..., FakeNvml]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Replaces pynvml by a fake."""

    def put(*devices: FakeGpu, init_error: int = 0) -> FakeNvml:
        fake = FakeNvml(*devices, init_error=init_error)
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        return fake

    return put
