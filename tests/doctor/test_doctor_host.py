"""What `redelastic doctor` finds on the host itself."""

from __future__ import annotations

import importlib.metadata
import os
import resource
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from redelastic import torch_internals
from redelastic.doctor import host
from redelastic.redis.endpoint import parse_endpoint
from redelastic.redis.server import RedisServer
from redelastic.rendezvous.addresses import LocalAddress
from tests.support.doctoring import examined
from tests.support.fake_nvml import install_driver


def test_the_required_versions_are_those_of_the_package() -> None:
    required = " ".join(importlib.metadata.requires("redelastic") or [])
    assert f"torch>={'.'.join(map(str, torch_internals.OLDEST))} " in f"{required} "
    assert f"redis[hiredis]<9,>={host.SUPPORTED_REDIS_PY}" in required


@pytest.mark.parametrize(("version", "level"), [("8", "ok"), ("8.1.0", "ok"), ("80.1", "problem")])
def test_versions_are_compared_by_their_numbers(version: str, level: str) -> None:
    assert host._version("redis-py", version, "8").level == level


def test_a_newer_or_incomplete_torch_is_reported() -> None:
    assert host._torch("2.13.0+cpu", []).level == "ok"
    newer = host._torch("2.150.0", [])
    assert (newer.level, "newer than the tested versions" in newer.found) == ("note", True)
    lacking = host._torch("2.15.0", ["a.b is missing"])
    assert (lacking.level, lacking.found) == ("problem", "2.15.0: a.b is missing")


@pytest.mark.parametrize(
    ("url", "address", "reached", "level"),
    [
        ("redis.example:6379", "127.0.0.1", True, "problem"),
        ("redis.example:6379", "127.0.0.1", False, "note"),  # the one problem is that Redis is out of reach
        ("127.0.0.1:6379", "127.0.0.1", True, "note"),
        ("unix:///tmp/redis.sock", "127.0.0.1", True, "note"),
        ("redis.example:6379", "192.0.2.7", False, "ok"),
    ],
)
def test_the_address_that_peers_use(url: str, address: str, reached: bool, level: str) -> None:
    found = host._address(parse_endpoint(url), LocalAddress(address, "a test"), reached=reached)
    assert found.level == level


def test_a_store_out_of_reach_is_a_problem(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = LocalAddress("no-such-host.invalid", "a test")
    monkeypatch.setattr("redelastic.rendezvous.handler.find_address", lambda *_: nowhere)
    found = examined(server.url)
    assert found["rendezvous"].level == "ok"
    assert found["bootstrap"].level == "problem"
    assert "no-such-host.invalid" in found["bootstrap"].found


def test_few_files_and_little_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        few = host._files()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (few.level, few.numbers) == ("warning", {"limit": 256})
    assert "unlimited" in few.advice or f"at most {hard:,}" in few.advice
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=64, f_frsize=2**20))
    [little] = host._shared_memory()
    assert little.level == "warning"
    assert little.numbers == {"free_bytes": 64 * 2**20}


@pytest.mark.parametrize(
    ("program", "level", "said"),
    [
        ("nvml = FakeNvml(*(FakeGpu(f'GPU-{i}') for i in range(8)))", "ok", "8, driver 570.86"),
        ("nvml = FakeNvml()", "note", "0, driver 570.86"),
        ("nvml = FakeNvml(FakeGpu('GPU-1'), lost := FakeGpu('GPU-2')); lost.lose()", "problem", "GPU 1: GPU is lost"),
        ("nvml = FakeNvml(init_error=9)", "note", "no NVIDIA driver"),
        ("nvml = FakeNvml(); nvml.nvmlInit = lambda: time.sleep(600)", "warning", "the driver does not respond"),
    ],
)
def test_gpus(program: str, level: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install_driver(monkeypatch, tmp_path, program)
    monkeypatch.setattr(host, "GPU_LIMIT", 0.5 if "sleep" in program else 120.0)  # however busy this machine is
    finding = host._gpus()
    assert said in finding.found
    assert finding.level == level


def test_without_the_extra_gpus_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # as if it were not installed
    assert host._gpus().found == "not checked: nvidia-ml-py is not installed"


def test_an_installation_that_torchrun_does_not_find_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert host._torchrun().level == "ok"
    without_entry_points = tmp_path / "redelastic-1.0.dist-info"  # Python takes the first of a name
    without_entry_points.mkdir()
    (without_entry_points / "METADATA").write_text("Metadata-Version: 2.1\nName: redelastic\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert host._torchrun().level == "problem"
