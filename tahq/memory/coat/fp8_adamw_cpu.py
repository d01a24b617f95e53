"""The step of `fp8_adamw.step_in_torch` compiled for the CPU, one group of 128 at a time: equal to the bit, faster."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tahq.memory.adam.loop import AdamwNumbers
from tahq.memory.coat.fp8_groups import GROUP, LARGEST_SCALE, NAN, SMALLEST_NORMAL, UNEXPANDED, Moments, StoredMoment
from tahq.quant.cpu.kernel import kernel
from tahq.quant.cpu.numbers import Fp32Array, Int16Array, bits_of, float_of

_ZERO, _ONE, _INFINITY = np.float32(0.0), np.float32(1.0), np.float32(np.inf)
_SMALLEST_NORMAL, _LARGEST_SCALE = np.float32(SMALLEST_NORMAL), np.float32(LARGEST_SCALE)
_LARGEST_FP32 = np.finfo(np.float32).max


class _Moment(NamedTuple):
    """A moment's memory and tables; `powers` is empty where ranges are not expanded."""

    codes: NDArray[np.uint8]
    scales: Int16Array
    powers: NDArray[np.uint8]
    values: Fp32Array
    uppers: Fp32Array
    least: Fp32Array


def step_on_cpu(weights: torch.Tensor, gradients: torch.Tensor, moments: Moments, numbers: AdamwNumbers) -> None:
    """As `step_in_torch`, for tensors on the CPU."""
    first, second = (_memory_of(moment) for moment in moments)
    room = np.empty((2, GROUP), np.float32)
    _step(weights.numpy(), gradients.numpy(), first, second, AdamwNumbers._make(map(np.float32, numbers)), room)


def _memory_of(moment: StoredMoment) -> _Moment:
    powers = torch.empty(0, dtype=torch.uint8) if moment.powers is None else moment.powers
    tables = (moment.by.values, moment.by.uppers, moment.by.least)
    return _Moment(*(part.numpy() for part in (moment.codes, moment.scales.view(torch.int16), powers, *tables)))


@kernel
def _step(
    weights: Fp32Array, gradients: Fp32Array, first: _Moment, second: _Moment, numbers: AdamwNumbers, room: Fp32Array
) -> None:
    m, v = room[0], room[1]
    for group in range(len(first.scales)):
        start = group * GROUP
        count = min(GROUP, len(weights) - start)
        _decode(first, group, count, m)
        _decode(second, group, count, v)
        for i in range(count):
            gradient, weight = gradients[start + i], weights[start + i]
            m[i] = m[i] + (gradient - m[i]) * numbers.rest1
            v[i] = v[i] * numbers.beta2 + (gradient * numbers.rest2) * gradient
            denominator = np.sqrt(v[i]) * numbers.root_factor + numbers.epsilon
            weights[start + i] = weight * numbers.decay - (m[i] / denominator) * numbers.rate
        _encode(first, group, count, m)
        _encode(second, group, count, v)


@kernel
def _decode(moment: _Moment, group: int, count: int, x: Fp32Array) -> None:
    """x = ±M·(code/Δmax)^(1/k)."""
    values = moment.values[moment.powers[group] if len(moment.powers) else UNEXPANDED]
    scale = float_of(np.int32(moment.scales[group]) << 16)
    for i in range(count):
        x[i] = values[moment.codes[group * GROUP + i]] * scale


@kernel
def _encode(moment: _Moment, group: int, count: int, x: Fp32Array) -> None:
    """code = round(Δmax·(|x|/M)^k), with M and k as they are stored."""
    largest = _ZERO
    for i in range(count):
        magnitude = abs(x[i])
        if _SMALLEST_NORMAL <= magnitude <= _LARGEST_FP32:
            largest = max(largest, magnitude)
    bits = bits_of(min(largest, _LARGEST_SCALE))
    scale = float_of((bits + 0x7FFF + (bits >> 16 & 1)) & ~0xFFFF)  # bf16, to nearest even
    inverse = _ONE / scale if scale > _ZERO else _ZERO
    moment.scales[group] = bits_of(scale) >> 16
    power = UNEXPANDED
    if len(moment.powers):
        smallest = _INFINITY
        for i in range(count):
            ratio = _ratio(x[i], inverse)
            smallest = min(smallest, ratio if ratio > _ZERO else _INFINITY)
        if smallest < largest * inverse:
            power = max(int(np.searchsorted(moment.least, smallest, side="right")) - 1, 0)
        moment.powers[group] = power
    uppers = moment.uppers[power]
    for i in range(count):
        code = NAN
        if abs(x[i]) <= _LARGEST_FP32:
            code = _count_below(uppers, _ratio(x[i], inverse))
            code |= 0x80 if bits_of(x[i]) < 0 else 0
        moment.codes[group * GROUP + i] = code


@kernel
def _ratio(x: np.float32, inverse: np.float32) -> np.float32:
    """|x|/M; 0 where either is subnormal, or x is not finite."""
    magnitude = abs(x)
    if not _SMALLEST_NORMAL <= magnitude <= _LARGEST_FP32:
        return _ZERO
    ratio = magnitude * inverse
    return ratio if ratio >= _SMALLEST_NORMAL else _ZERO


@kernel
def _count_below(uppers: Fp32Array, ratio: np.float32) -> int:
    """How many of 128 ascending numbers are below the ratio, at most 127: a search without branches."""
    found = 0
    for exponent in range(7):
        width = 64 >> exponent
        found += width if uppers[found + width - 1] < ratio else 0
    return found
