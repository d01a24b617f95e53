"""AGoQ's formats: codes, packing, and numbers that are not finite."""

import pytest
import torch

from tahq.memory.small_floats.block_codes import (
    BLOCK,
    FORMATS,
    BlockCodes,
    dequantize_blocks,
    quantize_blocks,
    stored_nbytes,
)

every_format = pytest.mark.parametrize("bits", FORMATS)


def numbers_of(bits: int) -> torch.Tensor:
    """All finite numbers of a format, from its definition."""
    by = FORMATS[bits]
    numbers = []
    for exponent in range(2**by.exponent):
        for fraction in range(2**by.fraction):
            whole = fraction / 2**by.fraction + (exponent > 0)
            numbers.append(whole * 2.0 ** (max(exponent, 1) - 2 ** (by.exponent - 1) + 1))
    found = torch.tensor([number for number in numbers if number <= by.largest])
    return torch.cat((found, -found)).unique()


def in_blocks(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(x.flatten(), (0, -x.numel() % BLOCK)).view(-1, BLOCK)


@every_format
def test_format_has_the_largest_and_smallest_numbers_that_it_names(bits):
    smallest = {4: 0.5, 5: 0.25, 6: 0.125, 8: 2.0**-9}[bits]
    numbers = numbers_of(bits)
    assert numbers.max() == FORMATS[bits].largest
    assert numbers[numbers > 0].min() == smallest


@every_format
@pytest.mark.parametrize("shape", [(1,), (128,), (3, 300), (2, 5, 7)], ids=str)
@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float32])
def test_every_number_becomes_the_nearest_of_its_format(bits, shape, scale_dtype):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(bits)) * 3
    coded = quantize_blocks(x, bits, scale_dtype)
    decoded = dequantize_blocks(coded, x.shape)
    scales = coded.scales.double()[:, None]
    wanted, got = in_blocks(x) / scales, in_blocks(decoded) / scales
    distance = (wanted[..., None] - numbers_of(bits)).abs().amin(-1)
    assert ((got - wanted).abs() <= distance + 1e-6 * wanted.abs()).all()  # the scale's reciprocal is rounded
    assert coded.codes.numel() + coded.scales.nbytes == stored_nbytes(x.numel(), bits, scale_dtype.itemsize)


@every_format
def test_ties_go_to_even_codes(bits):
    numbers = numbers_of(bits)
    positive = numbers[numbers >= 0]
    ties = (positive[1:] + positive[:-1]) / 2
    x = torch.cat((torch.tensor([FORMATS[bits].largest]), ties))[:BLOCK]
    decoded = dequantize_blocks(quantize_blocks(x, bits), x.shape)
    places = torch.searchsorted(positive, decoded[1:].contiguous())
    assert torch.equal(positive[places], decoded[1:])
    assert not (places % 2).any()


@every_format
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_makes_its_block_nan_and_no_other(bits, broken):
    x = torch.full((3 * BLOCK,), FORMATS[bits].largest)
    x[BLOCK + 5] = broken
    decoded = dequantize_blocks(quantize_blocks(x, bits), x.shape).view(3, BLOCK)
    assert decoded[1].isnan().all()
    assert torch.equal(decoded[[0, 2]], x.view(3, BLOCK)[[0, 2]])


@every_format
@pytest.mark.parametrize("size", [0.0, 2.0**-140, 2.0**100])
def test_zeros_and_extreme_blocks_stay_finite(bits, size):
    x = torch.full((BLOCK + 1,), -size * FORMATS[bits].largest)
    decoded = dequantize_blocks(quantize_blocks(x, bits), x.shape)
    assert torch.equal(decoded, x if size != 2.0**-140 else torch.zeros_like(x))


def test_four_bits_are_really_packed():
    x = torch.tensor([6.0, -0.5, *[0.0] * 126])
    coded = quantize_blocks(x, 4)
    assert isinstance(coded, BlockCodes)
    assert coded.codes.shape == (1, 64)
    assert coded.codes[0, 0] == 7 | 9 << 4
    assert stored_nbytes(4096, 4) * 8 / 4096 == 4.125
