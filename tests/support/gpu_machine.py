"""Whether there is a GPU to test on, or a stub of one, and what nvidia-smi says of it."""

from __future__ import annotations

import os
import subprocess
from typing import Final

import pytest
import torch

STUB: Final = bool(os.environ.get("REDELASTIC_GPU_STUB"))  # the jobs run on the CPU; queries of the card are skipped
ON_GPU: Final = torch.cuda.is_available()
COUNT: Final = torch.cuda.device_count() if ON_GPU else 0

needs_gpu: Final = pytest.mark.skipif(not (ON_GPU or STUB), reason="needs a GPU: .ci/gpu, where there is one")
needs_real_gpu: Final = pytest.mark.skipif(not ON_GPU, reason="needs a GPU: .ci/gpu, where there is one")
needs_two_gpus: Final = pytest.mark.skipif(COUNT < 2, reason="needs two GPUs: .ci/gpu, where there are two")


def query_gpu(*fields: str) -> list[str]:
    """What nvidia-smi says of the first GPU, in MiB, degrees and percent: ``ask_card("uuid", "memory.used")``."""
    command = ["nvidia-smi", "--id=0", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    told = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout
    return [field.strip() for field in told.split(",")]


def memory_used() -> int:
    """Memory used on the first GPU, in MiB."""
    [used] = query_gpu("memory.used")
    return int(used)
