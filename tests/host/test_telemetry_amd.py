"""What a node reports of AMD's GPUs, with a stand-in for amdsmi whose functions and constants are the package's."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from redelastic.host import gpu_usage
from redelastic.host.gpu_usage import GpuUsage
from redelastic.host.gpus import Gpu

COUNTED = (Gpu("0"), Gpu("1"))  # as the assignment has them where NVML does not list them
CONSTANTS = {
    "AmdSmiMemoryType": "VRAM",
    "AmdSmiTemperatureType": "HOTSPOT",
    "AmdSmiTemperatureMetric": "CURRENT",
}
ANSWERS: dict[str, Any] = {
    "amdsmi_get_gpu_device_uuid": "4eff74a0-0000-1000-8000-000000000000",
    "amdsmi_get_gpu_asic_info": {"market_name": "AMD Instinct MI300X"},
    "amdsmi_get_gpu_memory_usage": 2**30,
    "amdsmi_get_gpu_memory_total": 2**37,
    "amdsmi_get_gpu_activity": {"gfx_activity": 97},
    "amdsmi_get_temp_metric": 61,
    "amdsmi_get_gpu_total_ecc_count": {"uncorrectable_count": 0},
}
WHOLE = {
    "uuid": ANSWERS["amdsmi_get_gpu_device_uuid"],
    "name": "AMD Instinct MI300X",
    "memory_used": 2**30,
    "memory_total": 2**37,
    "utilization": 97,
    "temperature": 61,
    "ecc": 0,
}


class FakeAmdSmi:
    """Stands in for the module ``amdsmi``; ``answers`` has what each function returns, or the error that it raises."""

    class AmdSmiException(Exception):  # noqa: N818 - the package's name
        pass

    def __init__(self, *handles: str, **answers: Any) -> None:
        self._handles, self._answers = handles, ANSWERS | answers

    def amdsmi_init(self) -> None:
        if error := self._answers.get("amdsmi_init"):
            raise error

    def amdsmi_get_processor_handles(self) -> list[str]:
        return list(self._handles)

    def __getattr__(self, name: str) -> Any:
        if name in CONSTANTS:
            return type(name, (), {CONSTANTS[name]: f"{name}.{CONSTANTS[name]}"})
        if name not in self._answers:
            raise AttributeError(name)

        def function(handle: str, *_: str) -> Any:
            assert handle in self._handles
            if isinstance(answer := self._answers[name], Exception):
                raise answer
            return answer

        return function


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with AMD's driver."""
    monkeypatch.setattr(gpu_usage, "AMD_DRIVER", tmp_path / "kfd")
    gpu_usage.AMD_DRIVER.touch()
    return gpu_usage.AMD_DRIVER


def sampled(monkeypatch: pytest.MonkeyPatch, smi: Any, gpus: tuple[Gpu, ...] = COUNTED) -> Any:
    monkeypatch.setitem(sys.modules, "amdsmi", smi)
    return GpuUsage(gpus).sample()


@pytest.mark.usefixtures("driver")
def test_all_of_the_host_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sampled(monkeypatch, FakeAmdSmi("a", "b")) == [{"index": 0} | WHOLE, {"index": 1} | WHOLE]


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("answer", [FakeAmdSmi.AmdSmiException("not supported"), {"gfx_activity": "N/A"}, {}])
def test_what_a_model_does_not_have_costs_its_field_only(answer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {name: value for name, value in WHOLE.items() if name != "utilization"}
    assert sampled(monkeypatch, FakeAmdSmi("a", amdsmi_get_gpu_activity=answer)) == [{"index": 0} | known]


@pytest.mark.usefixtures("driver")
def test_a_library_that_does_not_load_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sampled(monkeypatch, None) == [], "import amdsmi raises"
    assert sampled(monkeypatch, FakeAmdSmi("a", amdsmi_init=ZeroDivisionError())) == []


def test_a_job_without_gpus_and_a_host_without_a_driver_report_none(
    driver: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sampled(monkeypatch, FakeAmdSmi("a"), ()) == []
    driver.unlink()
    assert sampled(monkeypatch, FakeAmdSmi("a")) == []


def test_the_stand_in_is_like_the_package() -> None:
    """The package itself cannot be imported where AMD's library is missing."""
    spec = importlib.util.find_spec("amdsmi")
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).with_name("amdsmi_interface.py").read_text())
    functions = {node.name: len(node.args.args) for node in tree.body if isinstance(node, ast.FunctionDef)}
    enums = {node.name: ast.unparse(node) for node in tree.body if isinstance(node, ast.ClassDef)}
    more = {"amdsmi_get_gpu_memory_usage": 1, "amdsmi_get_gpu_memory_total": 1, "amdsmi_get_temp_metric": 2}
    for name in ANSWERS:
        assert functions[name] == 1 + more.get(name, 0), name
    assert functions["amdsmi_get_processor_handles"] == 0
    for kind, name in CONSTANTS.items():
        assert f" {name} = " in enums[kind]
