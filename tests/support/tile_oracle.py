"""What eden and wf share, once more and slowly: tiles as Python lists, bytes by way of one large whole number.

Written from docs/dev/wire-format.md, with the levels as the only thing taken from tahq.
"""

import math
from fractions import Fraction

import numpy as np

from tahq.quant.gaussian.levels import MAGNITUDES

F = np.float32
STEPS = (0, 6, 13, 21, 28, 36, 44)


def tiles_of(x, group):
    """Tiles of G channels, each an fp32 array, token by token, and G; x is an array [..., C]."""
    channels = x.shape[-1]
    divisors = [g for g in (8, 16, 32, 64, 128, 256) if g <= group and channels % g == 0]
    size = max(divisors, default=group)
    tokens = x.astype(F).reshape(-1, channels)
    padded = np.pad(tokens, ((0, 0), (0, -channels % size)))
    return list(padded.reshape(-1, size)), size


def exponent_of(tiles):
    finite = [tile for tile in tiles if np.isfinite(tile).all()]
    largest = max((float(np.abs(tile).max()) for tile in finite), default=0.0)
    return min(10 - (math.frexp(largest)[1] - 1), 127) if largest else 0


def scaled(tiles, exponent):
    """x·2^e, exactly, zeros for a tile that is not finite."""
    return [np.ldexp(t, exponent).astype(F) if np.isfinite(t).all() else np.zeros_like(t) for t in tiles]


def hadamard(values):
    """Sylvester's matrix by its definition, [[H, H], [H, −H]], then 1/√G."""
    return (_unscaled(values) * F(len(values) ** -0.5)).astype(F)


def _unscaled(values):
    if len(values) == 1:
        return values
    first, second = (_unscaled(half) for half in np.split(values, 2))
    return np.concatenate((first + second, first - second))


def mean_square(values):
    return F(math.fsum(float(v) ** 2 for v in values) / len(values))


# Scale 0, codes 1 to 254: 8 steps an octave from 1.125·2^−18 on. Code 0's place in the order is 2^−18.
SCALES = [Fraction(8 + code % 8, 8) * Fraction(2) ** (code // 8 - 18) for code in range(255)]


def scale_value(code):
    return F(math.nan) if code == 255 else F(float(SCALES[code])) if code else F(0)


def nearest_code(value):
    """Of two codes as near the larger one."""
    return max(range(255), key=lambda code: (-abs(SCALES[code] - Fraction(float(value))), code))


def stochastic_code(value, draw):
    """The code below, or the one above if the distance from the one below, in units of 2^−20 steps, plus draw is 1."""
    exact = Fraction(float(value))
    if exact < SCALES[0]:
        return 0
    if exact >= SCALES[254]:
        return 254
    below = max(code for code in range(255) if SCALES[code] <= exact)
    part = (exact - SCALES[below]) / (SCALES[below + 1] - SCALES[below])
    return below + (part * 2**20 + draw >= 2**20)


def draw_word(counter, key):
    word = counter % 2**32
    for half in (key & 0xFFFFFFFF, key >> 32):
        word ^= half
        word = (word ^ word >> 16) * 0x85EBCA6B % 2**32
        word = (word ^ word >> 13) * 0xC2B2AE35 % 2**32
        word ^= word >> 16
    return word


def greedy_widths(levels, budget):
    """One bit a tile, then one more at a time where it is worth most, of equals to the tile of the lower index."""
    widths = [1] * len(levels)
    for _ in range(budget - len(levels)):
        ranks = [q - STEPS[b - 1] if b < 8 else -math.inf for q, b in zip(levels, widths, strict=True)]
        widths[max(range(len(ranks)), key=lambda tile: (ranks[tile], -tile))] += 1
    return widths


def index_of(magnitude, step, bits):
    """How many borders, half-way between magnitudes and times the step, lie below."""
    levels = np.array(MAGNITUDES[bits - 1], F)
    borders = (levels[:-1] + levels[1:]) * F(0.5)
    return int((magnitude > borders * F(step)).sum())


def code_of(value, index, bits):
    return 2 ** (bits - 1) + index if value >= 0 else 2 ** (bits - 1) - 1 - index


def level_of(code, bits):
    levels = [*(-v for v in reversed(MAGNITUDES[bits - 1])), *MAGNITUDES[bits - 1]]
    return F(levels[code])


def section(content):
    """Bytes filled up with zeros to a multiple of 16."""
    return bytes(content) + bytes(-len(content) % 16)


def widths_bytes(widths):
    number = sum((bits - 1) << 3 * place for place, bits in enumerate(widths))
    return number.to_bytes(-(-3 * len(widths) // 8), "little")


def codes_bytes(codes, widths):
    """Plane by plane, bit j of a plane being channel j."""
    planes = []
    for tile, bits in zip(codes, widths, strict=True):
        for plane in range(bits):
            number = sum((code >> plane & 1) << channel for channel, code in enumerate(tile))
            planes.append(number.to_bytes(len(tile) // 8, "little"))
    return b"".join(planes)


def header(*values):
    return section([value % 256 for value in values])


def log2(group):
    return int(math.log2(group))


def joined(tiles, shape, exponent):
    """Values of the shape from tiles of x·2^e, fp32."""
    size = len(tiles[0])
    rows = np.stack(tiles).reshape(-1, -(-shape[-1] // size) * size)[:, : shape[-1]]
    return np.ldexp(rows, -exponent).astype(F).reshape(shape)
