"""QLoRA's base on CUDA: bitsandbytes' codes, blocks beside decoded weights, a pass that does not wait."""

from dataclasses import replace

import pytest
import torch
from support.device_waits import host_must_not_wait
from support.samples import normal
from support.small_slices import MIDDLE, make_spec

from tahq.memory.offload.host_part import kept_values
from tahq.memory.recompute import recompute
from tahq.memory.small_floats.nf4 import BLOCK, Nf4Weight, packed_weight
from tahq.memory.stored_slice import build_slice
from tahq.models.adapters.config import AdapterConfig
from tahq.models.keyed_dropout import RandomContext
from tahq.models.slice import ModelSlice

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


def slice_of(kind: str, level: str) -> ModelSlice:
    spec = replace(make_spec("llama", hidden_size=320), adapter=AdapterConfig(kind=kind, rank=8))
    keys = {"seed": 0, "device": CUDA, "random": RandomContext(0), "matrices": torch.bfloat16}
    module = build_slice(spec, MIDDLE, **keys).train()
    for number, parameter in enumerate(p for p in module.parameters() if p.requires_grad):
        parameter.data += 0.1 * normal(parameter.shape, seed=number).to(CUDA)
    recompute(module, level)
    return module


def gradients(module: ModelSlice) -> dict[str, torch.Tensor]:
    x = normal((2, 64, 320)).to(CUDA).requires_grad_()
    gradient = normal((2, 64, 320), seed=1).to(CUDA)
    with torch.autocast("cuda", torch.bfloat16):
        y = module(x)
    y.float().backward(gradient)
    return {"x": x.grad} | {name: p.grad for name, p in module.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("level", ["none", "norm", "block"])
def test_slice_in_4_bits_has_the_bits_of_one_with_the_decoded_weights_and_does_not_wait(level):
    packed, whole = (slice_of(kind, level) for kind in ("qlora", "lora"))
    for name, parameter in packed.named_parameters():
        if packed_weight(parameter) is not None:
            whole.get_parameter(name).data.copy_(kept_values(parameter))
    expected, found = gradients(whole), gradients(packed)
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    x = normal((2, 64, 320)).to(CUDA)
    with host_must_not_wait(), torch.autocast("cuda", torch.bfloat16):
        packed(x).sum().backward()


@pytest.mark.parametrize("shape", [(4096, 1024), (28672, 8192)], ids=str)
def test_codes_and_values_are_those_of_bitsandbytes(shape):
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    values = (0.02 * normal(shape)).to(CUDA, torch.bfloat16)
    weight = Nf4Weight(values.shape, CUDA)
    weight.copy_(values)
    packed, state = bitsandbytes.functional.quantize_4bit(values, quant_type="nf4", compress_statistics=True)
    assert float((packed.view(-1, BLOCK // 2) != weight.codes).float().mean()) < 1e-5
    assert float((state.absmax != weight.scales).float().mean()) < 0.01
    other = bitsandbytes.functional.dequantize_4bit(packed, state)
    distance = (weight.decoded(torch.bfloat16) - other).float().norm() / other.float().norm()
    assert float(distance) < 1e-3
