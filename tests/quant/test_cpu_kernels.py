"""The pieces that the CPU backends share, at the edges that whole streams rarely meet: rounding, ties, thresholds."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tahq.quant.cpu.kernel import MIN_ELEMENTS_PER_THREAD, Team, split
from tahq.quant.cpu.levels import (
    ScaledLevels,
    find_index,
    find_level,
    levels,
    nearest_code,
    scale_levels,
    scale_of,
    stochastic_code,
)
from tahq.quant.cpu.numbers import Key, Values, hash_of, largest_magnitude, read_scaled, write_scaled
from tahq.quant.gaussian import small_scale
from tahq.quant.gaussian.levels import magnitude_indices, magnitudes_of, threshold_table
from tahq.quant.stochastic_rounding import hashes
from tahq.quant.tah.cpu_select import NUM_COUNTS, mark_smallest

F = np.float32
ONE = F(1.0)


def finite_halves():
    patterns = np.arange(65536, dtype=np.uint16)
    return patterns[(patterns & 0x7C00) != 0x7C00]


def test_every_finite_fp16_is_read_exactly():
    patterns = finite_halves()
    got = np.empty(patterns.size, F)
    read_scaled(Values(2, np.empty(0, F), patterns.view(np.int16), F(65504)), 0, ONE, got)
    np.testing.assert_array_equal(got.view(np.int32), patterns.view(np.float16).astype(F).view(np.int32))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_narrow_types_are_rounded_to_nearest_even(dtype):
    """Every value of the type, what lies between it and the next, and the neighbours of all of these in fp32."""
    patterns = torch.arange(0x7C00 if dtype is torch.float16 else 0x7F80, dtype=torch.int16)
    exact = patterns.view(dtype).float().numpy()
    points = np.concatenate((exact, ((exact[:-1].astype(np.float64) + exact[1:]) / 2).astype(F)))
    near = np.concatenate((points, np.nextafter(points, F(0)), np.nextafter(points, exact[-1])))
    cases = np.concatenate((near, -near))
    got = torch.empty(cases.size, dtype=dtype)
    write_scaled(cases, ONE, Values.of(got), 0)
    assert torch.equal(got.view(torch.int16), torch.from_numpy(cases).to(dtype).view(torch.int16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_values_that_are_not_finite_are_seen_wherever_they_are_and_never_written(dtype):
    out = torch.zeros(5, dtype=dtype)
    write_scaled(np.array([3e38, -3e38, 1.0, 0.0, -1.0], F), F(2.0), Values.of(out), 0)
    largest = torch.finfo(dtype).max
    assert out.tolist() == [largest, -largest, 2.0, 0.0, -2.0]
    for count in (1, 8, 64, 100):
        x = torch.linspace(-3, 2, count).to(dtype)
        assert np.int32(largest_magnitude(Values.of(x), 0, count)).view(F) == x.float().abs().max()
        for place, bad in zip((0, count // 2, count - 1), (torch.nan, torch.inf, -torch.inf), strict=True):
            spoiled = x.clone()
            spoiled[place] = bad
            assert largest_magnitude(Values.of(spoiled), 0, count) >= 0x7F800000


@given(rows=st.integers(1, 3), data=st.data(), length=st.integers(1, 40), few=st.booleans())
def test_selection_is_that_of_a_stable_sort(rows, data, length, few):
    element = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-45]) if few else st.floats(width=32, allow_nan=False)
    values = data.draw(arrays.arrays(F, rows * length, elements=element))
    count = data.draw(st.integers(0, length))
    expected = np.ones((rows, length), np.uint8)
    order = values.reshape(rows, length).argsort(axis=1, kind="stable")
    np.put_along_axis(expected, order[:, :count], 0, axis=1)
    is_larger = np.full(values.size, 9, np.uint8)
    mark_smallest(values, length, count, 0, rows, is_larger, np.empty(NUM_COUNTS, np.int64))
    np.testing.assert_array_equal(is_larger.reshape(rows, length), expected)


@pytest.mark.parametrize("bits", range(1, 9))
def test_indices_and_levels_equal_the_reference_at_every_threshold(bits):
    """Every scaled threshold and its neighbours in fp32, 0, and what lies far beyond."""
    for scale in (1.0, 0.7, 1e-4, 1.9e4, 3e-30, 1e-38, 1e-42, 0.0):
        borders = threshold_table()[bits, : 2 ** (bits - 1) - 1] * F(scale)
        far = np.array([0.0, 1e-45, scale * 6, scale * 1e6, 3e38], F)
        around = [np.nextafter(borders, F(side)) for side in (0, np.inf)]
        z = np.concatenate((borders, *around, far)).astype(F)
        z = np.pad(z, (0, -z.size % 8))
        width, step, scaled = torch.tensor([bits]), torch.tensor([scale]), ScaledLevels.of(z.size)
        scale_levels(levels(), bits, F(scale), ONE, scaled)
        find_index(levels(), bits, F(scale), z, scaled)
        index = magnitude_indices(torch.from_numpy(z).view(1, -1), step, width)
        assert scaled.indices.tolist() == index[0].tolist()
        find_level(levels(), bits, F(scale), z, scaled)
        assert scaled.level.tolist() == magnitudes_of(index, width)[0].tolist()


def test_small_scales_equal_the_reference():
    codes = torch.arange(255, dtype=torch.uint8)
    values = small_scale.value_of(codes)
    assert [float(scale_of(int(code))) for code in codes] == values.tolist()
    around = torch.cat((values.view(torch.int32), values.view(torch.int32)[1:] + (1 << 19)))
    tried = torch.cat((around, around + 1, (around - 1).clamp(min=0))).view(torch.float32)
    assert [int(nearest_code(value)) for value in tried.numpy()] == small_scale.nearest_code(tried).tolist()
    draws = torch.randint(0, 1 << 20, tried.shape, dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    rounded = [int(stochastic_code(value, draw)) for value, draw in zip(tried.numpy(), draws.numpy(), strict=True)]
    assert rounded == small_scale.stochastic_code(tried, draws).tolist()


@pytest.mark.parametrize("key", [0, 1, 0xFEDCBA9876543210, 2**64 - 1])
@pytest.mark.parametrize("first", [0, 2**31 - 3, 2**32 - 3])
def test_hashes_equal_the_reference(key, first):
    expected = hashes(first, 6, key, torch.device("cpu"))
    assert [int(hash_of(first + i, Key.of(key))) for i in range(6)] == [word & 0xFFFFFFFF for word in expected.tolist()]


@given(count=st.integers(0, 100), parts=st.integers(1, 9), multiple_of=st.sampled_from([1, 8]))
def test_ranges_cover_everything_once_and_start_at_multiples(count, parts, multiple_of):
    ranges = split(count, parts, multiple_of)
    assert 1 <= len(ranges) <= parts
    assert (ranges[0][0], ranges[-1][1]) == (0, count)
    assert all(first % multiple_of == 0 for first, _ in ranges)
    assert all(stop == first for (_, stop), (first, _) in pairwise(ranges))


def test_team_returns_results_in_order_and_passes_errors_on():
    with Team(3, 3 * MIN_ELEMENTS_PER_THREAD) as team:
        assert team.share(9, lambda first, stop: (first, stop)) == [(0, 3), (3, 6), (6, 9)]
        with pytest.raises(ZeroDivisionError):
            team.share(9, lambda first, stop: 1 // (first - 6))
