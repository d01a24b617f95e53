"""The Hadamard transform of one tile, equal to `tiling.hadamard` to the bit, in as few passes as possible.

Butterflies (a, b) → (a + b, a − b) at distances 1, 2 and 4 stay inside eight neighbours. Compilers do not find the
three vector instructions that each of them takes (exchange, change signs, add), so these are written in LLVM IR. The
others run two or three rounds at a time, at distances known at compile time: eight values that lie 8 apart are loaded,
taken through distances 8, 16 and 32, and stored.
"""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

from tahq.quant.cpu.kernel import kernel
from tahq.quant.cpu.numbers import Fp32Array

_LANES = 8
_ONE = np.float32(1.0)
_SIGN_BIT = -(2**31)


def _declare_eight(typing_context: Any, y: Any, start: Any) -> Any:
    if y != types.Array(types.float32, 1, "C"):
        return None
    return types.void(y, types.intp), _emit_eight


def _emit_eight(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    floats, integers = ir.VectorType(ir.FloatType(), _LANES), ir.VectorType(ir.IntType(32), _LANES)
    array, start = arguments
    data = cast(Any, make_array)(signature.args[0])(context, builder, array).data
    place = builder.bitcast(builder.gep(data, [start]), floats.as_pointer())
    values = builder.load(place, align=4)
    for distance in (1, 2, 4):
        lanes = ir.Constant(integers, [lane ^ distance for lane in range(_LANES)])
        signs = ir.Constant(integers, [_SIGN_BIT if lane & distance else 0 for lane in range(_LANES)])
        others = builder.shuffle_vector(values, ir.Constant(floats, ir.Undefined), lanes)
        own = builder.bitcast(builder.xor(builder.bitcast(values, integers), signs), floats)
        values = builder.fadd(others, own)
    builder.store(values, place, align=4)
    return context.get_dummy_value()


_transform_eight: Callable[[Fp32Array, int], None] = cast(Any, intrinsic)(_declare_eight)
"""Distances 1, 2 and 4 for y[start : start + 8], in place; y is contiguous."""


@kernel
def _round_of_two(y: Fp32Array, start: int, distance: int, norm: np.float32) -> None:
    for i in range(start, start + distance):
        a, b = y[i], y[i + distance]
        y[i], y[i + distance] = (a + b) * norm, (a - b) * norm


@kernel
def _rounds_of_four(y: Fp32Array, start: int, distance: int, norm: np.float32) -> None:
    for i in range(start, start + distance):
        j, k, m = i + distance, i + 2 * distance, i + 3 * distance
        a, b, c, d = y[i] + y[j], y[i] - y[j], y[k] + y[m], y[k] - y[m]
        y[i], y[j], y[k], y[m] = (a + c) * norm, (b + d) * norm, (a - c) * norm, (b - d) * norm


@kernel
def _rounds_of_eight(y: Fp32Array, start: int, norm: np.float32) -> None:
    """Distances 8, 16 and 32."""
    for i in range(start, start + 8):
        a, b, c, d = y[i], y[i + 8], y[i + 16], y[i + 24]
        e, f, g, h = y[i + 32], y[i + 40], y[i + 48], y[i + 56]
        a, b, c, d, e, f, g, h = a + b, a - b, c + d, c - d, e + f, e - f, g + h, g - h
        a, b, c, d, e, f, g, h = a + c, b + d, a - c, b - d, e + g, f + h, e - g, f - h
        y[i], y[i + 8], y[i + 16], y[i + 24] = (a + e) * norm, (b + f) * norm, (c + g) * norm, (d + h) * norm
        y[i + 32], y[i + 40], y[i + 48], y[i + 56] = (a - e) * norm, (b - f) * norm, (c - g) * norm, (d - h) * norm


@kernel
def hadamard(y: Fp32Array, norm: np.float32) -> None:
    """y·H·norm, in place, of 8, 16, … 256 values: butterflies at distances 1, 2, … G/2, in this order.

    Multiplying by 1 between rounds changes nothing, and costs nothing.
    """
    for start in range(0, y.size, _LANES):
        _transform_eight(y, start)
    if y.size == 8:
        for i in range(8):
            y[i] *= norm
    elif y.size == 16:
        _round_of_two(y, 0, 8, norm)
    elif y.size == 32:
        _rounds_of_four(y, 0, 8, norm)
    elif y.size == 64:
        _rounds_of_eight(y, 0, norm)
    elif y.size == 128:
        _rounds_of_eight(y, 0, _ONE)
        _rounds_of_eight(y, 64, _ONE)
        _round_of_two(y, 0, 64, norm)
    else:
        _rounds_of_eight(y, 0, _ONE)
        _rounds_of_eight(y, 64, _ONE)
        _rounds_of_eight(y, 128, _ONE)
        _rounds_of_eight(y, 192, _ONE)
        _rounds_of_four(y, 0, 64, norm)
