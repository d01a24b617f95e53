"""AQ-SGD's arithmetic against the same formulas in numpy, and the changes that it loses."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from tahq.quant.aqsgd import reference as aqsgd_reference

FINITE = st.floats(-(2.0**120), 2.0**120, width=32)
USUAL = st.floats(-8, 8, width=32)
CHANGES = arrays(np.float32, array_shapes(min_dims=3, max_dims=3, max_side=5), elements=USUAL | FINITE)


def fp16(values: np.ndarray) -> np.ndarray:
    return np.clip(values, np.float32(-65504), np.float32(65504)).astype(np.float16)


@given(CHANGES, st.integers(2, 8), st.integers(0, 2**32 - 1))
def test_codes_values_and_memory_are_those_of_the_formulas(change, bits, seed):
    scale, codes = aqsgd_reference.quantize(torch.from_numpy(change), bits)
    s = fp16(np.abs(change).max(axis=(0, 1)))
    half = np.float32(2 ** (bits - 1))
    with np.errstate(over="ignore"):
        q = np.clip(np.rint(change / (s.astype(np.float32) + np.float32(1e-6)) * half), -half, half - 1)
    assert np.array_equal(scale.numpy(), s)
    assert np.array_equal(codes.numpy(), (q + half).astype(np.uint8))
    values = aqsgd_reference.dequantize(scale, codes, bits)
    exact = q.astype(np.float64) / float(half) * s.astype(np.float64)
    assert np.array_equal(values.numpy().astype(np.float64), exact)
    memory = fp16(np.random.default_rng(seed).normal(size=change.shape).astype(np.float32) * 100)
    after = aqsgd_reference.advance(torch.from_numpy(memory), values)
    assert np.array_equal(after.numpy(), fp16(memory.astype(np.float32) + values.numpy()))
    assert after.isfinite().all()


@pytest.mark.parametrize(
    ("magnitude", "decoded"),
    [
        (1e-3, -1e-3),
        (1e-6, -0.5e-6),  # 1e-6 is added to the scale: half of the codes are left
        (1e-7, -0.125e-7),  # one code, of a scale of two fp16 subnormals
        (1e-8, 0.0),  # below fp16
    ],
)
def test_small_changes_lose_codes_and_then_everything(magnitude, decoded):
    change = torch.full((1, 1, 1), -magnitude)
    got = float(aqsgd_reference.dequantize(*aqsgd_reference.quantize(change, 4), 4))
    assert got == pytest.approx(decoded, rel=0.25)
