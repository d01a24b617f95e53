"""Water-filling in integers is the greedy choice, and what greedy means: nothing else takes away more error."""

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.tile_oracle import greedy_widths

from tahq.quant.gaussian.bit_allocation import allocate
from tahq.quant.gaussian.levels import DISTORTIONS
from tahq.quant.gaussian.tile_stream import TileLayout
from tahq.quant.spec import EdenSpec


def widths(levels, budget):
    return allocate(torch.tensor(levels, dtype=torch.int32), budget).tolist()


@given(
    levels=st.sampled_from([(0, 511), (100, 104)]).flatmap(
        lambda ends: st.lists(st.integers(*ends), min_size=1, max_size=24)
    ),
    share=st.fractions(1, 8),
)
def test_equals_brute_force_greedy(levels, share):
    budget = math.floor(share * len(levels))
    assert widths(levels, budget) == greedy_widths(levels, budget)


def test_first_tiles_of_equal_ones_get_what_is_left():
    assert widths([7] * 5, 5 * 3 + 2) == [4, 4, 3, 3, 3]


def test_magnitudes_apart_by_an_octave_get_about_a_bit_more():
    assert widths([80, 72, 64, 56], 4 * 4) == [6, 5, 3, 2]  # a bit is worth 6 to 8 levels, an octave is 8
    assert widths([255, 0, 0, 0], 4 * 4) == [8, 3, 3, 2]


def test_budget_is_spent_to_the_last_bit():
    generator = torch.Generator().manual_seed(0)
    for count in (1, 2, 3, 100, 4097):
        levels = torch.randint(0, 512, (count,), generator=generator, dtype=torch.int32)
        for bits in ("1", "1.01", "2.5", "10/3", "7.99", "8"):
            assert int(allocate(levels, math.floor(Fraction(bits) * count)).sum()) == int(Fraction(bits) * count)


@pytest.mark.parametrize("budget", [4, 7, 10, 13])
def test_no_other_allocation_leaves_less_gaussian_error(budget):
    """Of all there are, up to rounding: a rank is off by half an eighth of an octave, so a step by 2^(2/16) in r²."""
    levels = [40, 32, 24, 16]

    def error(bits):
        return sum(4 ** (level / 8) * DISTORTIONS[b - 1] for level, b in zip(levels, bits, strict=True))

    best = min(error(bits) for bits in itertools.product(range(1, 9), repeat=4) if sum(bits) == budget)
    assert error(widths(levels, budget)) <= best * 2**0.125


def test_budget_is_exact_however_the_number_is_written():
    def num_planes(bits, num_tiles):
        return TileLayout.of(EdenSpec(bits=bits, group=8), (num_tiles, 8)).num_planes

    assert num_planes(Fraction("10/3"), 3) == 10
    assert num_planes(Fraction("0.1") * 11, 10) == 11
    assert num_planes(Fraction(2), 0) == 0
