"""Blocks whose norms add to the residual stream, on CUDA or in Triton's interpreter, against the operations one by one.

The interpreter cuts off where bf16 rounds; there products are in fp16.
"""

import pytest
import torch
from support.interpreter import DEVICE, on_device
from support.samples import normal
from support.small_slices import different, make_slice, make_spec

from tahq.memory import recompute
from tahq.memory.agoq import stored_inputs
from tahq.models.deferred_gradients import sharing_weight_copies
from tahq.models.partition import BlockRange

pytestmark = on_device
PRODUCTS = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16


@pytest.fixture(autouse=True)
def _kernels_on_every_device(monkeypatch):
    for module in (recompute, stored_inputs):
        monkeypatch.setattr(module, "has_kernels", lambda device_type: True)


@pytest.mark.parametrize(
    ("products", "residual"),
    [(None, None), (PRODUCTS, None), (PRODUCTS, PRODUCTS)],
    ids=["fp32", "16 bits", "16 bits everywhere"],
)
@pytest.mark.parametrize("family", ["gpt2", "qwen2"])
def test_loss_and_gradients_have_the_bits_of_operations_one_by_one(family, products, residual):
    """Of two blocks, so that a gradient narrowed by one norm is taken by the block before."""
    spec, found = make_spec(family, num_layers=4), {}
    for level in ("none", "norm", "block", "ffn"):
        module = make_slice(spec, level, blocks=BlockRange(1, 3, 4), device=DEVICE)
        module.residual = residual
        x = normal((1, 8, 64)).to(DEVICE).requires_grad_()
        with torch.autocast(DEVICE.type, products, enabled=products is not None), sharing_weight_copies():
            y = module(x)
            y.backward(normal(y.shape, seed=1).to(y))
        found[level] = {"y": y.detach(), "x": x.grad} | {name: p.grad for name, p in module.named_parameters()}
    is_fused = {level: "forward" in vars(next(make_slice(spec, level).blocks())) for level in found}
    assert is_fused == {"none": True, "norm": True, "block": True, "ffn": False}
    for level in ("none", "norm", "block"):
        assert different(found[level], found["ffn"]) == []


def test_a_narrowed_gradient_is_not_used_after_an_addition():
    from tahq.memory.residual_stream import _narrowed

    gradient = normal((4, 64))
    gradient.narrowed = gradient.half(), gradient._version
    assert _narrowed(gradient, torch.float16) is gradient.narrowed[0]
    assert _narrowed(gradient, torch.float64).dtype == torch.float64
    gradient.add_(1.0)
    assert torch.equal(_narrowed(gradient, torch.float16), gradient.half())
