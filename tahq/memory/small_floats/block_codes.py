"""Small floating-point numbers in blocks of 128 with one scale: AGoQ's stored activations and gradients.

    scale = max|x|/Δmax,   code = round(x/scale) to the nearest number of the format, ties to even

Formats by their bits, with e bits of exponent and m of fraction beside the sign (the paper names FP4 and FP8 only):

    bits    format   Δmax   smallest
    4       E2M1     6      0.5
    5       E2M2     7      0.25
    6       E2M3     7.5    0.125
    8       E4M3     448    2⁻⁹

A block of b bits is 16·b bytes: its low four bits two codes per byte, the first in the lower half, then a plane of 16
bytes for each further bit, bit i of a plane being code i's; 8 bits are a byte per code. Blocks run through a tensor as
it lies in memory; the last one is padded with zeros. With bf16 scales 4 bits are 4.125 per element.

A scale that is not finite becomes NaN, and with it all numbers of its block: no FP4 code stands for NaN.

Plain torch on any device, bit-equal on all of them and to the kernels of CUDA (`kernels`).

Source: AGoQ §4.1.2 (blocks of 128), §5 (gradients). Letters: N numbers, K = ⌈N/128⌉ blocks.
"""

import math
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch.nn import functional

from tahq.quant.bit_planes import empty_planes, from_planes, to_planes

BLOCK = 128
SMALLEST_SCALE = 2.0**-120
"""Lower limit of scales: they and their reciprocals are normal numbers of fp32. Zeros stay zeros."""


_FIRST_WITH_FP8 = (8, 9)


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """A format with `exponent` and `fraction` bits; bias 2^(exponent − 1) − 1."""

    bits: int
    exponent: int
    fraction: int
    largest: float

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number, and of those below it."""
        return 2 - (1 << (self.exponent - 1))

    @property
    def block_nbytes(self) -> int:
        """Bytes of a block's codes."""
        return BLOCK * self.bits // 8


FORMATS = {
    4: BlockFormat(4, 2, 1, 6.0),
    5: BlockFormat(5, 2, 2, 7.0),
    6: BlockFormat(6, 2, 3, 7.5),
    8: BlockFormat(8, 4, 3, 448.0),
}
"""By bits."""


class BlockCodes(NamedTuple):
    """A tensor of N numbers in blocks.

    `codes`: uint8 [K, 16·bits]; `scales`: [K], bf16 or fp32.
    """

    codes: torch.Tensor
    scales: torch.Tensor

    @property
    def bits(self) -> int:
        """Of a code."""
        return self.codes.shape[1] * 8 // BLOCK


def stored_nbytes(numel: int, bits: int, scale_nbytes: int = 2) -> int:
    """Bytes of the codes and scales of N numbers."""
    return math.ceil(numel / BLOCK) * (FORMATS[bits].block_nbytes + scale_nbytes)


def in_blocks(flat: torch.Tensor, size: int) -> torch.Tensor:
    """[N] as [⌈N/size⌉, size], the last block padded with zeros; a view unless padding is needed."""
    padding = -flat.numel() % size
    return (functional.pad(flat, (0, padding)) if padding else flat).view(-1, size)


def quantize_blocks(x: torch.Tensor, bits: int, scale_dtype: torch.dtype = torch.bfloat16) -> BlockCodes:
    """Codes and scales of a tensor of any shape."""
    by, blocks = FORMATS[bits], in_blocks(x.detach().reshape(-1), BLOCK).float()
    scales = (
        (torch.maximum(blocks.amax(1), -blocks.amin(1)) * (1 / by.largest)).clamp(min=SMALLEST_SCALE).to(scale_dtype)
    )
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    return BlockCodes(_packed(_codes(blocks * (1 / scales.float())[:, None], by), by), scales)


def dequantize_blocks(x: BlockCodes, shape: torch.Size) -> torch.Tensor:
    """fp32 of that shape; exact for bf16 scales, a code having 4 bits at most and a scale 8."""
    values = _values(x.codes, x.bits).mul_(x.scales.float()[:, None])
    return values.view(-1)[: shape.numel()].view(shape)


def _codes(y: torch.Tensor, by: BlockFormat) -> torch.Tensor:
    """uint8 codes of y [K, 128] in units of the scale, which is overwritten; of NaN any code."""
    if by.bits == 8:
        return y.clamp_(-by.largest, by.largest).to(torch.float8_e4m3fn).view(torch.uint8)
    sizes = y.abs().clamp_(max=by.largest)  # a scale may be rounded down
    exponents = (sizes.view(torch.int32) >> 23).sub_(127).clamp_(min=by.min_exponent)
    # size = n·2^(exponent − fraction); n below 2^(fraction + 1), or equal to it, and then code and carry agree
    power = exponents.neg().add_(by.fraction + 127).bitwise_left_shift_(23).view(torch.float32)
    units = sizes.mul_(power).round_().nan_to_num_().int()
    codes = units.add_(exponents.sub_(by.min_exponent).bitwise_left_shift_(by.fraction))
    negative = (y.view(torch.int32) >> 31).bitwise_and_(1 << (by.bits - 1))
    return codes.bitwise_or_(negative).to(torch.uint8)


@lru_cache(maxsize=16)
def _table(bits: int, device: torch.device) -> torch.Tensor:
    """Values of all codes, fp32; of 4 bits those of the two codes of every byte [256, 2]."""
    if bits == 8:
        return torch.arange(256, device=device, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    by = FORMATS[bits]
    magnitudes = torch.arange(2 ** (bits - 1))
    exponents = (magnitudes >> by.fraction).clamp(min=1)
    units = magnitudes - ((exponents - 1) << by.fraction)
    values = torch.ldexp(units.float(), exponents - 1 + by.min_exponent - by.fraction)
    table = torch.cat((values, -values))
    if bits == 4:
        each = torch.arange(256)
        table = torch.stack((table[each % 16], table[each // 16]), dim=1)
    return table.to(device)


def _values(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """fp32 [K, 128] of packed codes."""
    if bits == 8 and packed.device.type != "cpu":  # where a table is four times as fast
        return packed.view(torch.float8_e4m3fn).float()
    codes = packed if bits in (4, 8) else _unpacked(packed, bits)
    looked_up = _table(bits, packed.device).index_select(0, codes.flatten().int())
    return looked_up.view(-1, BLOCK)


def _packed(codes: torch.Tensor, by: BlockFormat) -> torch.Tensor:
    if by.bits == 8:
        return codes
    low = codes if by.bits == 4 else codes & 15
    two = low.view(torch.int16)  # the first in the lower byte
    pairs = (two | (two >> 4)).to(torch.uint8)
    if by.bits == 4:
        return pairs
    return torch.cat((pairs, to_planes(codes)[:, 4 : by.bits].flatten(1)), dim=1)


def _unpacked(packed: torch.Tensor, bits: int) -> torch.Tensor:
    pairs = packed[:, : BLOCK // 2]
    planes = empty_planes(len(packed), BLOCK, packed.device)
    planes[:, 4:bits] = packed[:, BLOCK // 2 :].view(-1, bits - 4, BLOCK // 8)
    return from_planes(planes) | torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(1)


@cache
def has_fp8_units(device: torch.device) -> bool:
    """Whether a device has FP8 conversions and products: NVIDIA's from compute capability 8.9 on."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= _FIRST_WITH_FP8
