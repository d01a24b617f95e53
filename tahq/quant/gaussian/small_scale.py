"""A tile's scale in 8 bits: an unsigned floating-point number with 3 bits of mantissa, from 1.125·2^−18 to 1.75·2^13.

Its code is the top of an fp32's bits, less an offset, so that rounding is one addition and one shift. Neighbours lie
6 to 12 % apart. Code 0 is 0, and code 255 marks a tile with a value that is not finite.
"""

import torch

NOT_FINITE = 255
LARGEST_CODE = 254
OFFSET = 872
"""Added to a code to get bits 20 to 31 of its fp32: code 1 is 873·2^20."""
DROPPED_BITS = 20
"""How many of an fp32's 23 bits of mantissa are dropped."""


def value_of(code: torch.Tensor) -> torch.Tensor:
    """fp32 values of uint8 codes, any shape: the fp32 of bits (code + 872)·2^20, 0 for code 0, NaN for code 255."""
    bits = (code.to(torch.int32) + OFFSET) << DROPPED_BITS
    value = torch.where(code == 0, 0.0, bits.view(torch.float32))
    return torch.where(code == NOT_FINITE, torch.nan, value)


def nearest_code(value: torch.Tensor) -> torch.Tensor:
    """int32 codes of the scales nearest to fp32 values (finite, not negative), ties to the larger; at most 254."""
    return _code_of_bits(value.view(torch.int32) + (1 << (DROPPED_BITS - 1)))


def stochastic_code(value: torch.Tensor, draw: torch.Tensor) -> torch.Tensor:
    """int32 codes of the scale above or below each value, so that the mean over all draws is the value.

    Scales between two neighbours lie evenly in an fp32's bits, so adding a uniform draw (int32 below 2^20) to the bits
    of a value (finite, not negative) and cutting off rounds up with the right probability. Below code 1 and above code
    254 there is no neighbour, and a bias.
    """
    return _code_of_bits(value.view(torch.int32) + draw)


def _code_of_bits(bits: torch.Tensor) -> torch.Tensor:
    return ((bits >> DROPPED_BITS) - OFFSET).clamp_(0, LARGEST_CODE)
