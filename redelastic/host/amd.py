"""The GPUs of a host with AMD's driver, as the package ``amdsmi`` shows them, where it is installed."""

from __future__ import annotations

import contextlib
import importlib
import logging
from pathlib import Path
from typing import Any, Final

log = logging.getLogger(__name__)

DRIVER: Final = Path("/dev/kfd")
UNKNOWN: Final = "N/A"  # what amdsmi says of a value that a model does not have


def list_amd_gpus() -> list[AmdGpu]:
    """All of this host's; none without a driver or without ``amdsmi``."""
    if not DRIVER.exists():
        return []
    try:
        smi = importlib.import_module("amdsmi")
        smi.amdsmi_init()  # amdsmi counts these, and the process' exit ends them
        return [AmdGpu(smi, index, handle) for index, handle in enumerate(smi.amdsmi_get_processor_handles())]
    except Exception as e:  # noqa: BLE001 - the import loads AMD's library, which may be missing or of another version
        log.debug("amdsmi cannot be used: %s", e)
        return []


class AmdGpu:
    """One GPU; an error of amdsmi costs the one field that it concerns, since many models lack some.

    Args:
        smi: the module ``amdsmi``, initialised.
        index: in its order.
        handle: of the GPU.
    """

    def __init__(self, smi: Any, index: int, handle: Any) -> None:
        self._smi, self._index, self._handle = smi, index, handle

    def sample(self) -> dict[str, Any]:
        """What it uses now, as :meth:`redelastic.host.telemetry.Telemetry.sample` describes it, without Xids."""
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
