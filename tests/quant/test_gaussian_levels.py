"""The tables of `eden` and `wf`: levels of the Lloyd-Max quantiser, 8-bit scales, and the bits that tiles get."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm
from support.tile_oracle import greedy_widths

from tahq.quant.gaussian.bit_allocation import STEPS, allocate
from tahq.quant.gaussian.levels import DISTORTIONS, MAGNITUDES, MAX_BITS, level_table, magnitude_table, threshold_table
from tahq.quant.gaussian.small_scale import NOT_FINITE, nearest_code, stochastic_code, value_of
from tahq.quant.gaussian.tile_stream import TileLayout
from tahq.quant.spec import EdenSpec

BITS = range(1, MAX_BITS + 1)
CODES = torch.arange(1, 255)
VALUES = value_of(CODES)


def cells(levels):
    """Borders, probabilities and means of the positive cells around these magnitudes."""
    borders = np.concatenate(([0.0], (levels[1:] + levels[:-1]) / 2, [np.inf]))
    shares = norm.sf(borders[:-1]) - norm.sf(borders[1:])
    return borders, shares, (norm.pdf(borders[:-1]) - norm.pdf(borders[1:])) / shares


def solve(levels):
    """Newton's method on level − mean of its cell = 0, the mean depending on both neighbours."""
    for _ in range(20):
        borders, shares, means = cells(levels)
        finite = np.where(np.isinf(borders), 0.0, borders)
        by_left = norm.pdf(borders[:-1]) * (means - finite[:-1]) / shares
        by_right = norm.pdf(borders[1:]) * (finite[1:] - means) / shares
        by_left[0] = 0.0  # the border at 0 stays there
        jacobian = np.eye(len(levels)) - np.diag((by_left + by_right) / 2)
        jacobian -= np.diag(by_left[1:] / 2, -1) + np.diag(by_right[:-1] / 2, 1)
        levels = levels - np.linalg.solve(jacobian, levels - means)
    return levels


@pytest.mark.parametrize("bits", BITS)
def test_levels_and_distortion_solve_lloyds_conditions_and_are_exact_in_fp32(bits):
    literal = np.array(MAGNITUDES[bits - 1])
    assert literal.shape == (2 ** (bits - 1),)
    assert [float(str(np.float32(value))) for value in literal] == literal.tolist()
    # From 1 % aside, where Newton's method has to find the way back.
    solved = solve(literal * 1.01)
    assert literal == pytest.approx(solved, abs=1e-6)
    _, shares, means = cells(solved)
    distortion = 1 - 2 * (shares * means**2).sum()  # E z² − E ẑ², as ẑ is the mean of its cell
    assert DISTORTIONS[bits - 1] == pytest.approx(distortion, rel=1e-6)


def test_tables_hold_the_levels_row_by_row():
    magnitudes, thresholds, levels = magnitude_table(), threshold_table(), level_table()
    assert [table.shape for table in (magnitudes, thresholds, levels)] == [(9, 128), (9, 127), (9, 256)]
    for bits in BITS:
        num = 2 ** (bits - 1)
        assert magnitudes[bits, :num].tolist() == np.array(MAGNITUDES[bits - 1], np.float32).tolist()
        assert (levels[bits, num : 2 * num] == magnitudes[bits, :num]).all()
        assert (levels[bits, : 2 * num] == -levels[bits, : 2 * num][::-1]).all()
        inside = thresholds[bits, : num - 1]
        assert ((magnitudes[bits, : num - 1] < inside) & (inside < magnitudes[bits, 1:num])).all()
        assert (thresholds[bits, num - 1 :] == np.finfo(np.float32).max).all()


def test_scales_are_the_documented_ones_and_round_to_the_nearest():
    assert value_of(torch.tensor([0, 1, 8, 248, 254])).tolist() == [0.0, 1.125 * 2**-18, 2**-17, 2**13, 1.75 * 2**13]
    assert value_of(torch.tensor([NOT_FINITE], dtype=torch.uint8)).isnan().all()
    assert torch.equal(nearest_code(VALUES), CODES)
    middle = (VALUES[:-1] + VALUES[1:]) / 2
    assert torch.equal(nearest_code(middle), CODES[1:])
    assert torch.equal(nearest_code(middle.nextafter(torch.zeros(()))), CODES[:-1])
    assert not nearest_code(torch.tensor([0.0, 1e-45, 1e-30, 1.0624 * 2**-18])).any()
    assert nearest_code(torch.tensor([1.0625 * 2**-18, 1e30, 3e38])).tolist() == [1, 254, 254]
    assert stochastic_code(torch.tensor([0.0, 1e30]), torch.tensor([2**20 - 1, 0])).tolist() == [0, 254]


@pytest.mark.parametrize("part", [0.0, 0.1, 0.5, 0.99])
def test_stochastic_rounding_of_scales_has_the_value_as_its_mean_over_all_draws(part):
    value = VALUES[:-1] + part * VALUES.diff()
    draws = torch.arange(0, 2**20, 1021)
    codes = stochastic_code(value.expand(len(draws), -1).contiguous(), draws.unsqueeze(-1))
    assert ((codes == CODES[:-1]) | (codes == CODES[1:])).all()
    mean = value_of(codes).double().mean(dim=0)
    # Every 1,021st of the draws: a share of them is off by at most one in their number.
    assert ((mean - value).abs() <= VALUES.diff() / len(draws) + 1e-7 * value).all()


def widths(levels, budget):
    return allocate(torch.tensor(levels, dtype=torch.int32), budget).tolist()


@given(
    levels=st.sampled_from([(0, 511), (100, 104)]).flatmap(
        lambda ends: st.lists(st.integers(*ends), min_size=1, max_size=24)
    ),
    share=st.fractions(1, 8),
)
def test_allocation_equals_brute_force_greedy(levels, share):
    budget = math.floor(share * len(levels))
    assert widths(levels, budget) == greedy_widths(levels, budget)
    assert TileLayout.of(EdenSpec(bits=share, group=8), (len(levels), 8)).num_planes == budget


@pytest.mark.parametrize("budget", [4, 7, 10, 13])
def test_no_other_allocation_leaves_less_gaussian_error(budget):
    """Of all there are, up to rounding: a rank is off by half an eighth of an octave, so a step by 2^(2/16) in r²."""
    levels = [40, 32, 24, 16]

    def error(bits):
        return sum(4 ** (level / 8) * DISTORTIONS[b - 1] for level, b in zip(levels, bits, strict=True))

    best = min(error(bits) for bits in itertools.product(range(1, 9), repeat=4) if sum(bits) == budget)
    assert error(widths(levels, budget)) <= best * 2**0.125


def test_budget_is_spent_to_the_last_bit_and_steps_are_what_another_bit_takes_away():
    levels = torch.randint(0, 512, (4097,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    for bits in (Fraction(1), Fraction("1.01"), Fraction(10, 3), Fraction(8)):
        assert int(allocate(levels, math.floor(bits * 4097)).sum()) == int(bits * 4097)
    # A tile of r times the magnitude is worth r² times as much: 4·log2 of a ratio is eighths of an octave of r.
    returns = -np.diff(DISTORTIONS)
    assert tuple(np.round(4 * np.log2(returns[0] / returns)).astype(int)) == STEPS
