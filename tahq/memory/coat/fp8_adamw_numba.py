"""The step of `fp8_adamw` on the CPU, compiled: group by group, so that only 128 moments at a time are in fp32.

Weights, codes, scales and powers are equal to `step_in_torch`'s to the bit.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tahq.memory.adam.step import AdamwNumbers
from tahq.memory.coat.fp8_groups import (
    GROUP,
    LARGEST_SCALE,
    NAN,
    SMALLEST_NORMAL,
    UNEXPANDED,
    MomentFormat,
    StoredGroups,
)
from tahq.quant.cpu.kernel import kernel
from tahq.quant.cpu.numbers import Fp32Array, Int16Array, bits_of, float_of

_GROUP = GROUP
_UNEXPANDED = UNEXPANDED
_NAN = NAN
_SIGN = 0x80
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_SMALLEST_NORMAL, _LARGEST_SCALE = np.float32(SMALLEST_NORMAL), np.float32(LARGEST_SCALE)
_LARGEST_FP32 = np.finfo(np.float32).max
_INFINITY = np.float32(np.inf)


class Moment(NamedTuple):
    """One moment's arrays and tables; `powers` is empty where ranges are not expanded."""

    codes: NDArray[np.uint8]
    scales: Int16Array
    powers: NDArray[np.uint8]
    values: Fp32Array
    uppers: Fp32Array
    least: Fp32Array

    @classmethod
    def of(cls, stored: StoredGroups, by: MomentFormat) -> "Moment":
        """Views of a moment's tensors on the CPU."""
        powers = torch.empty(0, dtype=torch.uint8) if stored.powers is None else stored.powers
        tables = by.tables
        tensors = (stored.codes, stored.scales.view(torch.int16), powers, tables.values, tables.uppers, tables.least)
        return cls(*(tensor.numpy() for tensor in tensors))


class Numbers(NamedTuple):
    """The numbers of `AdamwNumbers` that a step needs, in fp32."""

    decay: np.float32
    rest1: np.float32
    beta2: np.float32
    rest2: np.float32
    rate: np.float32
    root_factor: np.float32
    epsilon: np.float32

    @classmethod
    def of(cls, numbers: AdamwNumbers) -> "Numbers":
        """Each rounded to nearest."""
        return cls(*(np.float32(getattr(numbers, name)) for name in cls._fields))


def step_on_cpu(
    weights: torch.Tensor,
    gradients: torch.Tensor,
    moments: tuple[StoredGroups, StoredGroups],
    formats: tuple[MomentFormat, MomentFormat],
    numbers: AdamwNumbers,
) -> None:
    """As `step_in_torch`, for tensors on the CPU."""
    first, second = (Moment.of(moment, by) for moment, by in zip(moments, formats, strict=True))
    room = np.empty((2, GROUP), np.float32)
    _step(weights.numpy(), gradients.contiguous().numpy(), first, second, Numbers.of(numbers), room)


@kernel
def _step(
    weights: Fp32Array, gradients: Fp32Array, first: Moment, second: Moment, numbers: Numbers, room: Fp32Array
) -> None:
    m, v = room[0], room[1]
    for group in range(len(first.scales)):
        start = group * _GROUP
        count = min(_GROUP, len(weights) - start)
        _decode(first, group, count, m)
        _decode(second, group, count, v)
        for i in range(count):
            gradient = gradients[start + i]
            m[i] = m[i] + (gradient - m[i]) * numbers.rest1
            v[i] = v[i] * numbers.beta2 + (gradient * numbers.rest2) * gradient
            denominator = np.sqrt(v[i]) * numbers.root_factor + numbers.epsilon
            weight = weights[start + i]
            weights[start + i] = weight * numbers.decay - (m[i] / denominator) * numbers.rate
        _encode(first, group, count, m)
        _encode(second, group, count, v)


@kernel
def _decode(moment: Moment, group: int, count: int, x: Fp32Array) -> None:
    """x = ±M·(code/Δmax)^(1/k)."""
    shares = moment.values[moment.powers[group] if len(moment.powers) else _UNEXPANDED]
    scale = float_of(np.int32(moment.scales[group]) << 16)
    start = group * _GROUP
    for i in range(count):
        x[i] = shares[moment.codes[start + i]] * scale


@kernel
def _encode(moment: Moment, group: int, count: int, x: Fp32Array) -> None:
    """code = round(Δmax·(|x|/M)^k), with the stored M and k."""
    largest = _ZERO
    for i in range(count):
        magnitude = abs(x[i])
        if _SMALLEST_NORMAL <= magnitude <= _LARGEST_FP32:
            largest = max(largest, magnitude)
    bits = bits_of(min(largest, _LARGEST_SCALE))
    scale = float_of((bits + 0x7FFF + (bits >> 16 & 1)) & ~0xFFFF)
    inverse = _ONE / scale if scale > _ZERO else _ZERO
    moment.scales[group] = bits_of(scale) >> 16
    power = _UNEXPANDED
    if len(moment.powers):
        smallest = _INFINITY
        for i in range(count):
            ratio = _ratio(x[i], inverse)
            smallest = min(smallest, ratio if ratio > _ZERO else _INFINITY)
        if smallest < largest * inverse:
            power = _last_usable(moment.least, smallest)
        moment.powers[group] = power
    uppers = moment.uppers[power]
    start = group * _GROUP
    for i in range(count):
        code = _NAN
        if abs(x[i]) <= _LARGEST_FP32:
            code = _nearest(uppers, _ratio(x[i], inverse))
            if bits_of(x[i]) < 0:
                code |= _SIGN
        moment.codes[start + i] = code


@kernel
def _ratio(x: np.float32, inverse: np.float32) -> np.float32:
    """|x|/M; 0 where either is subnormal, or x is not finite."""
    magnitude = abs(x)
    if not _SMALLEST_NORMAL <= magnitude <= _LARGEST_FP32:
        return _ZERO
    ratio = magnitude * inverse
    return ratio if ratio >= _SMALLEST_NORMAL else _ZERO


@kernel
def _last_usable(least: Fp32Array, ratio: np.float32) -> int:
    """The largest index whose entry is not above the ratio, else 0."""
    low, high = 0, len(least)
    while high - low > 1:
        middle = (low + high) // 2
        if least[middle] <= ratio:
            low = middle
        else:
            high = middle
    return low


@kernel
def _nearest(uppers: Fp32Array, ratio: np.float32) -> int:
    """The number of 128 ascending numbers below the ratio: seven steps without a branch."""
    found = 0
    for exponent in range(7):
        width = 64 >> exponent
        found += width if uppers[found + width - 1] < ratio else 0
    return found
