"""Which tests run on this machine's GPUs, or without one on a stub, and queries of the first GPU."""

from __future__ import annotations

import os
import subprocess
from typing import Final

import pytest
import torch

STUB: Final = bool(os.environ.get("REDELASTIC_GPU_STUB"))  # jobs run on the CPU; tests that query a GPU are skipped
ON_GPU: Final = torch.cuda.is_available()
COUNT: Final = torch.cuda.device_count() if ON_GPU else 0

needs_gpu: Final = pytest.mark.skipif(not (ON_GPU or STUB), reason="needs a GPU: .ci/gpu, where there is one")
needs_real_gpu: Final = pytest.mark.skipif(not ON_GPU, reason="needs a GPU: .ci/gpu, where there is one")
needs_two_gpus: Final = pytest.mark.skipif(COUNT < 2, reason="needs two GPUs: .ci/gpu, where there are two")


def query_gpu(*fields: str) -> list[str]:
    """Fields of the first GPU by nvidia-smi, in MiB, degrees and percent: ``query_gpu("uuid", "memory.used")``."""
    command = ["nvidia-smi", "--id=0", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout
    return [field.strip() for field in output.split(",")]


def memory_used() -> int:
    """Memory used on the first GPU, in MiB."""
    [used] = query_gpu("memory.used")
    return int(used)
