"""The GPUs of this host, as the driver shows them.

Also a program, ``python -m redelastic.host.devices``: a driver that hangs also hangs any process that queries it,
often beyond the reach of SIGKILL. So the agent has another process query it, for a limited time.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from .limited import run_within

log = logging.getLogger(__name__)

DEVICE_NODES: Final = ("nvidia[0-9]*", "kfd", "dxg")  # in /dev: where a GPU driver can be reached
PROGRAM: Final = (sys.executable, "-m", "redelastic.host.devices")
RECOVERIES: Final = {  # NVML_GPU_RECOVERY_ACTION_…; 0 is none
    1: "a reset",
    2: "a reboot of the host",
    3: "an end of its peer-to-peer traffic",
    4: "an end of its work, then a reset",
    5: "a recovery of the IMEX domain",
    6: "a reset of its bus",
    7: "a reboot of the system",
}
DRIVER_TIMEOUT: Final = 60.0  # to list its GPUs, in seconds: without persistence mode the driver starts each first


class DriverError(OSError):
    """This host's GPU driver does not answer, or fails."""


@dataclass(frozen=True)
class Instance:
    """A MIG device: a compute instance of a GPU instance."""

    uuid: str
    legacy: str  # its name for drivers before R470: MIG-GPU-<uuid>/<GPU instance>/<compute instance>


@dataclass(frozen=True)
class Device:
    """A GPU of this host, as NVML shows it.

    Attributes:
        index: in NVML's order.
        uuid, model: None if the GPU does not answer.
        instances: its MIG devices.
        fault: why it cannot be used; empty if it can.
        recovery: what it needs before it takes new work, as NVML recommends; empty if nothing.
    """

    index: int
    uuid: str | None = None
    model: str | None = None
    instances: tuple[Instance, ...] = ()
    fault: str = ""
    recovery: str = ""


@dataclass(frozen=True)
class Inventory:
    """The GPUs that this process may use.

    Attributes:
        devices: None if NVML cannot list them.
        counted: how many torch sees, if NVML cannot list them.
        fault: why NVML cannot list them, if there is a driver and it fails.
        driver: version of NVIDIA's driver; empty if NVML cannot say.
    """

    devices: tuple[Device, ...] | None = None
    counted: int = 0
    fault: str = ""
    driver: str = ""


def has_driver() -> bool:
    """Whether this host has a GPU driver."""
    return any(next(Path("/dev").glob(pattern), None) for pattern in DEVICE_NODES)


def take_inventory(limit: float = DRIVER_TIMEOUT) -> Inventory:
    """Have a process ask the driver for its GPUs, for at most ``limit`` seconds.

    Raises:
        DriverError: it did not answer in time, or the process failed.
    """
    if not has_driver():
        return Inventory()
    ended = run_within(limit, PROGRAM)
    if ended.status == 0 and ended.lines:
        fields: dict[str, Any] = json.loads(ended.lines[-1])
        return Inventory(**{**fields, "devices": _decoded(fields["devices"])})
    why = f": {ended.lines[-1]}" if ended.lines else ""
    raise DriverError(
        f"This host's GPU driver cannot be queried: the process that queries it {ended.how}{why}. Check "
        "nvidia-smi and dmesg; often only a reboot helps. For a job without GPUs, set "
        "CUDA_VISIBLE_DEVICES to nothing."
    )


def _decoded(devices: list[dict[str, Any]] | None) -> tuple[Device, ...] | None:
    if devices is None:
        return None
    return tuple(
        Device(**{**one, "instances": tuple(Instance(**each) for each in one["instances"])}) for one in devices
    )


def list_devices() -> Inventory:
    """List the GPUs, querying the driver from this process: there is no time limit."""
    nvml, fault = open_nvml(), ""
    if nvml is not None:
        try:
            count: int = nvml.nvmlDeviceGetCount()
            found = (_device(nvml, index) for index in range(count))
            driver = str(nvml.nvmlSystemGetDriverVersion())
            return Inventory(tuple(device for device in found if device is not None), driver=driver)
        except nvml.NVMLError as e:
            fault = f"NVML cannot list the GPUs of this host: {e}"
    import torch  # noqa: PLC0415 - it takes a second or two, and is only needed where NVML cannot list the GPUs

    return Inventory(None, torch.cuda.device_count(), fault)  # this makes no CUDA context


def open_nvml() -> Any | None:
    """The module ``pynvml``, initialised; None if it is not installed or there is no driver, both of them normal."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()  # NVML counts these, and the process' exit ends them
    except nvml.NVMLError as e:
        log.debug("NVML cannot be used: %s", e)
        return None
    return nvml


def handle_of(nvml: Any, index: int | None, uuid: str | None) -> Any:
    """NVML's handle for a GPU, or for one of its MIG devices.

    The lookup needs the index: by UUID alone NVML asks all GPUs, and fails at one that has fallen off the bus.

    Raises:
        NVMLError: it is gone, or does not answer.
    """
    whole = nvml.nvmlDeviceGetHandleByIndex(index)
    if uuid is None or nvml.nvmlDeviceGetUUID(whole) == uuid:
        return whole
    for mig, found in _mig_devices(nvml, whole):
        if found == uuid:
            return mig
    raise nvml.NVMLError(nvml.NVML_ERROR_NOT_FOUND)


def _device(nvml: Any, index: int) -> Device | None:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        uuid: str = nvml.nvmlDeviceGetUUID(handle)
        model: str = nvml.nvmlDeviceGetName(handle)
        try:
            in_mig_mode = nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE
        except nvml.NVMLError:
            in_mig_mode = False  # a model without MIG
        instances = tuple(_instances(nvml, handle, uuid)) if in_mig_mode else ()
    except nvml.NVMLError as e:
        if e.value == nvml.NVML_ERROR_NO_PERMISSION:
            return None  # a scheduler's cgroup hides it from this job, and CUDA does not count it either
        return Device(index, fault=str(e))
    fault = "it is in MIG mode but has no MIG device (create one with nvidia-smi mig -cgi … -C)"
    fault = fault if in_mig_mode and not instances else ""
    return Device(index, uuid, model, instances, fault, _recovery(nvml, handle))


def _recovery(nvml: Any, handle: Any) -> str:
    try:
        [found] = nvml.nvmlDeviceGetFieldValues(handle, [nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
    except (AttributeError, nvml.NVMLError):
        return ""  # this pynvml, driver or model does not know of it
    action = int(found.value.uiVal) if found.nvmlReturn == nvml.NVML_SUCCESS else 0
    return RECOVERIES.get(action, f"recovery action {action}") if action else ""


def _instances(nvml: Any, handle: Any, uuid: str) -> Iterator[Instance]:
    for mig, found in _mig_devices(nvml, handle):
        with contextlib.suppress(nvml.NVMLError):
            ids = f"{nvml.nvmlDeviceGetGpuInstanceId(mig)}/{nvml.nvmlDeviceGetComputeInstanceId(mig)}"
            yield Instance(found, f"MIG-{uuid}/{ids}")


def _mig_devices(nvml: Any, handle: Any) -> Iterator[tuple[Any, str]]:
    """The handle and the UUID of each MIG device of a GPU."""
    for i in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        with contextlib.suppress(nvml.NVMLError):  # slots may be empty, or another job's
            mig = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, i)
            yield mig, nvml.nvmlDeviceGetUUID(mig)


if __name__ == "__main__":
    print(json.dumps(asdict(list_devices())))  # noqa: T201 - the parent reads it
