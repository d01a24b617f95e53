"""Tests of kernels on a CUDA device, or in Triton's interpreter, which has to be chosen before triton is imported."""

import pytest
import torch

from tahq.quant.backends import interprets_triton

DEVICE = torch.device("cpu" if interprets_triton() else "cuda")
# The interpreter's numpy reports what a device computes silently: logarithms of 0, ∞ − ∞.
on_device = pytest.mark.filterwarnings("ignore::RuntimeWarning") if interprets_triton() else pytest.mark.gpu
"""For tests on DEVICE: a CUDA device, or the interpreter's CPU."""
in_interpreter = pytest.mark.skipif(
    not interprets_triton(), reason="needs TRITON_INTERPRET=1; test_interpreted_kernels.py sets it"
)


def sizes(interpreted: list, slow: list, cuda: list) -> list:
    """Parameters of a test: small ones in the interpreter, those in `slow` for `make acceptance`; all on CUDA."""
    if interprets_triton():
        return [*interpreted, *(pytest.param(each, marks=pytest.mark.acceptance) for each in slow)]
    return [*interpreted, *slow, *cuda]
