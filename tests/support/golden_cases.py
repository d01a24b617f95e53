"""Inputs of the golden streams: whole-number arithmetic, so that they are the same on every machine for all time."""

import torch

CASES = {
    "tah_c1": ("tah", (2, 5, 1)),
    "tah_c100": ("tah", (2, 3, 100)),
    "tah_c1001": ("tah", (1, 2, 1001)),
    "tah_c1600": ("tah", (2, 1, 1600)),
    "tah_int2_int3": ("tah:low=2,high=3,int4=0.8", (2, 3, 128)),
    "tah_token_level": ("tah:alloc=token", (2, 5, 1600)),
    "tah_token_level_c100_int2_int3": ("tah:alloc=token,low=2,high=3,int4=0.6", (2, 5, 100)),
    "tah_alloc_128_reverse": ("tah:alloc=128,select=low,int4=0.5", (2, 3, 256)),
    "tah_spread_evenly": ("tah:adaptive=off,low=2,high=8,int4=2/7", (2, 3, 72)),
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
    "aqsgd_whole_not_finite": ("aqsgd", (1, 4, 64)),
    "aqsgd_direct_c1001": ("aqsgd:cache=none", (2, 2, 1001)),
    "aqsgd_direct_7_bits": ("aqsgd:bits=7,cache=none", (2, 5, 9)),
    "eden_c1": ("eden:bits=2", (2, 5, 1)),
    "eden_c100": ("eden:bits=2.5,group=64", (2, 3, 100)),
    "eden_c1001": ("eden:bits=10/3,group=8", (1, 1, 1001)),
    "eden_c1600": ("eden:bits=2", (2, 1, 1600)),
    "eden_1_bit": ("eden:bits=1", (2, 3, 256)),
    "eden_8_bits": ("eden:bits=8,group=32", (1, 3, 64)),
    "eden_not_finite": ("eden:bits=3,group=32", (1, 4, 64)),
    "eden_empty": ("eden:bits=2", (2, 0, 64)),
    "wf_c1": ("wf:bits=3.5", (2, 5, 1)),
    "wf_c100": ("wf:bits=2.5,group=64", (2, 3, 100)),
    "wf_c1001": ("wf:bits=10/3,group=8", (1, 1, 1001)),
    "wf_c1600": ("wf:bits=3.5", (2, 1, 1600)),
    "wf_without_centering": ("wf:bits=4,group=16,center=off", (2, 5, 48)),
    "wf_1_bit": ("wf:bits=1", (2, 3, 256)),
    "wf_8_bits": ("wf:bits=8,group=32", (1, 3, 64)),
    "wf_not_finite": ("wf:bits=3,group=32", (1, 4, 64)),
    "wf_empty": ("wf:bits=3.5", (2, 0, 64)),
    "raw_fp32": ("raw:dtype=fp32", (2, 5)),
    "raw_fp16": ("raw:dtype=fp16", (2, 5)),
    "raw_bf16": ("raw:dtype=bf16", (2, 5)),
}


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
