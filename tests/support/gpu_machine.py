"""Whether this machine has a GPU for the tests, or they use a stub of one."""

from __future__ import annotations

import os
from typing import Final

import pytest
import torch

STUB: Final = bool(os.environ.get("REDELASTIC_GPU_STUB"))  # jobs run on the CPU; tests that query a GPU are skipped
ON_GPU: Final = torch.cuda.is_available()

needs_gpu: Final = pytest.mark.skipif(not (ON_GPU or STUB), reason="needs a GPU: .ci/gpu, where there is one")
needs_real_gpu: Final = pytest.mark.skipif(not ON_GPU, reason="needs a GPU: .ci/gpu, where there is one")
