"""What a node uses: real process trees that burn and allocate known amounts, and the GPUs of a fake NVML."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
from fake_nvml import MIB, FakeGpu, FakeMig, FakeNvml, pynvml

from redelastic.agent.host.devices import list_devices, open_nvml
from redelastic.agent.host.gpus import Gpu, assign
from redelastic.agent.host.telemetry import XIDS_AT_ONCE, Telemetry, bounded

PUPPET = """
import mmap, os, signal, subprocess, sys, time

def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        sum(range(10_000))

def child(run, then="time.sleep(600)"):
    # a child that does what run() does, says so, and then does `then`
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            run()
            os.write(write, b"x")
            exec(then, globals())
        finally:
            os._exit(0)
    os.close(write)
    os.read(read, 1)
    return pid

for line in sys.stdin:
    exec(line)
    print("done", flush=True)
"""
TICKS = 0.06  # what is lost to ticks of 10 ms in a few processes, in seconds
OVERHEAD = 0.4  # what a puppet may use beside what it is told to burn, in seconds


class Clock:
    """A clock that goes only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Puppet:
    """A worker's process that does as it is told."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PUPPET], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def do(self, line: str) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    @property
    def tree(self) -> list[psutil.Process]:
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]

    def end(self) -> None:
        tree = self.tree if self.process.poll() is None else []
        for process in tree:
            process.kill()
        with self.process:  # closes its pipes, and reaps it
            self.process.kill()
        deadline = time.monotonic() + 30
        while any(map(lives, tree)):  # SIGKILL takes effect a little later
            assert time.monotonic() < deadline, tree
            time.sleep(0.005)


def lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE  # init may be slow to reap, or never do
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def start() -> Iterator[Callable[[], Puppet]]:
    puppets: list[Puppet] = []

    def begin() -> Puppet:
        puppets.append(Puppet())
        puppets[-1].do("pass")
        return puppets[-1]

    yield begin
    for puppet in puppets:
        puppet.end()


class Meter:
    """CPU seconds that a telemetry reports; ten seconds pass on its clock between two samples."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.telemetry = Telemetry(clock=self.clock)

    def read(self, **puppets: list[psutil.Process]) -> dict[str, float]:
        self.clock.now += 10
        trees = {int(name[1:]): tree for name, tree in puppets.items()}
        sample = self.telemetry.sample(trees)
        json.dumps(sample)
        workers = {f"w{rank}": worker["cpu"] / 10 for rank, worker in sample["workers"].items() if "cpu" in worker}
        if workers:
            assert sample["cpu"] / 10 == pytest.approx(sum(workers.values()), abs=0.02)
        return workers


# -- CPU


def test_the_first_sample_has_no_cpu_and_the_next_has_what_was_burned_since(start: Callable[[], Puppet]) -> None:
    meter, puppet, idle = Meter(), start(), start()
    puppet.do("burn(0.5)")  # before the first sample: not to be counted
    assert meter.read(w0=puppet.tree, w1=idle.tree) == {}
    puppet.do("burn(1)")
    used = meter.read(w0=puppet.tree, w1=idle.tree)
    assert 1 - TICKS <= used["w0"] <= 1 + OVERHEAD
    assert used["w1"] <= TICKS
    assert meter.read(w0=puppet.tree, w1=idle.tree)["w0"] <= TICKS


def test_children_that_no_sample_saw_are_counted(start: Callable[[], Puppet]) -> None:
    meter, puppet = Meter(), start()
    meter.read(w0=puppet.tree)
    puppet.do("[os.waitpid(child(lambda: burn(0.3), then=''), 0) for _ in range(3)]")
    assert len(puppet.tree) == 1
    assert 0.9 - TICKS <= meter.read(w0=puppet.tree)["w0"] <= 0.9 + OVERHEAD


def test_a_child_is_counted_once_though_its_parent_inherits_its_times(start: Callable[[], Puppet]) -> None:
    meter, puppet = Meter(), start()
    meter.read(w0=puppet.tree)
    puppet.do("pid = child(lambda: burn(1), then='signal.pause()')")
    assert len(puppet.tree) == 2
    assert 1 - TICKS <= meter.read(w0=puppet.tree)["w0"] <= 1 + OVERHEAD
    puppet.do("os.kill(pid, signal.SIGKILL); os.waitpid(pid, 0)")
    inherited = puppet.tree[0].cpu_times()
    assert inherited.children_user + inherited.children_system >= 1 - TICKS
    assert meter.read(w0=puppet.tree)["w0"] <= TICKS


