"""Boundary tensors of a trained GPT-2 small: an excerpt, and all where the data that are not in the repository lie."""

import os
from functools import cache
from pathlib import Path

import pytest
import torch

FOLDER = Path(os.environ.get("TAHQ_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data"))
FIXTURE = FOLDER / "gpt2small_boundary.safetensors"

EXCERPT = Path(__file__).parent / "boundary_excerpt.safetensors"
"""64 positions of one sample."""

needs_fixture = pytest.mark.skipif(
    not FIXTURE.exists(), reason="no gpt2small_boundary.safetensors; set TAHQ_SHARED_DATA"
)


@cache
def boundary() -> dict[str, torch.Tensor]:
    """bf16 [2, 512, 768], `act_after_block_N` and `grad_after_block_N` for N = 2, 5 and 8."""
    from safetensors.torch import load_file

    return load_file(FIXTURE)


@cache
def boundary_or_excerpt() -> dict[str, torch.Tensor]:
    """As `boundary`, or [1, 64, 768] of them."""
    from safetensors.torch import load_file

    return boundary() if FIXTURE.exists() else load_file(EXCERPT)
