"""bf16 autocast over fp32 parameters, as the engine trains on CUDA; the CPU knows the same autocast."""

import pytest
import torch
from torch import nn

from tahq.models.costs import measured_costs
from tahq.models.keyed_dropout import RandomContext
from tahq.models.partition import BlockRange
from tahq.models.slice import build_slice

from .conftest import FAMILIES, SEQ_LEN

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_cuda])]


def train_once(spec, tokens, device, *, checkpoint_blocks=False):
    part = build_slice(spec, BlockRange(0, 4, 4), seed=1, device=device, random=RandomContext(1))
    part.checkpoint_blocks = checkpoint_blocks
    with torch.autocast(device, torch.bfloat16):
        logits = part(tokens.to(device))
    loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.roll(-1, 1).to(device).flatten())
    loss.backward()
    return loss.item(), {name: p.grad for name, p in part.canonical_parameters().items()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
def test_autocast_keeps_fp32_gradients_and_checkpointing_gives_equal_bits(family, device, tiny_spec, tokens):
    spec = tiny_spec(family, dropout=0.1)
    loss, gradients = train_once(spec, tokens, device)
    # An untrained model of 61 tokens guesses: ln 61 = 4.11, and the tiny weights add little to it.
    assert loss == pytest.approx(4.11, abs=0.3)
    assert all(grad.dtype == torch.float32 and grad.isfinite().all() for grad in gradients.values())
    again, gradients_again = train_once(spec, tokens, device, checkpoint_blocks=True)
    assert again == loss
    # CUDA sums an embedding's gradient in no fixed order; the blocks and the head are ours to answer for.
    compared = [name for name in gradients if ".h." in name or ".layers." in name or "lm_head" in name]
    assert all(torch.equal(gradients_again[name], gradients[name]) for name in compared)


@pytest.mark.parametrize("device", DEVICES)
def test_measured_costs_are_seconds(device, tiny_spec):
    costs = measured_costs(tiny_spec("gpt2", dropout=0.1), 2, SEQ_LEN, device, repeats=1)
    assert all(0 < seconds < 10 for seconds in (costs.embedding, *costs.blocks, costs.head))


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("family", FAMILIES)
def test_random_weights_on_cuda_equal_those_on_the_cpu(family, tiny_spec):
    spec, whole = tiny_spec(family), BlockRange(0, 4, 4)
    on_cpu, on_cuda = (build_slice(spec, whole, seed=1, device=d, random=RandomContext(1)) for d in ("cpu", "cuda"))
    expected = on_cpu.canonical_parameters()
    assert all(torch.equal(p.cpu(), expected[name]) for name, p in on_cuda.canonical_parameters().items())
