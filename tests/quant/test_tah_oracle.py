"""`tah` against a second, slow implementation: one tile at a time, written from docs/dev/wire-format.md.

The oracle shares no code with tahq and does its arithmetic in numpy scalars of fp32. Streams must be
equal byte for byte and decoded values bit for bit; only which tiles get H bits may differ, and only
where entropies (the oracle's in fp64) lie within 1e-5 of each other.
"""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tile_oracle as oracle

from tahq.quant import get_codec

F = np.float32


def geometry(shape, group):
    channels = shape[-1]
    g = next((g for g in (256, 128, 64, 32, 16, 8) if g <= group and channels % g == 0), group)
    samples = shape[0] if len(shape) > 1 else 1
    tokens = math.prod(shape[1:-1])
    return g, samples, tokens, -(-channels // g)


def tiles_per_alloc(alloc, g, per_token):
    return {"group": 1, "token": per_token}.get(alloc) or int(alloc) // g


def oracle_entropy(y):
    total = sum(abs(float(v)) for v in y) + 1e-12
    shares = [abs(float(v)) / total for v in y]
    return -sum(p * math.log(p + 1e-12) for p in shares)


def oracle_tile(y, bits, tau, num_real):
    """(scale field, zero-point field, pivot, codes) of one finite tile."""
    size = [F(abs(v)) for v in y]
    first = max(range(len(y)), key=lambda i: (size[i], -i))
    second = max(size[i] for i in range(len(y)) if i != first)
    transformed = F(size[first] / F(second + F(1e-12))) > F(tau)
    pivot = 0
    if transformed:
        pivot, y, num_real = first, list(y), len(y)
        y[0], y[pivot] = y[pivot], y[0]
        y = list(oracle.hadamard(np.array(y, F)))
    low, high, levels = min(y[:num_real]), max(y[:num_real]), 2**bits - 1
    scale, zero = np.float16(F(F(high - low) / F(levels))), np.float16(low)
    codes = [0] * len(y)
    for i in range(num_real):
        if scale != 0:
            codes[i] = int(np.clip(np.rint(F(F(y[i] - F(zero)) / F(scale))), 0, levels))
    scale_field = int(abs(scale).view(np.uint16)) | (0x8000 if transformed else 0)
    zero_field = int(zero.view(np.uint16)) if zero != 0 else 0
    return scale_field, zero_field, pivot, codes


def packed(numbers, width):
    """A section: numbers of `width` bits, one after the other, least significant bit first."""
    whole = sum(int(number) << width * place for place, number in enumerate(numbers))
    return oracle.section(whole.to_bytes(-(-len(numbers) * width // 8), "little"))


def planes_of(codes, first, last):
    return [code >> k & 1 for k in range(first, last) for code in codes]


def oracle_bit_map(parameters, scaled, samples, ratio, bit_map_of):
    """A flag for each allocation tile; `bit_map_of` resolves what the oracle leaves open."""
    n = len(scaled) // samples // ratio
    share = 1 - Fraction(parameters["int4"])
    if parameters["adaptive"] == "off":
        return [math.floor((i + 1) * share) == math.floor(i * share) for _ in range(samples) for i in range(n)]
    sign = 1 if parameters["select"] == "high" else -1
    allocs = [np.concatenate(scaled[i : i + ratio]) for i in range(0, len(scaled), ratio)]
    ranked_by = [sign * oracle_entropy(y) for y in allocs]
    flags = []
    for b in range(samples):
        flags += bit_map_of(b, ranked_by[b * n : (b + 1) * n], math.floor(n * share))
    return flags


def oracle_encode(x, parameters, bit_map_of):
    """The stream of x."""
    g, samples, tokens, per_token = geometry(x.shape, parameters["group"])
    low, high, tau = parameters["low"], parameters["high"], float(parameters["tau"])
    rows = x.reshape(samples * tokens, x.shape[-1])
    padding = per_token * g - x.shape[-1]
    tiles = np.pad(rows, ((0, 0), (0, padding))).reshape(-1, g)
    finite = [bool(np.isfinite(tile).all()) for tile in tiles]
    e = oracle.exponent_of(tiles)
    scaled = [tile * F(2.0**e) if ok else tile * 0 for tile, ok in zip(np.nan_to_num(tiles), finite, strict=True)]
    ratio = tiles_per_alloc(parameters["alloc"], g, per_token)
    bit_map = oracle_bit_map(parameters, scaled, samples, ratio, bit_map_of)
    coded = []
    for t, y in enumerate(scaled):
        num_real = g - padding if t % per_token == per_token - 1 else g
        fields = oracle_tile(y, high if bit_map[t // ratio] else low, tau, num_real)
        coded.append(fields if finite[t] else (0, 0x7E00, 0, [0] * g))
    return oracle_pack(coded, bit_map, all(finite), e, g, low, high)


def oracle_pack(coded, bit_map, all_finite, e, g, low, high):
    ratio = len(coded) // len(bit_map)
    fields = [
        packed([tile[field] for tile in coded], width) for field, width in ((0, 16), (1, 16), (2, oracle.log2(g)))
    ]
    low_planes = [bit for tile in coded for bit in planes_of(tile[3], 0, low)]
    high_tiles = [tile for t, tile in enumerate(coded) if bit_map[t // ratio]]
    high_planes = [bit for tile in high_tiles for bit in planes_of(tile[3], low, high)]
    sections = (packed(bit_map, 1), *fields, packed(low_planes, 1), packed(high_planes, 1))
    return oracle.header(1, not all_finite, oracle.log2(g), low, high, e) + b"".join(sections)


def sections_of(stream):
    """A function that reads the next section of a stream: `count` numbers of `width` bits."""
    start = 16

    def read(count, width):
        nonlocal start
        stop = start + -(-count * width // 8)
        whole = int.from_bytes(stream[start:stop], "little")
        start = stop + -stop % 16
        return [whole >> width * place & (1 << width) - 1 for place in range(count)]

    return read


def half(field):
    return F(np.uint16(field).view(np.float16))


def oracle_decode(stream, shape, parameters):
    g, samples, tokens, per_token = geometry(shape, parameters["group"])
    low, high = parameters["low"], parameters["high"]
    num_tiles = samples * tokens * per_token
    ratio = tiles_per_alloc(parameters["alloc"], g, per_token)
    e = stream[5] - 256 if stream[5] > 127 else stream[5]
    read = sections_of(stream)
    is_high = [flag for flag in read(num_tiles // ratio, 1) for _ in range(ratio)]
    scales, zeros = read(num_tiles, 16), read(num_tiles, 16)
    pivots = read(num_tiles, g.bit_length() - 1)
    low_planes = read(num_tiles * low, g)
    high_planes = iter(read(sum(is_high) * (high - low), g))
    out = []
    for t in range(num_tiles):
        planes = low_planes[t * low : (t + 1) * low]
        if is_high[t]:
            planes = planes + [next(high_planes) for _ in range(high - low)]
        codes = [sum((plane >> i & 1) << k for k, plane in enumerate(planes)) for i in range(g)]
        y = [F(F(F(q) * half(scales[t] & 0x7FFF)) + half(zeros[t])) for q in codes]
        if scales[t] & 0x8000:
            y = list(oracle.hadamard(np.array(y, F)))
            y[0], y[pivots[t]] = y[pivots[t]], y[0]
        out.append([F(v * F(2.0**-e)) for v in y])
    rows = np.array(out, dtype=F).reshape(samples * tokens, per_token * g)
    return rows[:, : shape[-1]].reshape(shape)


def bit_map_reader(stream, n):
    """Resolves the selection: the oracle's own where entropies are apart, else the stream's if consistent."""

    def bit_map_of(sample, entropies, num_low):
        ranked = sorted(range(n), key=lambda i: entropies[i])
        own = [rank >= num_low for _, rank in sorted(zip(ranked, range(n), strict=True))]
        place = 16 * 8 + sample * n
        sent = [bool(stream[p // 8] >> p % 8 & 1) for p in range(place, place + n)]
        if 0 < num_low < n and entropies[ranked[num_low]] - entropies[ranked[num_low - 1]] < 1e-5:
            border = entropies[ranked[num_low]]
            assert all(s == o for s, o, h in zip(sent, own, entropies, strict=True) if abs(h - border) > 1e-5)
            return sent
        return own

    return bit_map_of


DEFAULTS = {
    "group": 64,
    "int4": "0.8",
    "tau": "2",
    "low": 3,
    "high": 4,
    "alloc": "group",
    "select": "high",
    "adaptive": "on",
}


def check_against_oracle(x, **changes):
    parameters = DEFAULTS | changes
    codec = get_codec("tah:" + ",".join(f"{key}={value}" for key, value in parameters.items()), backend="reference")
    got = bytes(codec.encode(torch.from_numpy(x)).tolist())
    g, _, tokens, per_token = geometry(x.shape, parameters["group"])
    num_allocs = tokens * per_token // tiles_per_alloc(parameters["alloc"], g, per_token)
    with np.errstate(all="ignore"):
        expected = oracle_encode(x, parameters, bit_map_reader(got, num_allocs))
        assert got.hex() == expected.hex()
        values = oracle_decode(got, x.shape, parameters)
    back = codec.decode(torch.frombuffer(bytearray(got), dtype=torch.uint8), x.shape).numpy()
    np.testing.assert_array_equal(np.isnan(values), np.isnan(back))
    finite = np.isfinite(values)  # where the oracle overflows, the codec saturates
    np.testing.assert_array_equal(values[finite].view(np.uint32), back[finite].view(np.uint32))
    assert (np.abs(back[np.isinf(values)]) == np.finfo(F).max).all()


def awkward(shape, seed):
    """Values with outliers, constant stretches, zeros of both signs and six orders of magnitude."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * 10.0 ** rng.integers(-6, 1, (*shape[:-1], 1))
    x[rng.random(shape) < 0.02] *= 50
    flat = x.reshape(-1)
    flat[: flat.size // 8] = 0.0
    flat[: flat.size // 16 : 3] = -0.0
    flat[-(flat.size // 8) :] = flat[-1]
    return x.astype(F)


@pytest.mark.parametrize(
    "shape", [(1,), (2, 1), (3, 100), (1, 2, 1001), (2, 3, 64), (2, 2, 72), (2, 1, 2, 320)], ids=str
)
@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"tau": "0"},
        {"tau": "inf", "int4": "1/3"},
        {"group": 8, "int4": "0.5"},
        {"group": 32, "tau": "1.25"},
        {"group": 256, "low": 2, "high": 8, "tau": "0"},
        {"low": 2, "high": 3, "int4": "0.2"},
        {"low": 4, "high": 4, "int4": "1"},
        {"low": 5, "high": 7, "int4": "0"},
        {"alloc": "token"},
        {"alloc": "token", "select": "low", "low": 2, "high": 3},
        {"alloc": "token", "int4": "1", "group": 16},
        {"select": "low", "int4": "0.5", "group": 8},
        {"adaptive": "off", "int4": "2/7", "group": 32},
        {"adaptive": "off", "int4": "0", "alloc": "token"},
        {"adaptive": "off", "int4": "1", "low": 3, "high": 3},
    ],
    ids=str,
)
def test_stream_and_values_equal_the_oracles(shape, parameters):
    check_against_oracle(awkward(shape, seed=len(shape) + shape[-1]), **parameters)


@pytest.mark.parametrize(
    ("channels", "group", "alloc"), [(320, 64, "64"), (320, 32, "160"), (384, 64, "128"), (96, 8, "24")]
)
@pytest.mark.parametrize(
    "parameters",
    [
        {"int4": "0.5"},
        {"int4": "0.4", "select": "low", "tau": "0"},
        {"int4": "1/3", "adaptive": "off", "low": 2, "high": 5},
        {"int4": "0"},
        {"int4": "1"},
    ],
    ids=str,
)
def test_allocation_tiles_of_several_groups_equal_the_oracles(channels, group, alloc, parameters):
    check_against_oracle(awkward((2, 3, channels), seed=channels), group=group, alloc=alloc, **parameters)


def test_a_tile_that_is_not_finite_counts_as_zeros_in_its_allocation_tile():
    """Its neighbours in the allocation tile still give it entropy."""
    x = awkward((2, 5, 256), seed=8)
    x[0, 1, 70] = x[1, 3, 0] = np.nan
    x[1, 4] = np.inf
    check_against_oracle(x, alloc="128", int4="0.5")
    check_against_oracle(x, alloc="token", int4="0.6", select="low")


@pytest.mark.parametrize("tau", ["0", "2"])
@pytest.mark.parametrize("power", [-149, -140, -126, -40, 0, 15, 100, 127])
def test_magnitudes_of_every_size_equal_the_oracles(power, tau):
    x = awkward((2, 3, 72), seed=5)
    x = (x / np.abs(x).max()).astype(np.float64) * 2.0**power
    check_against_oracle(x.astype(F), tau=tau)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_tiles_that_are_not_finite_equal_the_oracles(bad):
    x = awkward((2, 4, 100), seed=6)
    x[0, 1, 3] = x[1, 2, 99] = bad
    check_against_oracle(x)
    check_against_oracle(np.full((2, 100), bad, dtype=F))


@settings(max_examples=60)
@given(
    shape=st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 80)),
    pool=st.lists(st.floats(width=32), min_size=1, max_size=5),
    seed=st.integers(0, 999),
    tau=st.sampled_from(["0", "1", "2", "inf"]),
    bits=st.sampled_from([(2, 2), (3, 4), (2, 8)]),
    rule=st.fixed_dictionaries(
        {
            "int4": st.sampled_from(["0", "0.8", "2/7", "1"]),
            "alloc": st.sampled_from(["group", "token"]),
            "select": st.sampled_from(["high", "low"]),
            "adaptive": st.sampled_from(["on", "off"]),
        }
    ),
)
def test_few_distinct_values_equal_the_oracles(shape, pool, seed, tau, bits, rule):
    """Ties everywhere: equal magnitudes for the pivot, equal entropies for the ranking, NaN and infinity."""
    chosen = np.random.default_rng(seed).integers(0, len(pool), shape)
    check_against_oracle(np.array(pool, dtype=F)[chosen], group=16, tau=tau, low=bits[0], high=bits[1], **rule)
