"""How a tensor [..., C] is cut into tiles of G consecutive channels and put together again, scaled and transformed.

Shape letters: B samples, S tokens per sample, C channels, M tiles per token, G channels per tile,
T = B·S·M tiles in all. A tile never spans two tokens; where no allowed G divides C, every token's
last tile is filled up with zeros. Scaling and transforming are single IEEE operations in a fixed order, so
all devices agree to the bit.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from tahq.errors import CodecError
from tahq.quant.spec import MIN_GROUP

ENCODABLE = (torch.float32, torch.bfloat16, torch.float16)
TOP_EXPONENT = 10
"""A scaled tensor has its largest magnitude in [2^10, 2^11): times √256 it is below fp16's 65,504."""
MAX_EXPONENT = 127
"""The largest e of the factor 2^e that a tensor is multiplied by; e is sent as a signed byte."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """The tiles of one shape. A tensor of one dimension is one sample of one token."""

    shape: tuple[int, ...]
    group: int

    @classmethod
    def of(cls, shape: Sequence[int], group: int) -> "Tiling":
        """Tiles of `shape` with G channels: the largest power of two from 8 to `group` that divides C, else `group`."""
        checked = check_shape(shape)
        dividing = math.gcd(checked[-1], group)
        return cls(checked, dividing if dividing >= MIN_GROUP else group)

    @property
    def log2_group(self) -> int:
        """log2 G."""
        return self.group.bit_length() - 1

    @property
    def num_samples(self) -> int:
        """B."""
        return self.shape[0] if len(self.shape) > 1 else 1

    @property
    def tokens_per_sample(self) -> int:
        """S."""
        return math.prod(self.shape[1:-1])

    @property
    def channels(self) -> int:
        """C."""
        return self.shape[-1]

    @property
    def num_elements(self) -> int:
        """B·S·C."""
        return math.prod(self.shape)

    @property
    def tiles_per_token(self) -> int:
        """M."""
        return -(-self.channels // self.group)

    @property
    def tiles_per_sample(self) -> int:
        """S·M."""
        return self.tokens_per_sample * self.tiles_per_token

    @property
    def num_tiles(self) -> int:
        """T."""
        return self.num_samples * self.tiles_per_sample

    @property
    def padding(self) -> int:
        """Zeros behind the channels of every token, in its last tile."""
        return self.tiles_per_token * self.group - self.channels

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """Contiguous tiles [B, S, M, G] of x in fp32; do not write to them, as they may share x's memory."""
        tokens = x.reshape(self.num_samples, self.tokens_per_sample, self.channels).contiguous().to(torch.float32)
        padded = functional.pad(tokens, (0, self.padding)) if self.padding else tokens
        return padded.reshape(self.num_samples, self.tokens_per_sample, self.tiles_per_token, self.group)

    def join(self, tiles: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor of `shape` and `dtype` from fp32 tiles [B, S, M, G], which may be overwritten.

        A finite value beyond the largest of `dtype` becomes that largest; NaN stays NaN.
        """
        largest = torch.finfo(dtype).max
        padded = tiles.reshape(self.num_samples, self.tokens_per_sample, self.tiles_per_token * self.group)
        tokens = padded.clamp_(-largest, largest)[..., : self.channels]
        return tokens.to(dtype).reshape(self.shape).contiguous()


def check_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape as a tuple; CodecError for one without dimensions, or with a negative one."""
    checked = tuple(map(int, shape))
    if not checked or min(checked) < 0:
        raise CodecError(f"a codec takes tensors [..., C] of one dimension or more; got shape {list(checked)}")
    return checked


def check_encodable(x: torch.Tensor) -> None:
    """Refuse a dtype other than fp32, bf16 and fp16, or a tensor without dimensions."""
    if x.dtype not in ENCODABLE:
        raise CodecError(f"a codec takes fp32, bf16 or fp16; got {x.dtype}: convert it first")
    check_shape(x.shape)


def check_decodable(dtype: torch.dtype) -> None:
    """Refuse a dtype other than fp32, bf16 and fp16."""
    if dtype not in ENCODABLE:
        raise CodecError(f"a codec decodes to fp32, bf16 or fp16; got {dtype}: decode to one of them and convert")


def largest_magnitude(x: torch.Tensor) -> torch.Tensor:
    """max|x| of each tile: fp32 [...] of fp32 [..., G], never −0, and without a temporary of x's size."""
    return torch.maximum(x.amax(dim=-1), -x.amin(dim=-1)).abs_()


def top_exponent(x: torch.Tensor, finite: torch.Tensor, top: int) -> torch.Tensor:
    """The power of two that takes the largest magnitude of x into [2^top, 2^(top+1)): c of Eq. 24 as 2^e.

    e = top − ⌊log2 max|x|⌋, at most 127, over the tiles of fp32 [..., G] that are marked finite; 0 where all are zero.
    An int32 without dimensions, never below top − 127.
    """
    known = torch.where(finite, largest_magnitude(x), 0.0).flatten()
    overall = functional.pad(known, (0, 1)).amax()  # one zero more: there may be no tile at all
    floor_log2 = torch.frexp(overall).exponent - 1
    return torch.where(overall > 0, top - floor_log2, 0).clamp(max=MAX_EXPONENT).to(torch.int32)


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2^exponent in fp32, exactly, for exponents from −127 (which is subnormal) to 127."""
    bits = (exponent + 127) * 2**23 + (exponent == -127).to(torch.int32) * 2**22
    return bits.to(torch.int32).view(torch.float32)


def hadamard(tiles: torch.Tensor) -> torch.Tensor:
    """α·H/√G, H being Sylvester's ±1 matrix; orthonormal and symmetric, so its own inverse.

    Butterflies (a, b) → (a + b, a − b) over channels that lie h = 1, 2, … G/2 apart, in this order,
    then one multiplication by fp32(1/√G). Takes fp32 [T, G], G a power of two.
    """
    count, group = tiles.shape
    distance = 1
    while distance < group:
        pairs = tiles.view(count, group // (2 * distance), 2, distance)
        a, b = pairs[:, :, 0], pairs[:, :, 1]
        tiles = torch.stack((a + b, a - b), dim=2).view(count, group)
        distance *= 2
    return tiles.mul_(float(group**-0.5))
