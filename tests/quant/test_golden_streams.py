"""Streams as they were when their version was fixed: new code must write them again and read them as before.

The inputs are whole-number arithmetic, so that they are the same on every machine for all time.
"""

import hashlib

import pytest
import torch

from tahq.quant import get_codec

CASES = {
    "tah_c1": ("tah", (2, 5, 1)),
    "tah_c100": ("tah", (2, 3, 100)),
    "tah_c1001": ("tah", (1, 2, 1001)),
    "tah_c1600": ("tah", (2, 1, 1600)),
    "tah_int2_int3": ("tah:low=2,high=3,int4=0.8", (2, 3, 128)),
    "tah_always_transformed": ("tah:tau=0,group=256,int4=1/3", (2, 3, 256)),
    "tah_not_finite": ("tah:group=32", (1, 4, 64)),
    "tah_empty": ("tah", (2, 0, 64)),
    "fixed_c1": ("fixed", (2, 5, 1)),
    "fixed_c100": ("fixed:bits=6", (2, 3, 100)),
    "fixed_c1001": ("fixed:bits=3", (1, 1, 1001)),
    "fixed_c1600": ("fixed", (1, 1, 1600)),
    "fixed_10_bits_stochastic": ("fixed:bits=10,group=32,round=stochastic", (2, 2, 96)),
    "fixed_16_bits": ("fixed:bits=16,group=8", (1, 3, 24)),
    "fixed_not_finite": ("fixed:bits=4,group=32", (1, 4, 64)),
    "raw_fp32": ("raw:dtype=fp32", (2, 5)),
    "raw_fp16": ("raw:dtype=fp16", (2, 5)),
    "raw_bf16": ("raw:dtype=bf16", (2, 5)),
}
KEY = 0x0123456789ABCDEF


def whole_number_values(shape, *, not_finite):
    """About ±2^20, every 41st value 16 times larger, and the eighth token constant: exact in fp32."""
    count = torch.Size(shape).numel()
    index = torch.arange(count, dtype=torch.int64)
    x = (index * index * 2654435761 + index * 40503) % 2097143 - 1048571
    x[::41] *= 16
    x = x.to(torch.float32).view(shape)
    x.view(-1, shape[-1])[7:8] = 12345.0
    if not_finite:
        x.view(-1)[[3, 100, 200]] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    return x * 2.0**-20


def written(spec, shape, stream, values):
    digest = hashlib.sha256(values.numpy().tobytes()).hexdigest()
    rows = [bytes(stream[i : i + 16].tolist()).hex(" ") for i in range(0, stream.numel(), 16)]
    return "\n".join([f"spec {spec}", f"shape {list(shape)}", f"sha256 of the decoded fp32 values {digest}", *rows, ""])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", CASES)
def test_stream_and_decoded_values_are_golden(name, device, golden):
    spec, shape = CASES[name]
    codec = get_codec(spec)
    x = whole_number_values(shape, not_finite="not_finite" in name).to(device)
    stream = codec.encode(x, key=KEY)
    values = codec.decode(stream, shape, key=KEY).cpu()
    values[values.isnan()] = torch.nan  # one pattern for all, whatever the machine propagates
    golden(f"streams/{name}.txt", written(codec.spec, shape, stream.cpu(), values))
