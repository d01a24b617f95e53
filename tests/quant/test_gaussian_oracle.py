"""Streams and values of `eden` and `wf` are those of a second, slow implementation in plain Python, to the bit."""

import math

import numpy as np
import pytest
import torch
from support import tile_oracle as oracle

from tahq.quant import get_codec
from tahq.quant.gaussian import small_scale
from tahq.quant.gaussian.tile_stream import TileLayout, unpack

F = np.float32
KEY = 0xFEDCBA9876543210


def flipped(tiles, key):
    """`eden`: tiles with the signs that the key says."""
    size = len(tiles[0])
    words = [oracle.draw_word(word, key) for word in range(-(-len(tiles) * size // 32))]
    signs = [-1 if words[i // 32] >> i % 32 & 1 else 1 for i in range(len(tiles) * size)]
    return [(tile * np.array(signs[i * size : (i + 1) * size], F)).astype(F) for i, tile in enumerate(tiles)]


def unbiased_scale(z, step, bits, draw):
    """`eden`: scale and indices."""
    indices = [oracle.index_of(abs(v), step, bits) for v in z]
    levels = oracle.MAGNITUDES[bits - 1]
    energy = math.fsum(float(v) ** 2 for v in z)
    projection = math.fsum(abs(float(v)) * levels[m] for v, m in zip(z, indices, strict=True))
    return oracle.stochastic_code(F(energy / projection), draw) if projection else 0, indices


def means_of(tiles, tiles_per_token):
    """`wf`: fp16 means of the channels of all tokens."""
    tokens = [np.concatenate(tiles[i : i + tiles_per_token]) for i in range(0, len(tiles), tiles_per_token)]
    sums = [math.fsum(map(float, column)) for column in zip(*tokens, strict=True)]
    return (np.array(sums) / len(tokens)).astype(F).astype(np.float16) + np.float16(0)


def centered(tiles, means, is_finite):
    size, result = len(tiles[0]), []
    for t, tile in enumerate(tiles):
        place = t * size % len(means)
        result.append(tile - means[place : place + size].astype(F) if is_finite[t] else np.zeros(size, F))
    return result


def levels_in_tokens(energies, tiles_per_token):
    """`wf`: how far each tile is above its token, in codes."""
    levels = []
    for start in range(0, len(energies), tiles_per_token):
        token = energies[start : start + tiles_per_token]
        of_token = oracle.nearest_code(np.sqrt(F(math.fsum(map(float, token)) / tiles_per_token)))
        levels += [oracle.nearest_code(np.sqrt(energy)) - of_token + 255 for energy in token]
    return levels


def best_of_five(z, energy, bits):
    """`wf`: scale and indices with the least error."""

    def attempt(code):
        step = oracle.scale_value(code)
        indices = [oracle.index_of(abs(v), step, bits) for v in z]
        levels = [F(oracle.MAGNITUDES[bits - 1][m]) for m in indices]
        error = math.fsum(float(abs(v) - step * level) ** 2 for v, level in zip(z, levels, strict=True))
        return error, code, indices

    middle = oracle.nearest_code(np.sqrt(energy))
    if middle == 0:
        return 0, None
    tried = [attempt(min(max(middle + d, 1), 254)) for d in (0, -1, 1, -2, 2)]
    return min(tried, key=lambda each: each[0])[1:]


def encode(x, spec, key):
    """The bytes of a stream, and exponent, scales, widths, means and codes."""
    tiles, size = oracle.tiles_of(x, spec.group)
    tiles_per_token = -(-x.shape[-1] // size)
    is_finite = [bool(np.isfinite(tile).all()) for tile in tiles]
    e = oracle.exponent_of(tiles)
    y, means = oracle.scaled(tiles, e), None
    is_eden = spec.name == "eden"
    if is_eden:
        y = flipped(y, key)
    elif spec.center == "on":
        means = means_of(y, tiles_per_token)
        y = centered(y, means, is_finite)
    transformed = [oracle.hadamard(tile) for tile in y]
    energies = [oracle.mean_square(z) for z in transformed]
    steps = [F(np.sqrt(energy)) for energy in energies]
    levels = [oracle.nearest_code(r) for r in steps] if is_eden else levels_in_tokens(energies, tiles_per_token)
    widths = oracle.greedy_widths(levels, math.floor(spec.bits * len(tiles)))
    scales, codes = [], []
    for t, (z, width) in enumerate(zip(transformed, widths, strict=True)):
        draw = oracle.draw_word(2**31 + t, key) >> 12
        scale, indices = unbiased_scale(z, steps[t], width, draw) if is_eden else best_of_five(z, energies[t], width)
        scales.append(scale if is_finite[t] else 255)
        has_codes = is_finite[t] if is_eden else scale
        codes.append(
            [oracle.code_of(v, m, width) for v, m in zip(z, indices, strict=True)] if has_codes else [0] * size
        )
    parameters = () if is_eden else (spec.center == "on",)
    mean = [] if means is None else [means[: x.shape[-1]].tobytes()]
    sections = (scales, oracle.widths_bytes(widths), *mean, oracle.codes_bytes(codes, widths))
    header = oracle.header(1, 255 in scales, oracle.log2(size), *parameters, e)
    return header + b"".join(map(oracle.section, sections)), e, scales, widths, means, codes


def decode(shape, spec, key, e, scales, widths, means, codes):
    tiles = []
    for t, (scale, width, code) in enumerate(zip(scales, widths, codes, strict=True)):
        levels = np.array([oracle.level_of(q, width) for q in code], F)
        tile = oracle.hadamard(levels * oracle.scale_value(scale))
        place = t * len(tile) % len(means) if means is not None else 0
        tiles.append(tile + means[place : place + len(tile)].astype(F) if means is not None else tile)
    return oracle.joined(flipped(tiles, key) if spec.name == "eden" else tiles, shape, e)


def values(shape, seed, magnitude=1.0):
    """Channels with means, tokens and columns of different magnitudes, an outlier, a token of zeros, one constant."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) + torch.randn(shape[-1], generator=generator)
    x *= magnitude * torch.exp2(torch.randint(-3, 3, (*shape[:-1], 1), generator=generator))
    x.view(-1)[::37] *= 20
    rows = x.view(-1, shape[-1])
    if len(rows) > 2:
        rows[1], rows[2] = 0.0, 3 * magnitude
    return x


def check(text, x, key=KEY):
    codec = get_codec(text, backend="reference")
    stream = codec.encode(x, key=key)
    expected, *parts = encode(x.float().numpy(), codec.spec, key)
    assert stream.numpy().tobytes() == expected
    back = codec.decode(stream, x.shape, key=key).numpy()
    assert np.array_equal(back, decode(x.shape, codec.spec, key, *parts), equal_nan=True)


@pytest.mark.parametrize(
    ("parameters", "shape", "magnitude"),
    [
        ("bits=3.5,group=256", (2, 3, 256), 1.0),
        ("bits=1,group=8", (3, 4, 24), 1e-20),
        ("bits=2.5,group=16", (4, 3, 48), 1e5),
        ("bits=10/3,group=64", (2, 3, 100), 1e-9),
        ("bits=3,group=128", (5, 1), 1.0),
        ("bits=5.75,group=32", (9, 32), 2.0**100),
        ("bits=8,group=64", (2, 70), 1.0),
        ("bits=2,group=256", (7,), 1e-42),
    ],
)
@pytest.mark.parametrize("codec", ["eden:{}", "wf:{}", "wf:center=off,{}"])
def test_stream_and_values_equal_the_oracles(codec, parameters, shape, magnitude):
    check(codec.format(parameters), values(shape, len(shape), magnitude))


@pytest.mark.parametrize("codec", ["eden", "wf", "wf:center=off"])
def test_tiles_that_are_not_finite_are_the_oracles(codec):
    x = values((3, 4, 64), 5)
    x.view(-1)[[3, 70, 200, 640]] = torch.tensor([math.nan, math.inf, -math.inf, math.nan])
    check(f"{codec}{',' if ':' in codec else ':'}bits=2.5,group=32", x, key=7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("spec", ["eden:bits=2", "wf:bits=3.5"])
def test_narrow_input_is_taken_to_fp32(spec, dtype):
    check(spec, values((2, 3, 64), 6).to(dtype), key=1)


def test_every_tile_has_its_own_signs_and_draws():
    codec, x = get_codec("eden:bits=1,group=256", backend="reference"), torch.ones(4096, 256)
    tiles = unpack(TileLayout.of(codec.spec, x.shape), codec.encode(x, key=3))
    assert len({bytes(row.tolist()) for row in tiles.codes}) == 4096
    assert len({*small_scale.value_of(tiles.scale).tolist()}) > 1
