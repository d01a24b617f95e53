"""`fixed` against a second, slow implementation written from docs/dev/wire-format.md, byte for byte."""

import math

import numpy as np
import pytest
import torch
from support import tile_oracle as oracle

from tahq.quant import get_codec

F = np.float32


def ceil_to_half(value):
    nearest = np.float16(value)
    return np.nextafter(nearest, np.float16(np.inf)) if F(nearest) < value else nearest


def oracle_group(y, bits, draws):
    """(scale field, stored codes) of one finite group."""
    q_max = 2 ** (bits - 1) - 1
    scale = ceil_to_half(max(F(abs(v)) for v in y))
    step = F(F(scale) / F(q_max))
    codes = []
    for value, u in zip(y, draws, strict=True):
        ratio = F(value / step) if scale != 0 else F(0)
        if u is None:
            q = int(np.rint(ratio))
        else:
            floor = math.floor(ratio)
            q = floor + int(u < F(ratio - F(floor)))
        codes.append(min(max(q, -q_max), q_max) + q_max)
    return int(scale.view(np.uint16)), codes


def oracle_encode(x, bits, g, key):
    channels = x.shape[-1]
    padding = -channels % g
    groups = np.pad(x.reshape(-1, channels), ((0, 0), (0, padding))).reshape(-1, g)
    finite = np.isfinite(groups).all(axis=1)
    largest = float(np.abs(groups[finite]).max(initial=0))
    e = min(14 - (math.frexp(largest)[1] - 1), 127) if largest else 0
    scales, codes = [], []
    for t, group in enumerate(groups):
        draws = [None if key is None else F((oracle.draw_word(t * g + i, key) >> 8) / 2**24) for i in range(g)]
        y = group * F(2.0**e) if finite[t] else np.zeros(g, dtype=F)
        scale, stored = oracle_group(y, bits, draws)
        scales.append(scale if finite[t] else 0x7E00)
        codes.append(stored)
    out = bytearray([1, int(not finite.all()), g.bit_length() - 1, bits, e & 0xFF, *bytes(11)])
    out += b"".join(scale.to_bytes(2, "little") for scale in scales)
    out += bytes(-len(out) % 16)
    for place in range(bits // 8):
        out += bytes(code >> 8 * place & 0xFF for stored in codes for code in stored)
    out += bytes(-len(out) % 16)
    for stored in codes:
        for k in range(bits // 8 * 8, bits):
            plane = sum((code >> k & 1) << i for i, code in enumerate(stored))
            out += plane.to_bytes(g // 8, "little")
    return bytes(out + bytes(-len(out) % 16)), scales, codes, e


def oracle_decode(scales, codes, bits, e):
    q_max = 2 ** (bits - 1) - 1
    steps = [F(F(F(np.uint16(s).view(np.float16)) / F(q_max)) * F(2.0**-e)) for s in scales]
    return np.array([[F(F(c - q_max) * step) for c in stored] for stored, step in zip(codes, steps, strict=True)])


@pytest.mark.parametrize("bits", range(2, 17))
@pytest.mark.parametrize("key", [None, 0, 0xFEDCBA9876543210])
def test_stream_and_values_equal_the_oracles(bits, key):
    rng = np.random.default_rng(bits)
    x = rng.standard_normal((2, 3, 100)) * 10.0 ** rng.integers(-12, -3, (2, 3, 1))
    x[0, 0] = 0.0
    x[1, 1, 80] = np.nan
    x = x.astype(F)
    codec = get_codec(f"fixed:bits={bits},group=32,round={'nearest' if key is None else 'stochastic'}")
    # 100 = 4·25 has no factor 8: groups of 32, the last of each token filled up with 28 zeros.
    stream, scales, codes, e = oracle_encode(x, bits, 32, key)
    buf = codec.encode(torch.from_numpy(x), key=key or 0)
    assert bytes(buf.tolist()).hex() == stream.hex()
    values = oracle_decode(scales, codes, bits, e).reshape(2, 3, 128)[..., :100]
    np.testing.assert_array_equal(codec.decode(buf, x.shape).numpy(), values)


@pytest.mark.parametrize("power", [-149, -130, 0, 100, 127])
@pytest.mark.parametrize("bits", [2, 6, 8, 16])
def test_magnitudes_of_every_size_equal_the_oracles(bits, power):
    x = np.random.default_rng(1).uniform(-1, 1, (3, 64))
    x = (x / np.abs(x).max() * 2.0**power).astype(F)
    stream, *_ = oracle_encode(x, bits, 64, None)
    assert bytes(get_codec(f"fixed:bits={bits}").encode(torch.from_numpy(x)).tolist()).hex() == stream.hex()
