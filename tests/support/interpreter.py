"""Kernel tests that run in Triton's interpreter, which has to be chosen before triton is imported."""

import pytest

from tahq.quant.backends import interprets_triton

in_interpreter = [
    pytest.mark.skipif(not interprets_triton(), reason="needs TRITON_INTERPRET=1; test_interpreted_kernels.py sets it"),
    # numpy reports what a device computes silently: logarithms of 0, ∞ − ∞.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