def test_a_child_that_is_reaped_outside_the_tree_takes_nothing_from_the_others(start: Callable[[], Puppet]) -> None:
    meter, puppet = Meter(), start()
    puppet.do("child(lambda: child(lambda: burn(1)))")
    meter.read(w0=puppet.tree)
    root, child, grandchild = puppet.tree
    child.kill()  # a zombie, as its parent does not ask for it; the grandchild is init's now, and in no tree of ours
    grandchild.kill()
    puppet.do("burn(0.5)")
    assert 0.5 - TICKS <= meter.read(w0=[root, child])["w0"] <= 0.5 + OVERHEAD


def test_a_restarted_worker_is_counted_from_its_start(start: Callable[[], Puppet]) -> None:
    meter, first = Meter(), start()
    first.do("burn(1)")
    meter.read(w0=first.tree)
    first.end()
    second = start()
    second.do("[os.waitpid(child(lambda: burn(0.5), then=''), 0)]")
    used = meter.read(w0=second.tree)["w0"]
    assert 0.5 - TICKS <= used <= 0.5 + OVERHEAD


def test_no_more_is_reported_than_the_machine_has(start: Callable[[], Puppet]) -> None:
    meter, puppet = Meter(), start()
    meter.read(w0=puppet.tree)
    puppet.do("burn(0.5)")
    meter.clock.now += 1e-6
    sample = meter.telemetry.sample({0: puppet.tree})
    assert sample["cpu"] == sample["workers"]["0"]["cpu"] == 100 * (psutil.cpu_count() or 0)
    assert "cpu" not in meter.telemetry.sample({0: puppet.tree})  # no time has passed


# -- memory


def test_memory_of_a_grandchild_is_seen(start: Callable[[], Puppet]) -> None:
    telemetry, puppet, other = Telemetry(), start(), start()
    before = telemetry.sample({0: puppet.tree, 3: other.tree})
    puppet.do("""child(lambda: child(lambda: globals().update(kept=b"x" * 100_000_000)))""")
    assert len(puppet.tree) == 3
    after = telemetry.sample({0: puppet.tree, 3: other.tree})
    growth = after["workers"]["0"]["memory"] - before["workers"]["0"]["memory"]
    assert 100_000_000 <= growth <= 160_000_000
    assert abs(after["workers"]["3"]["memory"] - before["workers"]["3"]["memory"]) < 10_000_000
    assert after["memory"] == sum(worker["memory"] for worker in after["workers"].values())
    assert after["memory"] < after["memory_total"] == psutil.virtual_memory().total
    assert 0 < after["memory_available"] < after["memory_total"]


def test_memory_that_processes_share_is_counted_once(start: Callable[[], Puppet]) -> None:
    telemetry, puppet = Telemetry(), start()
    before = telemetry.sample({0: puppet.tree})["memory"]
    puppet.do("shared = mmap.mmap(-1, 100_000_000); shared.write(b'x' * 100_000_000)")
    puppet.do("for _ in range(3): child(lambda: shared[:])")
    assert sum(process.memory_info().rss for process in puppet.tree) > 400_000_000
    growth = telemetry.sample({0: puppet.tree})["memory"] - before
    assert 100_000_000 <= growth <= 180_000_000


# -- races


class Hidden(psutil.Process):
    def memory_info(self) -> Any:
        raise psutil.AccessDenied(self.pid)


class Unreadable(psutil.Process):
    def cpu_times(self) -> Any:
        raise ValueError("the file ended early")


def test_processes_that_vanish_or_hide_or_are_zombies_are_left_out(start: Callable[[], Puppet]) -> None:
    telemetry, puppet, gone = Telemetry(), start(), start()
    tree, dead = puppet.tree, gone.tree
    gone.end()
    with pytest.raises(psutil.NoSuchProcess):
        dead[0].cpu_times()
    puppet.do(
        "pid = child(lambda: None); os.kill(pid, signal.SIGKILL); os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)"
    )
    zombie = puppet.tree[1]
    assert zombie.status() == psutil.STATUS_ZOMBIE
    pid = puppet.process.pid
    for _ in range(2):
        sample = telemetry.sample({0: [*tree, zombie, Hidden(pid), Unreadable(pid), *dead], 1: dead, 2: []})
        alone = Telemetry().sample({0: tree})["memory"]
        assert sample["workers"]["0"]["memory"] == pytest.approx(alone, rel=0.1)
        assert sample["workers"]["1"]["memory"] == sample["workers"]["2"]["memory"] == 0
    assert sample["workers"]["1"]["cpu"] == 0


def test_a_tree_that_dies_between_its_listing_and_its_reading(start: Callable[[], Puppet]) -> None:
    telemetry, puppet = Telemetry(), start()
    puppet.do("for _ in range(3): child(lambda: None)")
    tree = puppet.tree
    assert telemetry.sample({0: tree})["memory"] > 0
    puppet.end()
    assert telemetry.sample({0: tree})["memory"] == 0


# -- GPUs


