"""The check of GPUs: a probe in its own process names the device that computes wrong, hangs or kills the probe."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from redelastic.host import checks, gpu_probe
from redelastic.host.checks import Node, gpu
from tests.support import check_fixtures, launchers
from tests.support.fake_nvml import install_device_nodes
from tests.support.liveness import lives
from tests.support.servers import wait_until

node = check_fixtures.node


def probe(kind: str, expected: int) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "redelastic.host.gpu_probe", kind, str(expected)]
    return launchers.run(argv, os.environ | {"OMP_NUM_THREADS": "1"}, 100)


def test_the_probe_finds_a_device_well() -> None:
    ended = probe("cpu", 1)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "device 0: was asked for a matmul\n", "")


@pytest.mark.long
def test_the_probe_names_a_device_that_is_not_there() -> None:
    ended = probe("cpu", 2)
    assert ended.returncode == 1
    assert re.match(r"device 1: is not there: torch \S+ sees 1 of 2", ended.stderr)


@pytest.mark.long
def test_the_probe_names_a_device_that_raises() -> None:
    ended = probe("meta", 1)
    assert ended.returncode == 1
    assert ended.stderr.startswith("device 0: NotImplementedError: ")
    assert ended.stderr.count("\n") == 1


@pytest.mark.long
def test_the_probe_names_the_device_before_it_dies() -> None:
    program = (
        "import os, torch; from redelastic.host.gpu_probe import ask_devices\n"
        "torch.Tensor.cpu = lambda tensor: os.kill(os.getpid(), 9)\n"
        "ask_devices('cpu', 1)"
    )
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    argv = [sys.executable, "-c", program]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=100, check=False, env=buffered)
    assert (ended.returncode, ended.stdout) == (-9, "device 0: was asked for a matmul\n")


class OffByOneBit(TorchFunctionMode):
    """A device whose answers are wrong in one element."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = function(*args, **(kwargs or {}))
        if function is torch.Tensor.cpu:
            answer[3, 4] += 1
        return answer


def test_the_probe_names_a_device_that_computes_wrong() -> None:
    gpu_probe.ask_devices("cpu", 1)
    wrong = "device 0: computes wrong, in 1 of 65536 elements of a matmul"
    with OffByOneBit(), pytest.raises(SystemExit, match=wrong):
        gpu_probe.ask_devices("cpu", 1)


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Replaces the probe by a shell script."""

    def put(script: str) -> None:
        monkeypatch.setattr(checks, "PROBE", ("/bin/sh", "-c", script, "probe"))
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
        (tmp_path / "logs").mkdir(exist_ok=True)

    return put


def test_gpu_asks_the_probe_for_all_visible_devices(node: Node, stand_in: Callable[[str], None]) -> None:
    stand_in('echo "device 0: $1 $2" >&2; exit 1')
    assert gpu(node) == "device 0: cuda 2"
    stand_in("exit 0")
    assert gpu(node) is None


def test_gpu_names_the_device_that_hangs(node: Node, stand_in: Callable[[str], None]) -> None:
    stand_in(f"echo $$ >{node.log_dir}/pid; echo device 1: was asked for a matmul; echo warning: odd; exec sleep 300")
    reason = gpu(Node(node.log_dir, 2, timeout=6))  # its shell's start may take seconds
    assert reason == "device 1: was asked for a matmul; the probe did not end within 6 s"
    wait_until(lambda: not lives(int((node.log_dir / "pid").read_text())), "the probe is gone")


def test_gpu_names_the_device_that_the_probe_died_of(node: Node, stand_in: Callable[[str], None]) -> None:
    stand_in("echo device 1: was asked for a matmul; kill -ABRT $$")
    assert gpu(node) == "device 1: was asked for a matmul; the probe was killed by SIGABRT"


def test_gpu_gives_the_error_of_a_probe_that_cannot_start(node: Node, stand_in: Callable[[str], None]) -> None:
    stand_in("echo Traceback >&2; echo ImportError: libcudart.so.13 >&2; exit 1")
    assert gpu(node) == "ImportError: libcudart.so.13"
    stand_in("exit 1")
    assert gpu(node) == "no device was asked yet"
    stand_in("exec sleep 300")
    reason = gpu(Node(node.log_dir, 2, timeout=0.2))
    assert reason == "no device was asked yet; the probe did not end within 0.2 s"


def test_gpu_asks_each_mig_instance_in_a_process_of_its_own(
    node: Node, stand_in: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in('[ "$CUDA_VISIBLE_DEVICES" = MIG-a ] || { echo "device 0: $1 $2 is broken"; exit 1; }')
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a,MIG-b")
    assert gpu(node) == "MIG-b: device 0: cuda 1 is broken"


def test_gpu_counts_the_names_as_cuda_does(
    node: Node, stand_in: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in('echo "$2" >&2; exit 1')
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,foo,1")
    assert gpu(node) == "1"


@pytest.mark.parametrize("visible", ["", "-1", "NoDevFiles", "-1,0"])
def test_gpu_runs_no_probe_where_all_gpus_are_hidden(
    node: Node, stand_in: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, visible: str
) -> None:
    stand_in("echo asked; exit 1")
    assert gpu(node) == "asked"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu(node) is None


def test_gpu_runs_no_probe_without_a_driver(
    node: Node, stand_in: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in("echo asked; exit 1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    install_device_nodes(monkeypatch, "no-such-driver*")
    assert gpu(node) is None
    install_device_nodes(monkeypatch, "no-such-driver*", "nul[l]")
    assert gpu(node) == "asked"


def test_gpu_refuses_where_a_gpu_is_named_that_does_not_exist(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = torch.cuda.device_count()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, [*range(missing), 99])))
    reason = gpu(node)
    assert reason is not None
    assert reason.startswith(
        f"device {missing}: is not there: torch {torch.__version__} sees {missing} of {missing + 1}"
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_gpu_on_a_gpu(node: Node) -> None:
    assert gpu(node) is None
