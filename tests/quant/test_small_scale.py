"""The 8-bit scale: its values, its rounding, and that stochastic rounding has no bias."""

import pytest
import torch

from tahq.quant.gaussian.small_scale import NOT_FINITE, nearest_code, stochastic_code, value_of

CODES = torch.arange(1, 255)
VALUES = value_of(CODES)


def test_values_are_the_documented_ones():
    assert value_of(torch.tensor([0, 1, 8, 248, 254])).tolist() == [0.0, 1.125 * 2**-18, 2**-17, 2**13, 1.75 * 2**13]
    assert value_of(torch.tensor([NOT_FINITE], dtype=torch.uint8)).isnan().all()


def test_eight_values_an_octave_evenly_within_it():
    assert torch.equal(VALUES[8:], 2 * VALUES[:-8])
    octave = VALUES[7:16]  # codes 8 to 16
    assert octave.diff().unique().numel() == 1


def test_every_value_is_its_own_nearest():
    assert torch.equal(nearest_code(VALUES), CODES)
    assert torch.equal(stochastic_code(VALUES, torch.full_like(CODES, 2**20 - 1)), CODES)


def test_nearest_rounds_the_middle_up_and_the_rest_to_the_nearer():
    middle = (VALUES[:-1] + VALUES[1:]) / 2
    assert torch.equal(nearest_code(middle), CODES[1:])
    assert torch.equal(nearest_code(middle.nextafter(torch.zeros(()))), CODES[:-1])


def test_what_is_too_small_is_0_and_what_is_too_large_the_largest():
    small = torch.tensor([0.0, 1e-45, 1e-30, 1.0624 * 2**-18])
    assert not nearest_code(small).any()
    assert nearest_code(torch.tensor([1.0625 * 2**-18, 1e30, 3e38])).tolist() == [1, 254, 254]
    assert stochastic_code(torch.tensor([0.0, 1e30]), torch.tensor([2**20 - 1, 0])).tolist() == [0, 254]


@pytest.mark.parametrize("part", [0.0, 0.1, 0.5, 0.99])
def test_stochastic_rounding_has_the_value_as_its_mean_over_all_draws(part):
    value = VALUES[:-1] + part * VALUES.diff()
    draws = torch.arange(0, 2**20, 1021)
    codes = stochastic_code(value.expand(len(draws), -1).contiguous(), draws.unsqueeze(-1))
    assert ((codes == CODES[:-1]) | (codes == CODES[1:])).all()
    mean = value_of(codes).double().mean(dim=0)
    # Every 1,021st of the draws: a share of them is off by at most one in their number.
    assert ((mean - value).abs() <= VALUES.diff() / len(draws) + 1e-7 * value).all()
