"""Unbiased rounding with a counter-based draw: one for each (element, key), the same on every device.

Integer arithmetic only, so that no device's random generator takes part: the draw for an element is a
32-bit hash of its index and of the 64-bit key. Both halves of the key enter, one before each round of
mixing, so that two keys give unrelated draws.
"""

import torch

# Multipliers of MurmurHash3's 32-bit finaliser, as signed numbers.
_FIRST, _SECOND = 0x85EBCA6B - 2**32, 0xC2B2AE35 - 2**32
_DRAW_BITS = 24
_LOST_BITS = 16  # Bits of fp32's mantissa that bf16 lacks


def round_stochastic_(y: torch.Tensor, key: int) -> torch.Tensor:
    """Round each y (fp32, contiguous), in place, down or up with probability 1 − f and f, f being its fraction.

    ⌊y⌋ + [u < y − ⌊y⌋] with u uniform on multiples of 2^−24 in [0, 1). The mean over keys is y to
    within 2^−24. (Adding u to y and rounding down would lose bits of u where y is large.)
    """
    floor = y.floor()
    return y.sub_(floor).gt_(draws(y.numel(), key, y.device).view(y.shape)).add_(floor)


def round_to_bf16(x: torch.Tensor, first: int, key: int) -> torch.Tensor:
    """Round fp32 [N] stochastically to bf16 values; values that bf16 has, infinities and NaN do not change.

    x lies between two neighbours in bf16, the share f from the smaller in size towards the larger, a multiple of 2^−16:
    it becomes the larger with probability f. Added to the bits of x, a draw of 16 bits carries into those that stay
    where it is at least 2^16·(1 − f). The mean over keys is x, exactly. Draws depend on the key and on indices, which
    begin at `first`.
    """
    draw = shift_right(hashes(first, x.numel(), key, x.device), 32 - _LOST_BITS)
    rounded = x.view(torch.int32).add(draw).bitwise_and_(-(2**_LOST_BITS)).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x)


def draws(count: int, key: int, device: torch.device) -> torch.Tensor:
    """fp32 [count] in [0, 1): element i's is a function of i (modulo 2^32) and key alone."""
    bits = hashes(0, count, key, device)
    return shift_right(bits, 32 - _DRAW_BITS).to(torch.float32).mul_(2.0**-_DRAW_BITS)


def hashes(first: int, count: int, key: int, device: torch.device) -> torch.Tensor:
    """int32 [count]: 32 bits for each of the numbers from `first` on (modulo 2^32), functions of it and key alone."""
    bits = torch.arange(first, first + count, device=device).to(torch.int32)
    for word in key_halves(key):
        _mix_(bits.bitwise_xor_(word))
    return bits


def key_halves(key: int) -> tuple[int, int]:
    """The lower and the upper half of a key, as signed numbers, so that all have the same type for a kernel."""
    low, high = ((key >> place & 0xFFFFFFFF) for place in (0, 32))
    return (low ^ 2**31) - 2**31, (high ^ 2**31) - 2**31


def _mix_(bits: torch.Tensor) -> torch.Tensor:
    """A bijection of 32-bit words in which every bit of the input moves half of the output's."""
    bits.bitwise_xor_(shift_right(bits, 16)).mul_(_FIRST)
    bits.bitwise_xor_(shift_right(bits, 13)).mul_(_SECOND)
    return bits.bitwise_xor_(shift_right(bits, 16))


def shift_right(bits: torch.Tensor, places: int) -> torch.Tensor:
    """bits >> places of int32 taken without a sign."""
    return (bits >> places).bitwise_and_(2 ** (32 - places) - 1)  # >> alone would copy the sign
