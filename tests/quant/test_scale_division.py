"""How the Triton encoder of `tah` divides by 2^b − 1: a product with the inverse, corrected once (triton_tile)."""

import numpy as np
import pytest

MANTISSAS = np.arange(2**23, 2**24, dtype=np.int64).astype(np.float32)


def fma(a, b, c):
    """a·b + c, rounded once: the product of two fp32 is exact in fp64 and wider, and so is this sum in 64 bits."""
    return (np.longdouble(1) * a * b + c).astype(np.float32)


@pytest.mark.skipif(np.finfo(np.longdouble).nmant < 63, reason="this machine's long double is not longer than fp64")
@pytest.mark.parametrize("bits", range(2, 9))
def test_one_correction_gives_the_correctly_rounded_quotient(bits):
    levels = np.float32((1 << bits) - 1)
    inverse = np.float32(1.0 / ((1 << bits) - 1.0))
    quotient = MANTISSAS * inverse
    corrected = fma(fma(-quotient, levels, MANTISSAS), inverse, quotient)
    assert np.array_equal(corrected, MANTISSAS / levels)
    assert not np.array_equal(quotient, corrected)
