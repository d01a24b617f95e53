"""The kernel that decodes NF4 against plain torch on the CPU, to the bit, on CUDA or in Triton's interpreter."""

import pytest
import torch
from support.interpreter import DEVICE, on_device, sizes
from support.samples import normal

from tahq.memory.small_floats.nf4 import Nf4Weight

pytestmark = on_device


@pytest.mark.parametrize("shape", sizes([(7, 129), (300, 64)], [(1, 1)], [(512, 1376), (3, 512, 333)]), ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding_equals_plain_torch(shape, dtype):
    from tahq.memory.small_floats.nf4_kernels import decode

    plain, kernel = (Nf4Weight(torch.Size(shape), torch.device(device)) for device in ("cpu", DEVICE))
    for weight in (plain, kernel):
        weight.copy_(0.02 * normal(shape))
    for name in ("codes", "scales", "groups", "mean", "sum_of_bits"):
        assert torch.equal(getattr(plain, name), getattr(kernel, name).cpu()), name
    out = torch.full((plain.numel(),), torch.nan, dtype=dtype, device=DEVICE)
    decode(kernel, out)
    assert torch.equal(out.cpu().view(shape), plain.decoded(dtype))
