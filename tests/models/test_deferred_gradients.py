"""A backward in two parts gives the gradients of a whole one, to the bit."""

import pytest
import torch

from tahq.models.config import ModelConfig
from tahq.models.deferred_gradients import DeferredGradients
from tahq.models.keyed_dropout import RandomContext
from tahq.models.model_spec import load_spec
from tahq.models.partition import BlockRange
from tahq.models.slice import ModelSlice, build_slice

LAYERS = 3


def make_slice(family: str, start: int, stop: int, dropout: float, checkpoint_blocks: bool) -> ModelSlice:
    config = ModelConfig(family=family, num_layers=LAYERS, hidden_size=48, num_heads=4, dropout=dropout)
    spec = load_spec(config, vocab_size=100, seq_len=16)
    module = build_slice(spec, BlockRange(start, stop, LAYERS), seed=0, device="cpu", random=RandomContext(0))
    module.checkpoint_blocks = checkpoint_blocks
    return module


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("checkpoint_blocks", [False, True])
@pytest.mark.parametrize(("family", "dropout"), [("gpt2", 0.1), ("llama", 0.0)])
@pytest.mark.parametrize("blocks", [(0, 1), (1, 2), (2, 3)], ids=["first", "middle", "last"])
def test_input_gradient_and_then_weight_gradients_are_a_whole_backward(
    family, dropout, blocks, checkpoint_blocks, bf16
):
    whole, split = (make_slice(family, *blocks, dropout, checkpoint_blocks) for _ in range(2))
    left = []
    for micro_batch in range(3):
        generator = torch.Generator().manual_seed(micro_batch)
        tokens = torch.randint(0, 100, (2, 16), generator=generator)
        hidden = torch.randn(2, 16, 48, generator=generator)
        gradients = []
        for module in (whole, split):
            x = tokens if blocks[0] == 0 else hidden.clone().requires_grad_()
            module.deferred = DeferredGradients() if module is split else None
            module.random.at(0, 0, micro_batch, 0)
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                y = module(x)
            y.float().square().sum().backward()
            gradients.append(x.grad)
        if blocks[0] > 0:
            assert torch.equal(*gradients)
        assert split.deferred is not None
        left.append(split.deferred)
    assert all(len(deferred) > 0 for deferred in left)
    for deferred in left:  # other micro-batches came in between
        deferred.run()
        assert len(deferred) == 0
    expected = whole.canonical_parameters()
    for name, parameter in split.canonical_parameters().items():
        assert torch.equal(parameter.grad, expected[name].grad), name


def test_matrices_get_no_gradient_before_they_are_asked_for():
    module = make_slice("gpt2", 1, 2, 0.0, False)
    module.deferred = DeferredGradients()
    module(torch.randn(1, 4, 48, requires_grad=True)).sum().backward()
    matrices = [p for p in module.parameters() if p.ndim == 2]
    assert all(p.grad is None for p in matrices)
    module.deferred.run()
    assert all(p.grad is not None for p in matrices)
