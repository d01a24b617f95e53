"""The rules of `tah` that examples show best; `test_tah_oracle.py` compares whole streams with a second program."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tahq.errors import CodecError
from tahq.quant.spec import TahSpec
from tahq.quant.tah import reference as tah
from tahq.quant.tah.stream import TahLayout


def tiles_of(*rows):
    return torch.tensor(rows, dtype=torch.float32)


def test_entropy_of_even_and_single_magnitudes():
    tiles = tiles_of([1.0] * 8, [5.0] + [0.0] * 7, [0.0] * 8, [3.0, 3.0] + [0.0] * 6)
    assert tah.entropy_(tiles).tolist() == pytest.approx([math.log(8), 0.0, 0.0, math.log(2)], abs=1e-6)


def test_low_bits_go_to_the_lowest_entropies_of_each_sample():
    entropies = torch.tensor([[3.0, 1.0, 2.0, 1.0], [0.0, 0.0, 0.0, 9.0]])
    assert tah.select_high(entropies, 2).tolist() == [[True, False, True, False], [False, False, True, True]]
    assert tah.select_high(entropies, 0).all()
    assert not tah.select_high(entropies, 4).any()


def test_allocation_tile_has_one_entropy_over_all_its_channels():
    """Two tiles of equal magnitudes have log 16 nats together, whatever their tiles have by themselves."""
    even, single = [1.0] * 8, [1.0] + [0.0] * 7
    magnitude = tiles_of(*[even, even], *[single, single], *[even, single]).view(1, 1, 6, 8)
    for share, select, expected in (
        ("2/3", "high", [True, False, True]),
        ("1/3", "high", [True, False, False]),
        ("2/3", "low", [False, True, True]),
    ):
        layout = TahLayout.of(TahSpec(group=8, int4=Fraction(share), alloc="16", select=select), (1, 3, 16))
        assert tah.allocate_(layout, magnitude.clone().view(1, 3, 2, 8)).tolist() == [expected]


@given(share=st.fractions(0, 1), count=st.integers(0, 200))
def test_bits_that_are_spread_evenly_follow_the_floors_of_the_exact_share(share, count):
    layout = TahLayout.of(TahSpec(int4=1 - share, adaptive="off"), (2, count, 64))
    high = tah.spread_high(layout.even_share, count, torch.device("cpu"))
    assert high.tolist() == [math.floor((i + 1) * share) == math.floor(i * share) for i in range(count)]
    assert (~high).sum() == layout.num_low
    many_digits = Fraction(10**300 - 1, 10**300)  # the products with n must fit 64 bits
    assert TahLayout.of(TahSpec(int4=many_digits), (1, 100_000, 64)).even_share == 0


@pytest.mark.parametrize(
    ("channels", "group", "alloc", "ratio", "num_allocs"),
    [
        (1600, 64, "group", 1, 150),
        (1600, 64, "token", 25, 6),
        (1600, 64, "320", 5, 30),
        (1600, 128, "64", 1, 150),  # no tile of 128 divides 1600: G is 64
        (100, 64, "128", 2, 6),
        (0, 64, "token", 1, 0),
        (0, 64, "128", 2, 0),
    ],
)
def test_layout_counts_allocation_tiles(channels, group, alloc, ratio, num_allocs):
    layout = TahLayout.of(TahSpec(group=group, alloc=alloc, int4=Fraction(1, 3)), (2, 3, channels))
    assert (layout.tiles_per_alloc, layout.num_allocs) == (ratio, num_allocs)
    assert layout.allocs_per_sample == num_allocs // 2
    assert layout.num_low == layout.allocs_per_sample * 2 // 3
    assert layout.num_high == 2 * ratio * (layout.allocs_per_sample - layout.num_low)


@pytest.mark.parametrize(
    ("channels", "alloc", "named"),
    [
        (1600, "32", "alloc=32 does not fit 1600 channels, which are cut into tiles of 64 and filled up to 1600"),
        (1600, "128", "a multiple of 64 that divides 1600"),
        (100, "192", "alloc=192 does not fit 100 channels, which are cut into tiles of 64 and filled up to 128"),
        (64, "1600", "alloc=1600 does not fit 64 channels"),
    ],
)
def test_allocation_tiles_that_do_not_fit_are_refused(channels, alloc, named):
    with pytest.raises(CodecError, match=named):
        TahLayout.of(TahSpec(alloc=alloc), (2, 3, channels))


def test_hadamard_is_sylvesters_matrix_and_its_own_inverse():
    matrix = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(5):
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    x = torch.randn(10, 32, generator=torch.Generator().manual_seed(0))
    transformed = tah.hadamard(x)
    torch.testing.assert_close(transformed.double(), x.double() @ matrix / 32**0.5, rtol=0, atol=1e-6)
    torch.testing.assert_close(tah.hadamard(transformed), x, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("row", "options", "scale", "codes"),
    [
        # ties round to even on the scale of the wire: range 1500 over 15 levels
        ([0, 50, 150, 250, 1500, 1350, 749.9, 750.1], {"low": 3, "high": 4}, 100.0, [0, 0, 2, 2, 15, 14, 7, 8]),
        # 1029/255 = 4.0353 is 4.0352 in fp16: the largest value would get code 255.01
        ([0, 1, 2, 3, 4, 5, 6, 1029], {"low": 8, "high": 8}, 4.03515625, [0, 0, 0, 1, 1, 1, 1, 255]),
        ([1536.0] * 8, {"low": 3, "high": 4}, 0.0, [0] * 8),  # a constant tile
    ],
)
def test_codes_of_one_tile(row, options, scale, codes):
    """In a tensor whose largest magnitude is in [2^10, 2^11), so that e = 0."""
    layout = TahLayout.of(TahSpec(group=8, int4=Fraction(1), tau=math.inf, **options), (1, 8))
    tiles = tah.encode_tiles(layout, tiles_of(row).view(1, 1, 1, 8))
    assert tiles.scale.item() == scale
    assert tiles.codes.flatten().tolist() == codes


@pytest.mark.skipif(np.finfo(np.longdouble).nmant < 63, reason="this machine's long double is not longer than fp64")
@pytest.mark.parametrize("bits", range(2, 9))
def test_one_correction_of_a_product_with_the_inverse_is_the_correctly_rounded_quotient(bits):
    """How the Triton kernels divide by 2^b − 1 (`triton_tile.scale_and_zero_point`), for every mantissa."""
    dividend, levels = np.arange(2**23, 2**24, dtype=np.int64).astype(np.float32), np.float32((1 << bits) - 1)
    inverse = np.float32(1.0 / ((1 << bits) - 1.0))

    def fma(a, b, c):  # the product of two fp32 is exact in fp64 and wider, and so is this sum in 64 bits
        return (np.longdouble(1) * a * b + c).astype(np.float32)

    quotient = dividend * inverse
    corrected = fma(fma(-quotient, levels, dividend), inverse, quotient)
    assert np.array_equal(corrected, dividend / levels)
