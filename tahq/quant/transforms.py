"""What every codec does to a tensor before it quantises: scale it by a power of two, and transform tiles.

Single IEEE operations in a fixed order, so all devices agree to the bit.
"""

import torch

TOP_EXPONENT = 10
"""What is coded has its largest magnitude in [2^10, 2^11): times √256 it is below fp16's 65,504."""
MAX_EXPONENT = 127
"""Of the power of two that a tensor is multiplied by; it travels as a signed byte."""


def largest_magnitude(x: torch.Tensor) -> torch.Tensor:
    """max|x| of each tile: fp32 [...] of fp32 [..., G], never −0, and without a temporary of x's size."""
    return torch.maximum(x.amax(dim=-1), -x.amin(dim=-1)).abs_()


def top_exponent(x: torch.Tensor, finite: torch.Tensor, top: int) -> torch.Tensor:
    """The power of two that takes the largest magnitude of x into [2^top, 2^(top+1)): c of Eq. 24 as 2^e.

    e = top − ⌊log2 max|x|⌋, at most 127, over the tiles of fp32 [..., G] that are marked finite; 0 where all are zero.
    An int32 without dimensions, never below top − 127.
    """
    known = torch.where(finite, largest_magnitude(x), 0.0).flatten()
    overall = torch.nn.functional.pad(known, (0, 1)).amax()  # one zero more: there may be no tile at all
    floor_log2 = torch.frexp(overall).exponent - 1
    return torch.where(overall > 0, top - floor_log2, 0).clamp(max=MAX_EXPONENT).to(torch.int32)


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2^exponent in fp32, exactly, for exponents from −127 (which is subnormal) to 127."""
    bits = (exponent + 127) * 2**23 + (exponent == -127).to(torch.int32) * 2**22
    return bits.to(torch.int32).view(torch.float32)


def hadamard(tiles: torch.Tensor) -> torch.Tensor:
    """α·H/√G, H being Sylvester's ±1 matrix; orthonormal and symmetric, so its own inverse.

    Butterflies (a, b) → (a + b, a − b) over channels that lie h = 1, 2, … G/2 apart, in this order,
    then one multiplication by fp32(1/√G).

    Args:
        tiles: fp32 [T, G], G a power of two.
    """
    count, group = tiles.shape
    distance = 1
    while distance < group:
        pairs = tiles.view(count, group // (2 * distance), 2, distance)
        a, b = pairs[:, :, 0], pairs[:, :, 1]
        tiles = torch.stack((a + b, a - b), dim=2).view(count, group)
        distance *= 2
    return tiles.mul_(float(group**-0.5))
