"""Block-wise 8-bit codes against a search, and the inline assembly of their kernels, instruction by instruction."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.ptx import run
from support.samples import normal

from tahq.memory.adam import blockwise8_kernels as ptx
from tahq.memory.adam.blockwise8 import BLOCK, borders, decode, dynamic_map, encode

both = pytest.mark.parametrize("signed", [True, False])


def round_trip(x, signed, block=BLOCK):
    codes, scales = encode(x, signed, block)
    return decode(codes, scales, signed, block).view(x.shape)


def nearest_by_search(x, signed, block=BLOCK):
    """Codes by looking at all 256 values of the map for every element, in fp64."""
    values = dynamic_map(signed).double()
    codes = []
    for piece in x.flatten().split(block):
        quotients = (piece / piece.abs().max()).double()
        distances = (quotients[:, None] - values).abs()
        if not signed:
            distances[quotients > 0, 0] = torch.inf
        codes.append(distances.argmin(dim=1))
    return torch.cat(codes).to(torch.uint8)


@both
def test_map_is_ascending_and_its_values_come_back(signed):
    values = dynamic_map(signed)
    assert values.shape == (256,)
    assert (values.diff() > 0).all()
    assert values[127 if signed else 0] == 0.0
    codes, scales = encode(values, signed)
    assert torch.equal(codes, torch.arange(256, dtype=torch.uint8))
    assert scales.tolist() == [1.0]
    assert torch.equal(decode(codes, scales, signed), values)


def test_map_by_hand():
    # signed: one value in the lowest decade, 10⁻⁶·(0.1 + 0.45); two in the next, 10⁻⁵·(0.1 + 0.225) and ·(0.1 + 0.675)
    assert dynamic_map(True)[128:131].tolist() == pytest.approx([5.5e-7, 3.25e-6, 7.75e-6])
    assert torch.equal(dynamic_map(True)[:127], -dynamic_map(True)[128:255].flip(0))
    # unsigned: twice as many; 64 · 2 cells of 0.9/128 up to 1
    assert dynamic_map(False)[1:4].tolist() == pytest.approx([3.25e-7, 7.75e-7, 2.125e-6])
    assert dynamic_map(False)[254].item() == pytest.approx(1 - 0.45 / 128)


@both
@pytest.mark.parametrize("shape", [(1,), (255,), (256,), (257,), (2, 3, 5), (5, 301), ()], ids=str)
@pytest.mark.parametrize("block", [64, BLOCK])
def test_codes_are_nearest_values_by_exhaustive_search(signed, shape, block):
    x = normal(shape) * 10 ** normal(shape, seed=1)
    x = x if signed else x.square()
    codes, scales = encode(x, signed, block)
    assert torch.equal(codes, nearest_by_search(x, signed, block))
    assert (codes.dtype, codes.numel()) == (torch.uint8, x.numel())
    assert (scales.dtype, scales.numel()) == (torch.float32, -(-x.numel() // block))


@both
@pytest.mark.parametrize("scale", [2.0**-126, 3e-30, 0.7, 1.0, 1.9999999, 3e38])
def test_codes_at_and_beside_every_border_equal_a_search_among_borders(signed, scale):
    """An element halfway between two values rounds towards 0."""
    limits = borders(signed) * scale
    x = torch.cat([limits, torch.nextafter(limits, torch.tensor(3e38)), torch.nextafter(limits, torch.tensor(0.0))])
    x = torch.cat([x, torch.rand(5000, generator=torch.Generator().manual_seed(0)) ** 6 * scale])
    rows = torch.nn.functional.pad(x, (0, -len(x) % 255)).view(-1, 255)
    rows = torch.cat([torch.full((len(rows), 1), scale), rows], dim=1)
    expected = torch.searchsorted(limits, rows) + (127 if signed else 0)
    assert torch.equal(encode(rows, signed)[0], expected.flatten().to(torch.uint8))
    if signed:  # negative elements alike, below one of the scale
        rows[:, 1:] *= -1
        assert torch.equal(encode(rows, True)[0].view(rows.shape)[:, 1:].int(), 254 - expected[:, 1:].clamp(max=254))


@both
@pytest.mark.parametrize("value", [0.0, 2.0**-126, 1e-30, 3.5, 3e38, torch.finfo(torch.float32).max])
def test_constant_blocks_are_exact(signed, value):
    x = torch.full((300,), value)
    assert torch.equal(round_trip(x, signed), x)
    if signed:
        torch.testing.assert_close(round_trip(-x, signed), -x * (1 - 0.45 / 64), rtol=1e-6, atol=0)


@both
def test_subnormal_blocks_are_zeros(signed):
    codes, scales = encode(torch.full((10,), 2.0**-127), signed)
    assert scales.tolist() == [0.0]
    assert codes.eq(127 if signed else 0).all()


@both
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_block_that_is_not_finite_is_nan_and_its_neighbours_are_not(signed, bad):
    x = normal(768).abs()
    x[300] = bad
    found = round_trip(x, signed)
    assert found[256:512].isnan().all()
    assert not found[:256].isnan().any()
    assert not found[512:].isnan().any()
    assert (encode(x, signed)[0][256:512] == (127 if signed else 0)).all()


def test_without_a_sign_only_zero_and_negative_elements_are_zero():
    x = torch.tensor([1.0, 1e-7, 1e-30, 0.0])
    lowest = dynamic_map(False)[1].item()
    assert round_trip(x, signed=False).tolist() == [1.0, lowest, lowest, 0.0]
    assert round_trip(x, signed=True).tolist() == [1.0, 0.0, 0.0, 0.0]
    assert round_trip(torch.tensor([-8.0, 0.5, 1.0]), signed=False)[0] == 0
    assert encode(torch.tensor([-8.0, -1.0]), signed=False)[1].tolist() == [0.0]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1, max_size=600),
    st.sampled_from([16, 256]),
    st.booleans(),
)
def test_encoding_twice_changes_nothing(values, block, signed):
    """Where the largest magnitude is positive it is kept, and with it every value."""
    x = torch.tensor(values).abs()
    once = round_trip(x, signed, block)
    assert torch.equal(round_trip(once, signed, block), once)


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
    """All quotients that round to one fp16 number lie between the borders before and after the one compared."""
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
