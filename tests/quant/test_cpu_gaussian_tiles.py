"""The pieces that `eden` and `wf` share on the CPU, each against its counterpart in torch: all equal to the bit."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tahq.quant import bit_planes
from tahq.quant.cpu.hadamard import hadamard
from tahq.quant.cpu.levels import (
    ScaledLevels,
    allocate,
    find_index,
    find_level,
    levels,
    nearest_code,
    read_widths,
    scale_levels,
    scale_of,
    stochastic_code,
    write_codes,
)
from tahq.quant.cpu.numbers import Key, hash_of
from tahq.quant.gaussian import bit_allocation, small_scale
from tahq.quant.gaussian.levels import magnitude_indices, magnitudes_of, signed_codes, threshold_table
from tahq.quant.stochastic_rounding import hashes
from tahq.quant.tiling import hadamard as reference_hadamard

ONE = np.float32(1.0)


def magnitudes_around(bits, scale):
    """Every scaled threshold and its neighbours in fp32, 0, and what lies far beyond; [1, G]."""
    borders = threshold_table()[bits, : 2 ** (bits - 1) - 1] * np.float32(scale)
    far = np.array([0.0, 1e-45, scale * 6, scale * 1e6, 3e38], np.float32)
    around = [np.nextafter(borders, np.float32(side)) for side in (0, np.inf)]
    found = np.concatenate((borders, *around, far)).astype(np.float32)
    return np.pad(found, (0, -found.size % 8))


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("scale", [1.0, 0.7, 1e-4, 1.9e4, 3e-30, 1e-38, 1e-42, 0.0])
def test_indices_and_levels_equal_the_reference_at_every_threshold(bits, scale):
    z, width, step = magnitudes_around(bits, scale), torch.tensor([bits]), torch.tensor([scale])
    scaled = ScaledLevels.of(z.size)
    scale_levels(levels(), bits, np.float32(scale), ONE, scaled)
    find_index(levels(), bits, np.float32(scale), z, scaled)
    index = magnitude_indices(torch.from_numpy(z).view(1, -1), step, width)
    assert scaled.indices.tolist() == index[0].tolist()
    find_level(levels(), bits, np.float32(scale), z, scaled)
    assert scaled.level.tolist() == magnitudes_of(index, width)[0].tolist()


@pytest.mark.parametrize("bits", range(1, 9))
def test_signs_make_codes_as_the_reference_has_them(bits):
    z = np.array([0.0, -0.0, 1e-45, -1e-45, 1.0, -1.0, 9.0, -9.0], np.float32)
    index = np.arange(8, dtype=np.int32) % 2 ** (bits - 1)
    codes = np.empty(8, np.uint8)
    write_codes(z, bits, index, codes)
    expected = signed_codes(torch.from_numpy(z).view(1, -1), torch.from_numpy(index).view(1, -1), torch.tensor([bits]))
    assert codes.tolist() == expected[0].tolist()


def test_small_scales_equal_the_reference():
    codes = torch.arange(255, dtype=torch.uint8)
    values = small_scale.value_of(codes)
    assert [float(scale_of(int(code))) for code in codes] == values.tolist()
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 0x7F000000, (4000,), dtype=torch.int32, generator=generator)
    around = torch.cat((values.view(torch.int32), values.view(torch.int32)[1:] + (1 << 19), bits))
    tried = torch.cat((around, around + 1, (around - 1).clamp(min=0))).view(torch.float32)
    assert [int(nearest_code(value)) for value in tried.numpy()] == small_scale.nearest_code(tried).tolist()
    draws = torch.randint(0, 1 << 20, tried.shape, dtype=torch.int32, generator=generator)
    rounded = [int(stochastic_code(value, draw)) for value, draw in zip(tried.numpy(), draws.numpy(), strict=True)]
    assert rounded == small_scale.stochastic_code(tried, draws).tolist()


@pytest.mark.parametrize("key", [0, 1, 0xFEDCBA9876543210, 2**64 - 1])
@pytest.mark.parametrize("first", [0, 2**31 - 3, 2**31, 2**32 - 3])
def test_hashes_equal_the_reference(key, first):
    expected = hashes(first, 6, key, torch.device("cpu"))
    assert [int(hash_of(first + i, Key.of(key))) for i in range(6)] == [word & 0xFFFFFFFF for word in expected.tolist()]


@given(
    tile_levels=st.lists(st.integers(0, 511), min_size=1, max_size=40)
    | st.lists(st.sampled_from([0, 250, 256, 262, 511]), min_size=1, max_size=40),
    spent=st.floats(0, 1),
)
def test_widths_equal_the_reference(tile_levels, spent):
    count = len(tile_levels)
    budget = count + round(spent * 7 * count)
    expected = bit_allocation.allocate(torch.tensor(tile_levels, dtype=torch.int32), budget)
    packed = np.zeros(-(-3 * count // 8), np.uint8)
    starts = allocate(np.array(tile_levels, np.int32), budget, packed)
    assert np.diff(starts).tolist() == expected.tolist()
    assert starts[-1] == budget
    assert packed.tolist() == bit_planes.pack_numbers((expected - 1).to(torch.uint8), 3).tolist()
    read = np.empty_like(starts)
    read_widths(packed, read)
    assert np.array_equal(read, starts)


@pytest.mark.parametrize("group", [8, 16, 32, 64, 128, 256])
def test_transform_equals_the_reference(group):
    generator = torch.Generator().manual_seed(group)
    x = torch.randn(3, group, generator=generator) * torch.tensor([[1.0], [1e-39], [1e30]])
    x[:, ::3] = -0.0
    y = x.clone().numpy()
    for row in y:
        hadamard(row, np.float32(group**-0.5))
    assert torch.equal(torch.from_numpy(y).view(torch.int32), reference_hadamard(x).view(torch.int32))
