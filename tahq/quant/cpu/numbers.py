"""fp32, bf16 and fp16 as bits, converted inside the kernels: exactly to fp32, to nearest even from it.

All three types pass through one compiled kernel: a tensor is `Values`, of which one array is empty. Only finite
numbers are converted; `largest_magnitude` detects tiles that are not finite beforehand.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tahq.quant.cpu.kernel import kernel

Fp32Array = NDArray[np.float32]
Int16Array = NDArray[np.int16]
Integer = int | np.integer[Any]

FP32, BF16, FP16 = 0, 1, 2
INFINITY_BITS = 0x7F800000
MAGNITUDE = 0x7FFFFFFF
"""All bits of an fp32 but its sign; the bits of magnitudes are in the order of their values."""
HALF_MIN_NORMAL = 0x38800000
"""2^−14 as fp32."""
HALF_INFINITY = 0x7C00
HALF_BIAS = 112 << 23
"""The difference between the exponent biases of fp32 and fp16, as bits of an fp32."""
_KINDS = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16}
_UNIT = np.float32(2.0**-24)
_ONE_HALF = np.float32(0.5)
_ONE_HALF_BITS = 0x3F000000
TO_WHOLE = np.float32(1.5 * 2**23)
_TO_WHOLE_BITS = 0x4B400000


class Values(NamedTuple):
    """The elements of a tensor, in row order, in its own type; no finite value is written beyond ±`largest`.

    FP32 values are in `wide`, the bits of BF16 and FP16 in `narrow`; the other array is empty.
    """

    kind: int
    wide: Fp32Array
    narrow: Int16Array
    largest: np.float32

    @classmethod
    def of(cls, x: torch.Tensor) -> "Values":
        """The memory of a tensor on the CPU, shared if it is contiguous."""
        flat, kind = x.detach().reshape(-1).contiguous(), _KINDS[x.dtype]
        largest = np.float32(torch.finfo(x.dtype).max)
        if kind == FP32:
            return cls(kind, flat.numpy(), np.empty(0, np.int16), largest)
        return cls(kind, np.empty(0, np.float32), flat.view(torch.int16).numpy(), largest)


@kernel
def bits_of(value: np.float32) -> np.int32:
    """The 32 bits of an fp32."""
    return np.float32(value).view(np.int32)


@kernel
def float_of(bits: np.int32) -> np.float32:
    """The fp32 of 32 bits."""
    return np.int32(bits).view(np.float32)


@kernel
def round_half_even(value: np.float32) -> np.int32:
    """The nearest whole number, ties to even; |value| < 2^22. The addition does the rounding."""
    return np.int32(bits_of(value + TO_WHOLE) - _TO_WHOLE_BITS)


@kernel
def half_to_float(bits: Integer) -> np.float32:
    """The value of 16 bits of a finite fp16."""
    magnitude = np.int32(bits & 0x7FFF)
    normal = float_of(np.int32((magnitude << 13) + HALF_BIAS))
    value = np.float32(np.float32(magnitude) * _UNIT) if magnitude < 0x400 else normal
    return float_of(np.int32(bits_of(value) | np.int32((bits & 0x8000) << 16)))


@kernel
def float_to_half(value: np.float32) -> np.int32:
    """fp16 bits of an fp32 of at most 65,504, to nearest even.

    Below 2^−14, adding 0.5, whose unit in the last place is fp16's smallest number, does the rounding.
    """
    bits = bits_of(value)
    magnitude = np.int32(bits & MAGNITUDE)
    to_even = np.int32((magnitude >> 13) & 1)
    normal = np.int32(np.int32(magnitude + to_even + 0xFFF - HALF_BIAS) >> 13)
    subnormal = np.int32(bits_of(float_of(magnitude) + _ONE_HALF) - _ONE_HALF_BITS)
    half = normal if magnitude >= HALF_MIN_NORMAL else subnormal
    return np.int32(half | np.int32((bits >> 16) & 0x8000))


@kernel
def float_to_bf16(value: np.float32) -> np.int32:
    """bf16 bits of an fp32 that is not beyond bf16's largest, to nearest even."""
    bits = bits_of(value)
    return np.int32(np.int32(bits + np.int32((bits >> 16) & 1) + 0x7FFF) >> 16)


