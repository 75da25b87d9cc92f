"""The usage of a node's GPUs, for its heartbeat: NVIDIA's by NVML, AMD's by ``amdsmi`` where it is installed."""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from redelastic.monitoring.records import APPLICATION_XIDS

from .devices import handle_of, open_nvml
from .gpus import Gpu

log = logging.getLogger(__name__)

XIDS_AT_ONCE: Final = 100  # the most that one sample reads from a GPU: one that keeps failing must not delay it
AMD_DRIVER: Final = Path("/dev/kfd")
UNKNOWN: Final = "N/A"  # what amdsmi says of a value that a model does not have


class GpuUsage:
    """Samples what a node's GPUs do.

    Use it from one thread, which nothing waits for: NVML has been seen to hang for seconds, and ``sample`` hangs with
    it, without holding a lock.

    Args:
        gpus: to watch: ``Assignment.visible``; if NVML knows none of them, all of the host that AMD's driver shows.
    """

    def __init__(self, gpus: Sequence[Gpu]) -> None:
        self._gpus = gpus
        self._watched: Sequence[_NvidiaGpu | _AmdGpu] | None = None  # None until the first sample: a driver may be slow

    def sample(self) -> list[dict[str, Any]]:
        """Sample what is used now.

        Returns:
            Of each GPU, for JSON: ``{"index", "uuid", "name", "memory_used", "memory_total" (bytes), "utilization"
            (percent), "temperature" (°C), "ecc" (uncorrected errors since the driver was loaded), "xid" (critical
            errors of GPU or driver since the first sample; with MIG, of the whole GPU), "xids" (Xid number as a string
            -> how many, including an application's)}``, without what is unknown; or ``{"index", "lost": true}`` for one
            that has fallen off the bus.
        """
        if self._watched is None:
            self._watched = _watch(self._gpus)
        return [gpu.sample() for gpu in self._watched]


def _watch(gpus: Sequence[Gpu]) -> Sequence[_NvidiaGpu | _AmdGpu]:
    known = [gpu for gpu in gpus if gpu.index is not None]
    nvml = open_nvml() if known else None
    if nvml is not None:
        return [_NvidiaGpu(nvml, gpu) for gpu in known]
    return _list_amd_gpus() if gpus else []


class _NvidiaGpu:
    """One GPU or MIG device; an error of NVML costs the one field that it concerns, since many models lack some.

    Its handle is kept: a lookup can fail because of another GPU.
    """

    def __init__(self, nvml: Any, gpu: Gpu) -> None:
        self._nvml = nvml
        self._gpu = gpu
        self._handle: Any = None
        self._xids: Counter[int] = Counter()
        self._events: Any = None
        self._lost = False
        with self._errors():
            self._events = self._register()

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except self._nvml.NVMLError as e:
            self._lost = self._lost or e.value == self._nvml.NVML_ERROR_GPU_IS_LOST
        except AttributeError:
            pass  # this release of pynvml has no such function

    def _register(self) -> Any:
        """Register an event set for this GPU's Xids only: once a GPU is lost, NVML cannot say whose an event is."""
        nvml = self._nvml
        whole = nvml.nvmlDeviceGetHandleByIndex(self._gpu.index)  # a MIG device has no events
        events = nvml.nvmlEventSetCreate()
        try:
            nvml.nvmlDeviceRegisterEvents(whole, nvml.nvmlEventTypeXidCriticalError, events)
        except nvml.NVMLError:
            nvml.nvmlEventSetFree(events)
            raise
        return events

    def sample(self) -> dict[str, Any]:
        nvml, gpu = self._nvml, self._gpu
        if self._lost:  # to NVML, a GPU that comes back is another one
            self._handle = None
        self._lost = False
        found: dict[str, Any] = {"index": gpu.index}
        found.update({key: value for key, value in (("uuid", gpu.uuid), ("name", gpu.model)) if value is not None})
        with self._errors():
            handle = self._handle = self._handle or handle_of(nvml, gpu.index, gpu.uuid)
            with self._errors():
                memory = nvml.nvmlDeviceGetMemoryInfo(handle)
                found.update(memory_used=memory.used, memory_total=memory.total)
            with self._errors():
                found["utilization"] = nvml.nvmlDeviceGetUtilizationRates(handle).gpu
            with self._errors():
                found["temperature"] = nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
            with self._errors():
                found["ecc"] = nvml.nvmlDeviceGetTotalEccErrors(
                    handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
                )
        if self._events is not None:
            with self._errors():
                for _ in range(XIDS_AT_ONCE):
                    event = nvml.nvmlEventSetWait(self._events, 0)  # raises an error, timeout, if there is none
                    self._xids[int(event.eventData)] += 1
            found["xid"] = sum(n for xid, n in self._xids.items() if xid not in APPLICATION_XIDS)
            if self._xids:
                found["xids"] = {str(xid): n for xid, n in sorted(self._xids.items())}
        return {"index": gpu.index, "lost": True} if self._lost else found


def _list_amd_gpus() -> list[_AmdGpu]:
    """All of this host's; none without a driver or without ``amdsmi``."""
    if not AMD_DRIVER.exists():
        return []
    try:
        smi = importlib.import_module("amdsmi")
        smi.amdsmi_init()  # amdsmi counts these, and the process' exit ends them
        return [_AmdGpu(smi, index, handle) for index, handle in enumerate(smi.amdsmi_get_processor_handles())]
    except Exception as e:  # noqa: BLE001 - the import loads AMD's library, which may be missing or of another version
        log.debug("amdsmi cannot be used: %s", e)
        return []


class _AmdGpu:
    """One GPU; an error of amdsmi costs the one field that it concerns, since many models lack some.

    Args:
        smi: the module ``amdsmi``, initialised.
        index: in its order.
        handle: of the GPU.
    """

    def __init__(self, smi: Any, index: int, handle: Any) -> None:
        self._smi, self._index, self._handle = smi, index, handle

    def sample(self) -> dict[str, Any]:
        """What it uses now, as :meth:`GpuUsage.sample` describes it, without Xids."""
        found = {
            "uuid": self._read("amdsmi_get_gpu_device_uuid"),
            "name": self._read("amdsmi_get_gpu_asic_info", of="market_name"),
            "memory_used": self._read("amdsmi_get_gpu_memory_usage", ("AmdSmiMemoryType", "VRAM")),
            "memory_total": self._read("amdsmi_get_gpu_memory_total", ("AmdSmiMemoryType", "VRAM")),
            "utilization": self._read("amdsmi_get_gpu_activity", of="gfx_activity"),
            "temperature": self._read(
                "amdsmi_get_temp_metric", ("AmdSmiTemperatureType", "HOTSPOT"), ("AmdSmiTemperatureMetric", "CURRENT")
            ),
            "ecc": self._read("amdsmi_get_gpu_total_ecc_count", of="uncorrectable_count"),
        }
        return {"index": self._index} | {name: value for name, value in found.items() if value not in (None, UNKNOWN)}

    def _read(self, function: str, *constants: tuple[str, str], of: str = "") -> Any:
        """What a function returns, or one item of it; None if it fails, or this release has no such function."""
        with contextlib.suppress(self._smi.AmdSmiException, AttributeError, KeyError):
            given = [getattr(getattr(self._smi, kind), name) for kind, name in constants]
            value = getattr(self._smi, function)(self._handle, *given)
            return value[of] if of else value
        return None
