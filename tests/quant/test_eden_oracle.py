"""eden's streams and values are those of a second, slow implementation in plain Python, to the bit."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from support import tile_oracle as oracle

from tahq.quant import get_codec
from tahq.quant.gaussian import small_scale
from tahq.quant.gaussian.tile_stream import TileLayout, unpack
from tahq.quant.spec import EdenSpec

F = np.float32
KEY = 0xFEDCBA9876543210


def flipped(tiles, key):
    size = len(tiles[0])
    words = [oracle.draw_word(word, key) for word in range(-(-len(tiles) * size // 32))]
    signs = [-1 if words[i // 32] >> i % 32 & 1 else 1 for i in range(len(tiles) * size)]
    return [(tile * np.array(signs[i * size : (i + 1) * size], F)).astype(F) for i, tile in enumerate(tiles)]


def scale_of(z, indices, bits, draw):
    levels = oracle.MAGNITUDES[bits - 1]
    energy = math.fsum(float(v) ** 2 for v in z)
    projection = math.fsum(abs(float(v)) * levels[m] for v, m in zip(z, indices, strict=True))
    return oracle.stochastic_code(F(energy / projection), draw) if projection else 0


def encode(x, bits, group, key):
    """The bytes of a stream, and scales, widths and codes by tile."""
    tiles, size = oracle.tiles_of(x, group)
    is_finite = [bool(np.isfinite(tile).all()) for tile in tiles]
    e = oracle.exponent_of(tiles)
    transformed = [oracle.hadamard(tile) for tile in flipped(oracle.scaled(tiles, e), key)]
    steps = [F(np.sqrt(oracle.mean_square(z))) for z in transformed]
    widths = oracle.greedy_widths([oracle.nearest_code(r) for r in steps], math.floor(bits * len(tiles)))
    scales, codes = [], []
    for t, (z, step, width) in enumerate(zip(transformed, steps, widths, strict=True)):
        indices = [oracle.index_of(abs(v), step, width) for v in z]
        scale = scale_of(z, indices, width, oracle.draw_word(2**31 + t, key) >> 12)
        scales.append(scale if is_finite[t] else 255)
        code = [oracle.code_of(v, m, width) for v, m in zip(z, indices, strict=True)]
        codes.append(code if is_finite[t] else [0] * size)
    header = oracle.header(1, 255 in scales, oracle.log2(size), e)
    sections = (scales, oracle.widths_bytes(widths), oracle.codes_bytes(codes, widths))
    return header + b"".join(map(oracle.section, sections)), e, scales, widths, codes


def decode(shape, e, scales, widths, codes, key):
    tiles = []
    for scale, width, code in zip(scales, widths, codes, strict=True):
        levels = np.array([oracle.level_of(q, width) for q in code], F)
        tiles.append(oracle.hadamard(levels * oracle.scale_value(scale)))
    return oracle.joined(flipped(tiles, key), shape, e)


def values(shape, seed, magnitude):
    """Rows and columns of different magnitudes, an outlier, a token of zeros and one constant."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * magnitude
    x *= torch.exp2(torch.randint(-6, 4, (*shape[:-1], 1), generator=generator))
    x.view(-1)[::37] *= 20
    rows = x.view(-1, shape[-1])
    if len(rows) > 2:
        rows[1], rows[2] = 0.0, 3 * magnitude
    return x


CASES = [
    ("2", 256, (2, 3, 256), 1.0),
    ("1", 8, (3, 4, 24), 1e-20),
    ("2.5", 16, (4, 3, 48), 1e5),
    ("10/3", 64, (2, 3, 100), 1e-9),
    ("3", 128, (5, 1), 1.0),
    ("5.75", 32, (9, 32), 2.0**100),
    ("8", 64, (2, 70), 1.0),
    ("2", 256, (7,), 1e-42),
]


@pytest.mark.parametrize(("bits", "group", "shape", "magnitude"), CASES)
def test_stream_and_values_equal_the_oracles(bits, group, shape, magnitude):
    x = values(shape, len(shape), magnitude)
    spec = EdenSpec(bits=Fraction(bits), group=group)
    codec = get_codec(spec, backend="reference")
    stream = codec.encode(x, key=KEY)
    expected, *parts = encode(x.numpy(), spec.bits, group, KEY)
    assert stream.numpy().tobytes() == expected
    assert np.array_equal(codec.decode(stream, shape, key=KEY).numpy(), decode(shape, *parts, KEY))


def test_tiles_that_are_not_finite_are_the_oracles():
    x = values((3, 4, 64), 5, 1.0)
    x.view(-1)[[3, 70, 200, 640]] = torch.tensor([math.nan, math.inf, -math.inf, math.nan])
    codec = get_codec("eden:bits=2.5,group=32", backend="reference")
    stream = codec.encode(x, key=7)
    expected, *parts = encode(x.numpy(), Fraction(5, 2), 32, 7)
    assert stream.numpy().tobytes() == expected
    assert np.array_equal(codec.decode(stream, x.shape, key=7).numpy(), decode(x.shape, *parts, 7), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_input_is_taken_to_fp32(dtype):
    x = values((2, 3, 64), 6, 1.0).to(dtype)
    stream = get_codec("eden:bits=2", backend="reference").encode(x, key=1)
    assert stream.numpy().tobytes() == encode(x.float().numpy(), 2, 256, 1)[0]


def test_every_tile_has_signs_and_draws_of_its_own():
    """Tiles that are equal are coded differently, far or near."""
    codec, x = get_codec("eden:bits=1,group=256", backend="reference"), torch.ones(4096, 256)
    tiles = unpack(TileLayout.of(codec.spec, x.shape), codec.encode(x, key=3))
    assert len({bytes(row.tolist()) for row in tiles.codes}) == 4096
    assert len({*small_scale.value_of(tiles.scale).tolist()}) > 1