@kernel
def largest_magnitude(values: Values, start: int, count: int) -> np.int32:
    """fp32 bits of max|x| of `count` values; INFINITY_BITS or above where one is not finite."""
    wide, narrow = values.wide[start : start + count], values.narrow[start : start + count]
    largest, largest_narrow = np.int32(0), np.int16(0)
    for i in range(wide.size):
        largest = max(largest, np.int32(bits_of(wide[i]) & MAGNITUDE))
    for i in range(narrow.size):
        largest_narrow = max(largest_narrow, np.int16(narrow[i] & 0x7FFF))
    if values.kind == FP32:
        return largest
    if values.kind == BF16:
        return np.int32(np.int32(largest_narrow) << 16)
    is_finite = largest_narrow < HALF_INFINITY
    return bits_of(half_to_float(largest_narrow)) if is_finite else np.int32(INFINITY_BITS)


@kernel
def read_scaled(values: Values, start: int, factor: np.float32, y: Fp32Array) -> None:
    """y = fp32(values)·factor, of as many finite values from `start` on as y holds."""
    wide, narrow = values.wide[start : start + y.size], values.narrow[start : start + y.size]
    if values.kind == FP32:
        for i in range(y.size):
            y[i] = wide[i] * factor
    elif values.kind == BF16:
        for i in range(y.size):
            y[i] = float_of(np.int32(np.int32(narrow[i]) << 16)) * factor
    else:
        for i in range(y.size):
            y[i] = half_to_float(np.int32(narrow[i])) * factor


@kernel
def write_scaled(y: Fp32Array, factor: np.float32, values: Values, start: int) -> None:
    """values = y·factor from `start` on, kept within ±values.largest, to nearest even."""
    wide, narrow, top = values.wide[start : start + y.size], values.narrow[start : start + y.size], values.largest
    if values.kind == FP32:
        for i in range(y.size):
            wide[i] = max(min(y[i] * factor, top), -top)
    elif values.kind == BF16:
        for i in range(y.size):
            narrow[i] = np.int16(float_to_bf16(max(min(y[i] * factor, top), -top)))
    else:
        for i in range(y.size):
            narrow[i] = np.int16(float_to_half(max(min(y[i] * factor, top), -top)))


@kernel
def write_nan(values: Values, start: int, count: int) -> None:
    """`count` quiet NaN without sign or payload."""
    if values.kind == FP32:
        values.wide[start : start + count] = np.float32(np.nan)
    else:
        values.narrow[start : start + count] = np.int16(0x7FC0 if values.kind == BF16 else 0x7E00)


_FIRST, _SECOND = 0x85EBCA6B, 0xC2B2AE35
"""Multipliers of MurmurHash3's 32-bit finaliser."""


class Key(NamedTuple):
    """The two halves of a 64-bit key."""

    low: int
    high: int

    @classmethod
    def of(cls, key: int) -> "Key":
        """The halves of a key; of a negative one, in two's complement."""
        return cls(key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF)


@kernel
def hash_of(counter: int, key: Key) -> np.uint32:
    """32 bits, a function of the counter (modulo 2^32) and the key."""
    return _mix(_mix(np.uint32(counter) ^ np.uint32(key.low)) ^ np.uint32(key.high))


@kernel
def _mix(word: np.uint32) -> np.uint32:
    word = np.uint32(np.uint32(word) ^ np.uint32(np.uint32(word) >> 16))
    word = np.uint32(word * np.uint32(_FIRST))
    word = np.uint32(word ^ np.uint32(word >> 13))
    word = np.uint32(word * np.uint32(_SECOND))
    return np.uint32(word ^ np.uint32(word >> 16))
