"""Tests that need torch's flight recorder to know gloo's collectives."""

from __future__ import annotations

import pytest
import torch

from redelastic.torch_internals import version_of

records_gloo = pytest.mark.skipif(
    version_of(str(torch.__version__)) < (2, 11), reason="the flight recorder of this torch knows nothing of gloo"
)
