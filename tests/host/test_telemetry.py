"""CPU and memory that a node uses: real process trees that burn and allocate known amounts."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from redelastic.host.telemetry import Telemetry
from tests.support.liveness import lives

PUPPET = """
import mmap, os, signal, subprocess, sys, time

def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        sum(range(10_000))

def child(run, then="time.sleep(600)"):
    # a child that calls run(), reports that it has, and then executes `then`
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
TICKS = 0.06  # in seconds: rounding to ticks of 10 ms in a few processes
OVERHEAD = 0.4  # in seconds: CPU time that a puppet may use beside what it burns


class Clock:
    """A clock that the test moves on."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Puppet:
    """A worker's process that executes the lines that the test sends."""

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
    puppet.do("burn(0.5)")  # before the first sample, so not counted
    assert meter.read(w0=puppet.tree, w1=idle.tree) == {}
    puppet.do("burn(1)")
    used = meter.read(w0=puppet.tree, w1=idle.tree)
    assert 1 - TICKS <= used["w0"] <= 1 + OVERHEAD
    assert used["w1"] <= TICKS
    assert meter.read(w0=puppet.tree, w1=idle.tree)["w0"] <= TICKS


def test_children_between_two_samples_are_counted(start: Callable[[], Puppet]) -> None:
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


def test_a_child_that_is_reaped_outside_the_tree_does_not_reduce_the_sum(start: Callable[[], Puppet]) -> None:
    meter, puppet = Meter(), start()
    puppet.do("child(lambda: child(lambda: burn(1)))")
    meter.read(w0=puppet.tree)
    root, child, grandchild = puppet.tree
    child.kill()  # a zombie, as its parent does not reap it; init adopts the grandchild, which leaves the tree
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


def test_cpu_is_never_more_than_the_machine_has(start: Callable[[], Puppet]) -> None:
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


def test_a_tree_that_dies_after_its_listing_has_no_memory(start: Callable[[], Puppet]) -> None:
    telemetry, puppet = Telemetry(), start()
    puppet.do("for _ in range(3): child(lambda: None)")
    tree = puppet.tree
    assert telemetry.sample({0: tree})["memory"] > 0
    puppet.end()
    assert telemetry.sample({0: tree})["memory"] == 0
