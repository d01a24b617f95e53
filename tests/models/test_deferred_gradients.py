"""Backwards in two parts, and copies of weights that micro-batches share, give the same bits."""

import pytest
import torch

from tahq.memory.stored_slice import build_slice
from tahq.models.config import ModelConfig
from tahq.models.deferred_gradients import DeferredGradients, sharing_weight_copies
from tahq.models.keyed_dropout import RandomContext
from tahq.models.model_spec import load_spec
from tahq.models.partition import BlockRange
from tahq.models.slice import ModelSlice

LAYERS = 3
FIRST, MIDDLE, LAST = (BlockRange(index, index + 1, LAYERS) for index in range(LAYERS))


def make_slice(family: str, blocks: BlockRange, dropout: float = 0.0, checkpoint_blocks: bool = False) -> ModelSlice:
    config = ModelConfig(family=family, num_layers=LAYERS, hidden_size=48, num_heads=4, dropout=dropout)
    spec = load_spec(config, vocab_size=100, seq_len=16)
    module = build_slice(spec, blocks, seed=0, device="cpu", random=RandomContext(0))
    module.checkpoint_blocks = checkpoint_blocks
    return module


def forward(module: ModelSlice, micro_batch: int, *, bf16: bool) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(micro_batch)
    tokens = torch.randint(0, 100, (2, 16), generator=generator)
    x = tokens if module.parts.embedding else torch.randn(2, 16, 48, generator=generator).requires_grad_()
    module.random.at(0, 0, micro_batch, 0)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        return x, module(x)


def gradients(module: ModelSlice, *, bf16: bool, is_split: bool, all_in_flight: bool = False) -> list:
    """Of the inputs of three micro-batches, and of all parameters; weight gradients of split backwards come last."""
    passes, deferrals = [], []

    def backward() -> None:
        passes[-1][1].float().square().sum().backward()

    for micro_batch in range(3):
        module.deferred = DeferredGradients() if is_split else None
        deferrals.append(module.deferred)
        passes.append(forward(module, micro_batch, bf16=bf16))
        if not all_in_flight:
            backward()
    if all_in_flight:
        for _, y in passes:
            y.float().square().sum().backward()
    for deferred in filter(None, deferrals):
        assert len(deferred) > 0
        deferred.run()
        assert len(deferred) == 0
    return [x.grad for x, _ in passes] + [parameter.grad for parameter in module.parameters()]


def assert_same(left: list, right: list) -> None:
    assert all(one is other or torch.equal(one, other) for one, other in zip(left, right, strict=True))


@pytest.mark.parametrize(("checkpoint_blocks", "bf16"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize(
    ("family", "dropout", "blocks"),
    [("gpt2", 0.1, FIRST), ("llama", 0.0, MIDDLE), ("gpt2", 0.1, LAST), ("llama", 0.0, LAST)],
)
def test_split_backward_equals_a_whole_backward(family, dropout, blocks, checkpoint_blocks, bf16):
    whole, split = (
        gradients(make_slice(family, blocks, dropout, checkpoint_blocks), bf16=bf16, is_split=is_split)
        for is_split in (False, True)
    )
    assert_same(whole, split)


@pytest.mark.parametrize("checkpoint_blocks", [False, True])
@pytest.mark.parametrize(("family", "blocks"), [("gpt2", MIDDLE), ("llama", LAST)])
def test_own_products_change_no_bit(family, blocks, checkpoint_blocks):
    modules = [make_slice(family, blocks, checkpoint_blocks=checkpoint_blocks) for _ in range(2)]
    modules[1].owns_products = True
    assert_same(*(gradients(module, bf16=True, is_split=False) for module in modules))


@pytest.mark.parametrize("is_split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_sharing_weight_copies_changes_no_gradient_bit(family, is_split):
    whole = BlockRange(0, LAYERS, LAYERS)
    alone = gradients(make_slice(family, whole), bf16=True, is_split=is_split, all_in_flight=True)
    with sharing_weight_copies():
        shared = gradients(make_slice(family, whole), bf16=True, is_split=is_split, all_in_flight=True)
    assert_same(alone, shared)


def test_changed_weights_are_copied_anew_in_the_next_context():
    module, other = make_slice("llama", LAST), make_slice("llama", LAST)
    with sharing_weight_copies():
        before = forward(module, 0, bf16=True)[1]
    with torch.no_grad():
        for parameter in (*module.parameters(), *other.parameters()):
            parameter.mul_(1.5)
    with sharing_weight_copies():
        after = forward(module, 0, bf16=True)[1]
    assert torch.equal(after, forward(other, 0, bf16=True)[1])
    assert not torch.equal(after, before)