UUIDS = [f"GPU-{letter * 8}-0000-0000-0000-000000000000" for letter in "abc"]


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[FakeNvml, Telemetry]]:
    def install(*gpus: FakeGpu, visible: str | None = None) -> tuple[FakeNvml, Telemetry]:
        fake = FakeNvml(*gpus)
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        return fake, Telemetry(assign(1, share=False, environ=environ, ask=list_devices).visible)

    return install


def test_the_gpus_of_the_job_and_no_others_are_reported(watch: Callable[..., tuple[FakeNvml, Telemetry]]) -> None:
    _, telemetry = watch(*(FakeGpu(uuid) for uuid in UUIDS), visible="2,0")
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
    sample = telemetry.sample({})
    assert sample["gpus"] == [expected, {**expected, "index": 0, "uuid": UUIDS[0]}]
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
def test_an_error_costs_its_field_only(
    function: str,
    fields: set[str],
    error: str,
    watch: Callable[..., tuple[FakeNvml, Telemetry]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = set(watch(FakeGpu(UUIDS[0]))[1].sample({})["gpus"][0])
    fake, telemetry = watch(FakeGpu(UUIDS[0]))
    if error.startswith("NVML"):
        fake.gpus[0].broken[function] = getattr(pynvml, error)
    else:
        monkeypatch.delattr(FakeNvml, function)  # another release of pynvml
    [found] = telemetry.sample({})["gpus"]
    assert set(found) == whole - fields
    assert fake.event_sets == ("xid" in found) or error == "no such function"  # a set without use is freed


def test_xids_are_counted_without_waiting(watch: Callable[..., tuple[FakeNvml, Telemetry]]) -> None:
    fake, telemetry = watch(*(FakeGpu(uuid) for uuid in UUIDS[:2]))
    assert [gpu["xid"] for gpu in telemetry.sample({})["gpus"]] == [0, 0]
    fake.gpus[1].xids += [79, 48]
    assert [gpu["xid"] for gpu in telemetry.sample({})["gpus"]] == [0, 2]
    fake.gpus[1].xids += [48] * (XIDS_AT_ONCE + 1)
    assert [gpu["xid"] for gpu in telemetry.sample({})["gpus"]] == [0, XIDS_AT_ONCE + 2]
    assert [gpu["xid"] for gpu in telemetry.sample({})["gpus"]] == [0, XIDS_AT_ONCE + 3]
    assert set(fake.waited) == {0}


@pytest.mark.fault(
    "an application makes its GPU raise Xid errors", "they are told, and the GPU does not count as broken"
)
def test_xids_keep_their_numbers_and_an_applications_are_no_fault_of_the_gpu(
    watch: Callable[..., tuple[FakeNvml, Telemetry]],
) -> None:
    fake, telemetry = watch(FakeGpu(UUIDS[0]))
    assert "xids" not in telemetry.sample({})["gpus"][0]
    fake.gpus[0].xids += [31, 13, 43, 31]
    [gpu] = telemetry.sample({})["gpus"]
    assert (gpu["xid"], gpu["xids"]) == (0, {"13": 1, "31": 2, "43": 1})
    fake.gpus[0].xids += [79]
    [gpu] = telemetry.sample({})["gpus"]
    assert (gpu["xid"], gpu["xids"]["79"]) == (1, 1)


@pytest.mark.fault("a GPU falls off the bus", "it alone is told as lost, and the others as ever")
def test_a_lost_gpu_is_reported_as_lost_and_the_others_as_ever(
    watch: Callable[..., tuple[FakeNvml, Telemetry]],
) -> None:
    fake, telemetry = watch(*(FakeGpu(uuid) for uuid in UUIDS))
    before = telemetry.sample({})["gpus"]
    fake.gpus[1].lose()
    assert telemetry.sample({})["gpus"] == [before[0], {"index": 1, "lost": True}, before[2]]
    fake.gpus[1].broken.clear()
    assert telemetry.sample({})["gpus"] == before  # it is back
    fake.gpus[1].broken["nvmlDeviceGetTemperature"] = pynvml.NVML_ERROR_GPU_IS_LOST  # lost while it is asked
    assert telemetry.sample({})["gpus"][1] == {"index": 1, "lost": True}


def test_a_gpu_that_was_lost_before_the_start(watch: Callable[..., tuple[FakeNvml, Telemetry]]) -> None:
    lost = FakeGpu(UUIDS[0])
    lost.lose()
    _, telemetry = watch(lost, FakeGpu(UUIDS[1]))
    assert [gpu.get("lost") for gpu in telemetry.sample({})["gpus"]] == [True, None]


def test_a_mig_device_has_memory_and_the_xids_of_its_gpu(watch: Callable[..., tuple[FakeNvml, Telemetry]]) -> None:
    fake, telemetry = watch(FakeGpu(UUIDS[0], mig=[FakeMig("MIG-1"), FakeMig("MIG-2")]), visible="MIG-2")
    expected = {"index": 0, "uuid": "MIG-2", "name": "NVIDIA H200", "memory_used": MIB, "memory_total": 100 * MIB}
    assert telemetry.sample({})["gpus"] == [{**expected, "xid": 0}]
    fake.gpus[0].xids.append(79)
    assert telemetry.sample({})["gpus"] == [{**expected, "xid": 1, "xids": {"79": 1}}]


def test_without_a_driver_there_are_no_gpus_in_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "gpus" not in Telemetry().sample({})
    known = [Gpu("0", 0, UUIDS[0])]
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(init_error=pynvml.NVML_ERROR_DRIVER_NOT_LOADED))
    assert "gpus" not in Telemetry(known).sample({})
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "gpus" not in Telemetry(known).sample({})


@pytest.mark.skipif(not open_nvml() or not list_devices().devices, reason="there is no GPU here")
def test_real_gpus() -> None:
    telemetry = Telemetry(assign(0, share=False, environ={}).visible)
    for _ in range(2):
        sample = telemetry.sample({})
        for gpu in sample["gpus"]:
            assert gpu["uuid"].startswith(("GPU-", "MIG-"))
            assert 0 <= gpu["memory_used"] <= gpu["memory_total"]
            assert gpu.get("xid", 0) == 0
        assert json.loads(bounded(sample)) == sample


# -- within a limit


def status(gpus: int = 8, workers: int = 8) -> dict[str, Any]:
    return {
        "host": "node-17",
        "pid": 4711,
        "step": 123_456,
        "workers": {str(rank): {"pid": 5000 + rank, "cpu": 99.5, "memory": 10**11} for rank in range(workers)},
        "gpus": [{"index": i, "uuid": UUIDS[0], "name": "NVIDIA H200", "memory_used": 10**11} for i in range(gpus)],
    }


def test_a_status_within_the_limit_is_whole() -> None:
    text = bounded(status())
    assert json.loads(text) == status()
    assert len(text) < 2048
    assert " " not in text.replace("NVIDIA H200", "")
    assert bounded(status(), len(text)) == text


def test_what_is_left_out_first() -> None:
    """Every limit, from too small for anything to large enough for all."""
    whole = status()
    stages: list[dict[str, Any]] = []
    for limit in range(2, len(bounded(whole)) + 1):
        text = bounded(whole, limit)
        assert len(text) <= limit
        kept = json.loads(text)
        if not stages or stages[-1] != kept:
            stages.append(kept)
    assert whole == status()  # the caller's own is untouched
    *_, own, without_gpus, without_usage, without_names, last = stages
    assert last == whole
    assert without_names == {**whole, "cut": True, "gpus": [{"index": i, "memory_used": 10**11} for i in range(8)]}
    workers = {str(rank): {"pid": 5000 + rank} for rank in range(8)}
    assert without_usage == {**without_names, "workers": workers}
    assert without_gpus == {key: value for key, value in without_usage.items() if key != "gpus"}
    assert own == {"host": "node-17", "pid": 4711, "step": 123_456, "cut": True}
    listed = without_usage | {"workers": list(workers.values())}  # as the agent tells it
    whole["workers"] = list(whole["workers"].values())
    assert json.loads(bounded(whole, len(bounded(listed)))) == listed


def test_the_nodes_own_fields_are_shortened_before_they_are_lost() -> None:
    long = {"host": "node-17", "reason": "ü" * 20_000, "why": "x" * 20_000, "extra": list(range(20_000)), "step": 1}
    kept = json.loads(bounded(long))
    assert kept == {"host": "node-17", "reason": "ü" * 63 + "…", "why": "x" * 63 + "…", "step": 1, "cut": True}


def test_odd_values_are_no_error() -> None:
    odd = {"gpus": "none", "workers": [1, {"cpu": 3}], "at": object(), ("a",): 1, "bytes": b"\xff", "lone": "\ud800"}
    assert len(bounded(odd)) > len(bounded(odd, 100)) > 2  # type: ignore[arg-type]
    assert bounded(odd, 100).isascii()  # type: ignore[arg-type]


def test_eight_workers_with_gpus_fit() -> None:
    """What a node of 8 GPUs says of itself is far below the limit."""
    gpu = {"index": 7, "uuid": UUIDS[0], "name": "NVIDIA H100 80GB HBM3", "memory_used": 10**11, "memory_total": 10**11}
    gpu |= {"utilization": 100, "temperature": 100, "ecc": 10_000, "xid": 10_000}
    sample = Telemetry().sample({}) | {"gpus": [gpu] * 8, "workers": status()["workers"]}
    assert json.loads(bounded(sample, 4096)) == sample
