"""Blocks that are not trained beside blocks that are, in one slice, under all that changes how blocks compute."""

from typing import get_args

import pytest
import torch
from support.samples import normal
from support.small_slices import MICRO_BATCH, SEQ_LEN, make_slice, make_spec

from tahq.memory.config import AgoqConfig, CoatConfig, Fp8Config, Recompute
from tahq.models.deferred_gradients import DeferredGradients
from tahq.models.partition import BlockRange
from tahq.models.slice import ModelSlice

BLOCKS = BlockRange(1, 3, 4)
MEMORY = {"plain": None, **{level: level for level in get_args(Recompute)}}
MEMORY |= {"agoq": AgoqConfig(bits=6), "coat": CoatConfig(), "fp8": Fp8Config()}


def gradients(module: ModelSlice, *, is_split: bool, bf16: bool, needs_input: bool) -> dict[str, torch.Tensor]:
    device = next(module.parameters()).device
    x = normal((MICRO_BATCH, SEQ_LEN, module.spec.hidden_size)).to(device).requires_grad_(needs_input)
    module.deferred = deferred = DeferredGradients() if is_split else None
    with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        y = module(x)
    y.backward(normal(y.shape, seed=1).to(device, y.dtype))
    if deferred is not None:
        deferred.run()
    assert needs_input == (x.grad is not None)
    return {name: p.grad for name, p in module.canonical_parameters().items() if p.grad is not None}


def check_bits(memory: str, device: str, *, is_split: bool, bf16: bool, hidden_size: int = 64) -> None:
    keys = {"num_layers": BLOCKS.num_layers, "hidden_size": hidden_size}
    options = {"fp8": MEMORY[memory]} if memory == "fp8" else {"memory": MEMORY[memory]}
    all_trained, frozen = (
        make_slice(make_spec("llama", frozen_layers=layers, **keys), blocks=BLOCKS, device=device, **options)
        for layers in (0, 2)
    )
    passes = {"is_split": is_split, "bf16": bf16}
    expected = gradients(all_trained, needs_input=True, **passes)
    found = gradients(frozen, needs_input=False, **passes)
    assert found.keys() == {name for name in expected if ".layers.2." in name}
    assert [name for name, gradient in found.items() if not torch.equal(gradient, expected[name])] == []


@pytest.mark.parametrize("is_split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("memory", MEMORY)
def test_gradients_behind_frozen_blocks_have_the_bits_of_a_pass_in_which_all_are_trained(memory, is_split):
    check_bits(memory, "cpu", is_split=is_split, bf16=memory in ("coat", "fp8"))


@pytest.mark.gpu
@pytest.mark.parametrize("is_split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("memory", MEMORY)
def test_bits_are_equal_on_cuda(memory, is_split):
    check_bits(memory, "cuda", is_split=is_split, bf16=True, hidden_size=320)
