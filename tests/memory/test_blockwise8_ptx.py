"""The inline assembly of `blockwise8`'s kernels, instruction by instruction, on all that it can be given."""

import numpy as np
import pytest
from support.ptx import run

from tahq.memory.adam import blockwise8_kernels as ptx
from tahq.memory.adam.blockwise8 import borders

ERROR = 2.0**-20
"""Of a quotient: a product with a reciprocal, which is off by a bit that is set in it, 2⁻²¹, and by roundings."""


def places(quotients, signed):
    """Numbers of borders; and as bytes, which have to be the same."""
    bits = np.asarray(quotients, dtype=np.float32).view(np.uint32)
    fours = np.concatenate([bits, np.zeros(-len(bits) % 4, np.uint32)]).reshape(-1, 4)
    *found, together = run(ptx.places_ptx(signed), 5, *fours.T)
    found = np.stack(found, axis=1).reshape(-1)[: len(bits)].astype(int)
    assert np.array_equal(together.view(np.uint8)[: len(bits)], found)
    return found


@pytest.mark.parametrize("signed", [True, False])
def test_the_border_at_a_place_decides_right_for_every_quotient(signed):
    """Whatever is rounded to an fp16 number is between the border before, and the one behind, the border looked at."""
    numbers = np.arange(0x4401, dtype=np.uint16).view(np.float16).astype(np.float64)
    assert numbers[-1] == ptx.FACTOR
    limits = borders(signed).double().numpy()
    found = places(numbers, signed)
    assert found.min() == 0
    assert found.max() == len(limits) - 1
    middles = (numbers[1:] + numbers[:-1]) / 2
    least = np.concatenate([[0.0], middles * (1 - ERROR)]) / ptx.FACTOR
    most = np.concatenate([middles * (1 + ERROR), [ptx.FACTOR]]) / ptx.FACTOR
    before, behind = np.concatenate([[-np.inf], limits])[found], np.concatenate([limits, [np.inf]])[found + 1]
    assert (before < least).all()
    assert (most <= behind).all()


@pytest.mark.parametrize("signed", [True, False])
def test_nan_is_placed_at_the_first_border(signed):
    assert places([np.nan] * 4, signed).tolist() == [0] * 4


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_put_together_from_places_and_signs(signed):
    last = len(borders(signed)) - 1
    place, above, negative = (
        grid.reshape(-1)
        for grid in np.meshgrid(np.arange(256) * last // 255, [False, True], [False, True], indexing="ij")
    )
    expected = place + above
    if signed:
        expected = np.where(negative, 127 - np.minimum(expected, 127), 127 + expected)
    shuffled = np.random.default_rng(0).permutation(len(place))
    fours = shuffled.reshape(-1, 4).T
    differences = np.where(above, np.float32(-1e-45), np.float32(0.0)).view(np.uint32)
    elements = np.where(negative, np.float32(-0.1), np.float32(0.1)).view(np.uint32)
    together = np.ascontiguousarray(place[shuffled].astype(np.uint8)).view(np.uint32)
    operands = [together, *(differences[each] for each in fours)]
    operands += [elements[each] for each in fours] if signed else []
    (found,) = run(ptx.codes_ptx(signed), 1, *operands)
    assert np.array_equal(found.view(np.uint8), expected[shuffled])
