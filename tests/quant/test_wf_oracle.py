"""wf's streams and values are those of a second, slow implementation in plain Python, to the bit."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from support import tile_oracle as oracle

from tahq.quant import get_codec
from tahq.quant.spec import WfSpec

F = np.float32


def means_of(tiles, tiles_per_token):
    """fp16 means of the channels of all tokens."""
    tokens = [np.concatenate(tiles[i : i + tiles_per_token]) for i in range(0, len(tiles), tiles_per_token)]
    sums = [math.fsum(map(float, column)) for column in zip(*tokens, strict=True)]
    return (np.array(sums) / len(tokens)).astype(F).astype(np.float16) + np.float16(0)


def centered(tiles, means, is_finite):
    size, result = len(tiles[0]), []
    for t, tile in enumerate(tiles):
        place = t * size % len(means)
        mean = means[place : place + size].astype(F)
        result.append(tile - mean if is_finite[t] else np.zeros(size, F))
    return result


def levels_of(energies, tiles_per_token):
    """How far each tile is above its token, in codes."""
    levels = []
    for start in range(0, len(energies), tiles_per_token):
        token = energies[start : start + tiles_per_token]
        of_token = oracle.nearest_code(np.sqrt(F(math.fsum(map(float, token)) / tiles_per_token)))
        levels += [oracle.nearest_code(np.sqrt(energy)) - of_token + 255 for energy in token]
    return levels


def indices_and_error(z, scale, bits):
    step = oracle.scale_value(scale)
    indices = [oracle.index_of(abs(v), step, bits) for v in z]
    levels = [F(oracle.MAGNITUDES[bits - 1][m]) for m in indices]
    return indices, math.fsum(float(abs(v) - step * level) ** 2 for v, level in zip(z, levels, strict=True))


def best_of_five(z, energy, bits):
    """Scale and indices with the least error."""
    middle = oracle.nearest_code(np.sqrt(energy))
    if middle == 0:
        return 0, None
    scales = [min(max(middle + d, 1), 254) for d in (0, -1, 1, -2, 2)]
    tried = [(scale, *indices_and_error(z, scale, bits)) for scale in scales]
    scale, indices, _ = min(tried, key=lambda each: each[2])
    return scale, indices


def encode(x, bits, group, center):
    """The bytes of a stream, and exponent, scales, widths, means and codes."""
    tiles, size = oracle.tiles_of(x, group)
    tiles_per_token = -(-x.shape[-1] // size)
    is_finite = [bool(np.isfinite(tile).all()) for tile in tiles]
    e = oracle.exponent_of(tiles)
    y = oracle.scaled(tiles, e)
    means = means_of(y, tiles_per_token) if center else None
    transformed = [oracle.hadamard(tile) for tile in (centered(y, means, is_finite) if center else y)]
    energies = [oracle.mean_square(z) for z in transformed]
    widths = oracle.greedy_widths(levels_of(energies, tiles_per_token), math.floor(bits * len(tiles)))
    scales, codes = [], []
    for t, (z, width) in enumerate(zip(transformed, widths, strict=True)):
        scale, indices = best_of_five(z, energies[t], width)
        scales.append(scale if is_finite[t] else 255)
        codes.append([oracle.code_of(v, m, width) for v, m in zip(z, indices, strict=True)] if scale else [0] * size)
    header = oracle.header(1, 255 in scales, oracle.log2(size), center, e)
    mean = oracle.section(means[: x.shape[-1]].tobytes()) if center else b""
    codes_section = oracle.section(oracle.codes_bytes(codes, widths))
    stream = header + oracle.section(scales) + oracle.section(oracle.widths_bytes(widths)) + mean + codes_section
    return stream, e, scales, widths, means, codes


def decode(shape, e, scales, widths, means, codes):
    tiles = []
    for t, (scale, width, code) in enumerate(zip(scales, widths, codes, strict=True)):
        levels = np.array([oracle.level_of(q, width) for q in code], F)
        tile = oracle.hadamard(levels * oracle.scale_value(scale))
        place = t * len(tile) % len(means) if means is not None else 0
        tiles.append(tile + means[place : place + len(tile)].astype(F) if means is not None else tile)
    return oracle.joined(tiles, shape, e)


def values(shape, seed, magnitude):
    """Channels with means, tokens and columns of different magnitudes, an outlier, a token of zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) + torch.randn(shape[-1], generator=generator)
    x *= magnitude * torch.exp2(torch.randint(-3, 3, (*shape[:-1], 1), generator=generator))
    x.view(-1)[::37] *= 20
    rows = x.view(-1, shape[-1])
    if len(rows) > 2:
        rows[1] = 0.0
    return x


CASES = [
    ("3.5", 128, "on", (2, 3, 256), 1.0),
    ("1", 8, "on", (3, 4, 24), 1e-20),
    ("2.5", 16, "off", (4, 3, 48), 1e5),
    ("10/3", 64, "on", (2, 3, 100), 1e-9),
    ("3", 128, "on", (5, 1), 1.0),
    ("3", 128, "off", (5, 1), 1.0),
    ("5.75", 32, "off", (9, 32), 2.0**100),
    ("8", 64, "on", (2, 70), 1.0),
    ("3.5", 256, "on", (7,), 1e-42),
]


@pytest.mark.parametrize(("bits", "group", "center", "shape", "magnitude"), CASES)
def test_stream_and_values_equal_the_oracles(bits, group, center, shape, magnitude):
    x = values(shape, len(shape), magnitude)
    spec = WfSpec(bits=Fraction(bits), group=group, center=center)
    codec = get_codec(spec, backend="reference")
    stream = codec.encode(x)
    expected, *parts = encode(x.numpy(), spec.bits, group, center == "on")
    assert stream.numpy().tobytes() == expected
    assert np.array_equal(codec.decode(stream, shape).numpy(), decode(shape, *parts))


@pytest.mark.parametrize("center", ["on", "off"])
def test_tiles_that_are_not_finite_are_the_oracles(center):
    x = values((3, 4, 64), 5, 1.0)
    x.view(-1)[[3, 70, 200, 640]] = torch.tensor([math.nan, math.inf, -math.inf, math.nan])
    codec = get_codec(f"wf:bits=2.5,group=32,center={center}", backend="reference")
    stream = codec.encode(x)
    expected, *parts = encode(x.numpy(), Fraction(5, 2), 32, center == "on")
    assert stream.numpy().tobytes() == expected
    assert np.array_equal(codec.decode(stream, x.shape).numpy(), decode(x.shape, *parts), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_input_is_taken_to_fp32(dtype):
    x = values((2, 3, 64), 6, 1.0).to(dtype)
    stream = get_codec("wf:bits=3.5", backend="reference").encode(x)
    assert stream.numpy().tobytes() == encode(x.float().numpy(), Fraction(7, 2), 128, True)[0]
