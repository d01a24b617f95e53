"""The pieces that the CPU backends share: numbers as bits, planes, selection, threads."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tahq.quant import bit_planes
from tahq.quant.cpu.kernel import MIN_ELEMENTS_A_THREAD, Team, split
from tahq.quant.cpu.numbers import (
    Key,
    Values,
    float_to_bf16,
    float_to_half,
    half_to_float,
    largest_magnitude,
    read_scaled,
    write_scaled,
)
from tahq.quant.cpu.planes import read_number, read_planes, write_number, write_planes
from tahq.quant.cpu.tiles import top_exponent
from tahq.quant.fixed.cpu import draw
from tahq.quant.stochastic_rounding import draws
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
    assert half_to_float(0xBC00) == -1


def rounding_cases(narrow):
    """Every value of a 16-bit type, what lies between it and the next, and the neighbours of all of these in fp32."""
    exact = np.sort(narrow[narrow >= 0])
    between = ((exact[:-1].astype(np.float64) + exact[1:]) / 2).astype(F)
    points = np.concatenate((exact, between))
    near = np.concatenate((points, np.nextafter(points, F(0)), np.nextafter(points, exact[-1])))
    return np.concatenate((near, -near))


def test_fp16_is_rounded_to_nearest_even():
    cases = rounding_cases(finite_halves().view(np.float16).astype(F))
    got = np.empty(cases.size, np.int16)
    write_scaled(cases, ONE, Values(2, np.empty(0, F), got, F(65504)), 0)
    np.testing.assert_array_equal(got.view(np.uint16), cases.astype(np.float16).view(np.uint16))
    assert float_to_half(F(2.0**-25)) == 0
    assert float_to_half(F(3.0 * 2.0**-25)) == 2


def test_bf16_is_rounded_to_nearest_even():
    patterns = (np.arange(0x7F80, dtype=np.uint32) << 16).view(F)
    cases = rounding_cases(patterns)
    got = np.empty(cases.size, np.int16)
    write_scaled(cases, ONE, Values(1, np.empty(0, F), got, patterns[-1]), 0)
    expected = torch.from_numpy(cases).to(torch.bfloat16).view(torch.int16).numpy()
    np.testing.assert_array_equal(got, expected)
    assert float_to_bf16(F(1.0 + 2.0**-8)) == 0x3F80


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_nothing_finite_is_written_as_infinity(dtype):
    out = torch.zeros(5, dtype=dtype)
    values = np.array([3e38, -3e38, 1.0, 0.0, -1.0], F)
    write_scaled(values, F(2.0), Values.of(out), 0)
    largest = torch.finfo(dtype).max
    assert out.tolist() == [largest, -largest, 2.0, 0.0, -2.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_largest_magnitude_sees_what_is_not_finite_wherever_it_is(dtype, bad):
    for count in (1, 8, 64, 100):
        x = torch.linspace(-3, 2, count).to(dtype)
        expected = x.float().abs().max()
        assert np.int32(largest_magnitude(Values.of(x), 0, count)).view(F) == expected
        for place in {0, count // 2, count - 1}:
            spoiled = x.clone()
            spoiled[place] = bad
            assert largest_magnitude(Values.of(spoiled), 0, count) >= 0x7F800000


@pytest.mark.parametrize("group", [8, 16, 32, 64, 128, 256])
def test_planes_equal_the_references_and_come_back(group):
    codes = np.random.default_rng(group).integers(0, 256, group).astype(np.uint8)
    expected = bit_planes.to_planes(torch.from_numpy(codes)[None])[0].numpy()
    for first, num_bits in ((0, 8), (0, 3), (3, 1), (2, 6)):
        plane = group // 8
        out = np.full(num_bits * plane + 2, 0xAA, np.uint8)
        write_planes(codes.view(np.uint64), first, num_bits, out, 1)
        np.testing.assert_array_equal(out[1:-1].reshape(num_bits, plane), expected[first : first + num_bits])
        assert out[0] == out[-1] == 0xAA
        words = np.zeros(plane, np.uint64)
        read_planes(out, 1, first, num_bits, words)
        np.testing.assert_array_equal(words.view(np.uint8), codes & ((1 << num_bits) - 1) << first)


@pytest.mark.parametrize("width", range(1, 9))
def test_numbers_are_packed_as_the_reference_does(width):
    numbers = np.random.default_rng(width).integers(0, 1 << width, 37).astype(np.uint8)
    packed = np.zeros(-(-37 * width // 8), np.uint8)
    for index, number in enumerate(numbers):
        write_number(int(number), index, width, packed)
    expected = bit_planes.pack_numbers(torch.from_numpy(numbers), width).numpy()
    np.testing.assert_array_equal(packed, expected)
    assert [read_number(index, width, packed) for index in range(37)] == numbers.tolist()


def marked(values, length, count):
    is_larger = np.full(values.size, 9, np.uint8)
    rows = values.size // length
    mark_smallest(values, length, count, 0, rows, is_larger, np.empty(NUM_COUNTS, np.int64))
    return is_larger.reshape(rows, length)


@given(
    rows=st.integers(1, 3),
    data=st.data(),
    length=st.integers(1, 40),
    few=st.booleans(),
)
def test_selection_is_that_of_a_stable_sort(rows, data, length, few):
    element = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-45]) if few else st.floats(width=32, allow_nan=False)
    values = data.draw(arrays.arrays(F, rows * length, elements=element))
    count = data.draw(st.integers(0, length))
    expected = np.ones((rows, length), np.uint8)
    order = values.reshape(rows, length).argsort(axis=1, kind="stable")
    np.put_along_axis(expected, order[:, :count], 0, axis=1)
    np.testing.assert_array_equal(marked(values, length, count), expected)


@pytest.mark.parametrize("largest", [0.0, 1e-45, 2.0**-117, 1.0, 1.9999999, 2.0, 3.4e38])
def test_exponent_takes_the_largest_to_the_top(largest):
    exponent = top_exponent(largest, 10)
    assert -117 <= exponent <= 127
    assert largest == 0 or exponent == 127 or 2.0**10 <= largest * 2.0**exponent < 2.0**11


@given(count=st.integers(0, 100), parts=st.integers(1, 9), multiple_of=st.sampled_from([1, 8]))
def test_ranges_cover_everything_once_and_start_at_multiples(count, parts, multiple_of):
    ranges = split(count, parts, multiple_of)
    assert 1 <= len(ranges) <= parts
    assert ranges[0][0] == 0
    assert ranges[-1][1] == count
    assert all(first % multiple_of == 0 for first, _ in ranges)
    assert all(stop == first for (_, stop), (first, _) in pairwise(ranges))


@pytest.mark.parametrize("key", [0, 1, 0xFEDCBA9876543210, 2**64 - 1])
def test_draws_are_the_references(key):
    expected = draws(1000, key, torch.device("cpu")).numpy()
    np.testing.assert_array_equal(np.array([draw(index, Key.of(key)) for index in range(1000)]), expected)
    assert draw(2**32 + 5, Key.of(key)) == expected[5]


def test_team_returns_results_in_order_and_passes_errors_on():
    with Team(3, 3 * MIN_ELEMENTS_A_THREAD) as team:
        assert team.share(9, lambda first, stop: (first, stop)) == [(0, 3), (3, 6), (6, 9)]
        with pytest.raises(ZeroDivisionError):
            team.share(9, lambda first, stop: 1 // (first - 6))
