"""The literal levels and distortions are those of the Lloyd-Max quantiser of a Gaussian, solved again."""

import numpy as np
import pytest
from scipy.stats import norm

from tahq.quant.gaussian.bit_allocation import STEPS
from tahq.quant.gaussian.levels import (
    DISTORTIONS,
    MAGNITUDES,
    MAX_BITS,
    level_table,
    magnitude_table,
    threshold_table,
)

BITS = range(1, MAX_BITS + 1)


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
def test_levels_and_distortion_solve_lloyds_conditions(bits):
    literal = np.array(MAGNITUDES[bits - 1])
    assert literal.shape == (2 ** (bits - 1),)
    # From 1 % aside, where Newton's method has to find the way back.
    solved = solve(literal * 1.01)
    assert literal == pytest.approx(solved, abs=1e-6)
    _, shares, means = cells(solved)
    distortion = 1 - 2 * (shares * means**2).sum()  # E z² − E ẑ², as ẑ is the mean of its cell
    assert DISTORTIONS[bits - 1] == pytest.approx(distortion, rel=1e-6)


def test_first_levels_are_the_known_ones():
    """√(2/π), and Max's table of 1960 for four levels."""
    assert MAGNITUDES[0][0] == pytest.approx((2 / np.pi) ** 0.5, abs=1e-7)
    assert MAGNITUDES[1] == pytest.approx((0.4528, 1.510), abs=5e-4)


def test_literals_are_exact_in_fp32_and_ascend():
    for magnitudes in MAGNITUDES:
        as_fp32 = [str(np.float32(value)) for value in magnitudes]
        assert [float(text) for text in as_fp32] == list(magnitudes)
        assert (np.diff([0.0, *magnitudes]) > 0).all()


def test_tables_hold_the_levels_row_by_row():
    magnitudes, thresholds, levels = magnitude_table(), threshold_table(), level_table()
    assert [table.shape for table in (magnitudes, thresholds, levels)] == [(9, 128), (9, 127), (9, 256)]
    for bits in BITS:
        num = 2 ** (bits - 1)
        assert magnitudes[bits, :num].tolist() == np.array(MAGNITUDES[bits - 1], np.float32).tolist()
        assert (levels[bits, num : 2 * num] == magnitudes[bits, :num]).all()
        assert (levels[bits, : 2 * num] == -levels[bits, : 2 * num][::-1]).all()
        assert (np.diff(levels[bits, : 2 * num]) > 0).all()
        inside = thresholds[bits, : num - 1]
        assert ((magnitudes[bits, : num - 1] < inside) & (inside < magnitudes[bits, 1:num])).all()
        assert (thresholds[bits, num - 1 :] == np.finfo(np.float32).max).all()


def test_steps_of_the_allocation_are_what_another_bit_takes_away():
    """A tile of r times the magnitude is worth r² times as much: 4·log2 of a ratio is eighths of an octave of r."""
    returns = -np.diff(DISTORTIONS)
    assert tuple(np.round(4 * np.log2(returns[0] / returns)).astype(int)) == STEPS
