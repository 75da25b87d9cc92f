"""The agent on a real GPU: NCCL under it, telemetry of it, and nothing left on it. Skipped where there is none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from servers import wait_until

from redelastic.agent.host.gpus import assign, open_nvml
from redelastic.agent.host.telemetry import Telemetry

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
    pytest.mark.timeout(300),
]

TRAIN = """
import os, sys, time, torch, torch.distributed as dist
import redelastic
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
held = torch.zeros(2**28, device="cuda")  # 1 GiB
for step in range(int(sys.argv[2])):
    dist.all_reduce(held[:1024])
    torch.cuda.synchronize()
    redelastic.progress(step)
    open(sys.argv[1], "w").write(str(os.getpid()))
    time.sleep(0.05)
dist.destroy_process_group()
"""


def run(directory: Path, steps: int, *options: str) -> subprocess.Popen[bytes]:
    script = directory / "train.py"
    script.write_text(TRAIN)
    command = [sys.executable, "-m", "redelastic.cli", "run", "--standalone", "--health-check=gpu", *options]
    return subprocess.Popen([*command, str(script), str(directory / "pid"), str(steps)])


def on_the_gpu(pid: int) -> bool:
    nvml: Any = open_nvml()
    if nvml is None:
        pytest.skip("there is a GPU, but nvidia-ml-py or its driver is not there")
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    return pid in {process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)}


def test_nccl_under_the_agent(tmp_path: Path) -> None:
    process = run(tmp_path, 10)
    assert process.wait(200) == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_on_it(tmp_path: Path, number: signal.Signals) -> None:
    process = run(tmp_path, 100_000)
    file = tmp_path / "pid"
    wait_until(lambda: file.exists() and file.read_text(), "the worker trains", 200)
    free_while_it_runs, _ = torch.cuda.mem_get_info(0)
    worker = int(file.read_text())
    process.send_signal(number)
    process.wait(60)
    wait_until(lambda: not Path(f"/proc/{worker}").exists() and not on_the_gpu(worker), "the worker is gone", 30)
    wait_until(lambda: torch.cuda.mem_get_info(0)[0] > free_while_it_runs + 2**29, "its memory is free again", 30)


def test_telemetry(tmp_path: Path) -> None:
    process = run(tmp_path, 100_000)
    file = tmp_path / "pid"
    try:
        wait_until(lambda: file.exists() and file.read_text(), "the worker trains", 200)
        sample = Telemetry(assign(1, share=False, environ=os.environ).visible).sample({})
        gpu = sample["gpus"][0]
        assert gpu["memory_used"] > 2**30
        assert gpu["memory_total"] > gpu["memory_used"]
        assert 0 < gpu["temperature"] < 120
        assert 0 <= gpu["utilization"] <= 100
        assert gpu["xid"] == 0
    finally:
        process.terminate()
        process.wait(60)
