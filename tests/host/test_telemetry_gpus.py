"""What a node reports of its GPUs: with a fake NVML, and with real GPUs where there are any."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import pytest

from redelastic.host.devices import list_devices, open_nvml
from redelastic.host.gpu_usage import XIDS_AT_ONCE, GpuUsage
from redelastic.host.gpus import Gpu, assign
from redelastic.host.telemetry import bounded
from tests.support.fake_nvml import MIB, UUIDS, FakeGpu, FakeMig, FakeNvml, pynvml


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[FakeNvml, GpuUsage]]:
    def install(*gpus: FakeGpu, visible: str | None = None) -> tuple[FakeNvml, GpuUsage]:
        fake = FakeNvml(*gpus)
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        return fake, GpuUsage(assign(1, share=False, environ=environ, ask=list_devices).visible)

    return install


def test_the_gpus_of_the_job_and_no_others_are_reported(watch: Callable[..., tuple[FakeNvml, GpuUsage]]) -> None:
    _, usage = watch(*(FakeGpu(uuid) for uuid in UUIDS), visible="2,0")
    expected = {
        "index": 2,
        "uuid": UUIDS[2],
        "name": "NVIDIA H200",
        "memory_used": 10 * MIB,
        "memory_total": 1000 * MIB,
        "utilization": 42,
        "temperature": 61,
        "ecc": 0,
        "xid": 0,
    }
    sample = usage.sample()
    assert sample == [expected, {**expected, "index": 0, "uuid": UUIDS[0]}]
    assert json.loads(json.dumps(sample)) == sample


@pytest.mark.parametrize(
    ("function", "fields"),
    [
        ("nvmlDeviceGetTotalEccErrors", {"ecc"}),
        ("nvmlDeviceGetTemperature", {"temperature"}),
        ("nvmlDeviceGetUtilizationRates", {"utilization"}),
        ("nvmlDeviceGetMemoryInfo", {"memory_used", "memory_total"}),
        ("nvmlDeviceRegisterEvents", {"xid"}),
        ("nvmlDeviceGetUUID", {"ecc", "temperature", "utilization", "memory_used", "memory_total"}),
    ],
)
@pytest.mark.parametrize("error", ["NVML_ERROR_NOT_SUPPORTED", "NVML_ERROR_UNKNOWN", "no such function"])
def test_an_nvml_error_omits_its_field_only(
    function: str,
    fields: set[str],
    error: str,
    watch: Callable[..., tuple[FakeNvml, GpuUsage]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = set(watch(FakeGpu(UUIDS[0]))[1].sample()[0])
    fake, usage = watch(FakeGpu(UUIDS[0]))
    if error.startswith("NVML"):
        fake.gpus[0].broken[function] = getattr(pynvml, error)
    else:
        monkeypatch.delattr(FakeNvml, function)  # another release of pynvml
    [found] = usage.sample()
    assert set(found) == whole - fields
    assert fake.event_sets == ("xid" in found) or error == "no such function"  # an unused set is freed


def test_xids_are_counted_without_waiting(watch: Callable[..., tuple[FakeNvml, GpuUsage]]) -> None:
    fake, usage = watch(*(FakeGpu(uuid) for uuid in UUIDS[:2]))
    assert [gpu["xid"] for gpu in usage.sample()] == [0, 0]
    fake.gpus[1].xids += [79, 48]
    assert [gpu["xid"] for gpu in usage.sample()] == [0, 2]
    fake.gpus[1].xids += [48] * (XIDS_AT_ONCE + 1)
    assert [gpu["xid"] for gpu in usage.sample()] == [0, XIDS_AT_ONCE + 2]
    assert [gpu["xid"] for gpu in usage.sample()] == [0, XIDS_AT_ONCE + 3]
    assert set(fake.waited) == {0}


@pytest.mark.fault(
    "an application makes its GPU raise Xid errors", "they are reported, and the GPU does not count as broken"
)
def test_xids_of_applications_are_counted_but_are_no_fault_of_the_gpu(
    watch: Callable[..., tuple[FakeNvml, GpuUsage]],
) -> None:
    fake, usage = watch(FakeGpu(UUIDS[0]))
    assert "xids" not in usage.sample()[0]
    fake.gpus[0].xids += [31, 13, 43, 31]
    [gpu] = usage.sample()
    assert (gpu["xid"], gpu["xids"]) == (0, {"13": 1, "31": 2, "43": 1})
    fake.gpus[0].xids += [79]
    [gpu] = usage.sample()
    assert (gpu["xid"], gpu["xids"]["79"]) == (1, 1)


@pytest.mark.fault("a GPU falls off the bus", "it alone is reported as lost")
def test_only_a_lost_gpu_is_reported_as_lost(
    watch: Callable[..., tuple[FakeNvml, GpuUsage]],
) -> None:
    fake, usage = watch(*(FakeGpu(uuid) for uuid in UUIDS))
    before = usage.sample()
    fake.gpus[1].lose()
    assert usage.sample() == [before[0], {"index": 1, "lost": True}, before[2]]
    fake.gpus[1].broken.clear()
    assert usage.sample() == before  # it is back
    fake.gpus[1].broken["nvmlDeviceGetTemperature"] = pynvml.NVML_ERROR_GPU_IS_LOST  # lost during the query
    assert usage.sample()[1] == {"index": 1, "lost": True}


def test_a_gpu_that_was_lost_before_the_start_is_reported_as_lost(
    watch: Callable[..., tuple[FakeNvml, GpuUsage]],
) -> None:
    lost = FakeGpu(UUIDS[0])
    lost.lose()
    _, usage = watch(lost, FakeGpu(UUIDS[1]))
    assert [gpu.get("lost") for gpu in usage.sample()] == [True, None]


def test_a_mig_device_has_memory_and_the_xids_of_its_gpu(watch: Callable[..., tuple[FakeNvml, GpuUsage]]) -> None:
    fake, usage = watch(FakeGpu(UUIDS[0], mig=[FakeMig("MIG-1"), FakeMig("MIG-2")]), visible="MIG-2")
    expected = {"index": 0, "uuid": "MIG-2", "name": "NVIDIA H200", "memory_used": MIB, "memory_total": 100 * MIB}
    assert usage.sample() == [{**expected, "xid": 0}]
    fake.gpus[0].xids.append(79)
    assert usage.sample() == [{**expected, "xid": 1, "xids": {"79": 1}}]


def test_without_a_driver_there_are_no_gpus_in_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    assert GpuUsage(()).sample() == []
    known = [Gpu("0", 0, UUIDS[0])]
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(init_error=pynvml.NVML_ERROR_DRIVER_NOT_LOADED))
    assert GpuUsage(known).sample() == []
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert GpuUsage(known).sample() == []


@pytest.mark.skipif(not open_nvml() or not list_devices().devices, reason="there is no GPU here")
def test_real_gpus() -> None:
    usage = GpuUsage(assign(0, share=False, environ={}).visible)
    for _ in range(2):
        sample = usage.sample()
        for gpu in sample:
            assert gpu["uuid"].startswith(("GPU-", "MIG-"))
            assert 0 <= gpu["memory_used"] <= gpu["memory_total"]
            assert gpu.get("xid", 0) == 0
        assert json.loads(bounded({"gpus": sample})) == {"gpus": sample}
