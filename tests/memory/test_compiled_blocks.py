"""Blocks by torch.compile beside the same blocks without."""

import pytest
import torch
from support.small_slices import MICRO_BATCH, SEQ_LEN, different, gradients, make_slice, make_spec, relative_distance

from tahq.memory.compiled_blocks import compile_blocks, compile_now
from tahq.models.partition import BlockRange

pytestmark = [pytest.mark.acceptance, pytest.mark.filterwarnings("ignore")]  # torch hides its own, but not from pytest


def compiled(spec, blocks: BlockRange, *, bf16: bool):
    """A slice with compiled blocks, and how many graphs were compiled for it."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    module = make_slice(spec, blocks=blocks)
    compile_blocks(module)
    compile_now(module, (MICRO_BATCH, SEQ_LEN, spec.hidden_size), torch.bfloat16 if bf16 else None)
    assert all(parameter.grad is None for parameter in module.parameters())
    return module, torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_blocks_are_compiled_once_before_they_are_used_and_compute_what_they_did(family, bf16):
    spec, blocks = make_spec(family, num_layers=5), BlockRange(1, 4, 5)
    plain = gradients(make_slice(spec, blocks=blocks), bf16=bf16)
    module, num_graphs = compiled(spec, blocks, bf16=bf16)
    got = gradients(module, bf16=bf16)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == num_graphs
    assert num_graphs == compiled(spec, BlockRange(1, 2, 5), bf16=bf16)[1]
    assert different(got, gradients(compiled(spec, blocks, bf16=bf16)[0], bf16=bf16)) == []
    distances = {name: relative_distance(tensor, plain[name]) for name, tensor in got.items()}
    assert max(distances.values()) < (3e-2 if bf16 else 1e-5), distances
