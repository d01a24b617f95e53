"""bf16 copies of weights that several micro-batches share: the same bits as with copies of their own."""

import pytest
import torch

from tahq.models.config import ModelConfig
from tahq.models.deferred_gradients import DeferredGradients, shared_copies, sharing_weight_copies
from tahq.models.keyed_dropout import RandomContext
from tahq.models.model_spec import load_spec
from tahq.models.partition import BlockRange
from tahq.models.slice import ModelSlice, build_slice

NUM_MICRO_BATCHES, TOKENS = 3, (2, 8)


def make_slice(family: str) -> ModelSlice:
    spec = load_spec(ModelConfig(family=family, num_layers=2, hidden_size=16, num_heads=2), vocab_size=50, seq_len=8)
    return build_slice(spec, BlockRange(0, 2, 2), seed=0, device="cpu", random=RandomContext(0)).train()


def forward(module: ModelSlice, number: int = 0) -> torch.Tensor:
    tokens = torch.randint(50, TOKENS, generator=torch.Generator().manual_seed(number))
    with torch.autocast("cpu", torch.bfloat16):
        return module(tokens)


def gradients(module: ModelSlice, *, is_split: bool) -> dict[str, torch.Tensor]:
    """Of micro-batches that are all in flight at once."""
    outputs, deferrals = [], []
    for number in range(NUM_MICRO_BATCHES):
        module.deferred = DeferredGradients() if is_split else None
        outputs.append(forward(module, number))
        deferrals.append(module.deferred)
    for output, deferred in zip(outputs, deferrals, strict=True):
        output.float().square().sum().backward()
        if deferred is not None:
            deferred.run()
    return {name: parameter.grad for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("is_split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_gradients_of_micro_batches_that_share_copies_are_the_same_to_the_bit(family, is_split):
    alone = gradients(make_slice(family), is_split=is_split)
    with sharing_weight_copies():
        shared = gradients(make_slice(family), is_split=is_split)
    assert alone.keys() == shared.keys()
    assert all(torch.equal(alone[name], shared[name]) for name in alone)


def test_weights_that_have_changed_are_copied_anew_in_the_next_context():
    module, other = make_slice("llama"), make_slice("llama")
    with sharing_weight_copies():
        before = forward(module)
    with torch.no_grad():
        for parameter in (*module.parameters(), *other.parameters()):
            parameter.mul_(1.5)
    with sharing_weight_copies():
        after = forward(module)
    assert torch.equal(after, forward(other))
    assert not torch.equal(after, before)


def test_nothing_is_kept_behind_a_context_that_fails():
    module = make_slice("gpt2")

    def failing() -> None:
        with sharing_weight_copies():
            forward(module)
            raise InterruptedError

    with pytest.raises(InterruptedError):
        failing()
    assert shared_copies() is None
    assert torch.autocast_increment_nesting() == 1
    assert torch.autocast_decrement_nesting() == 0


def test_products_of_our_own_get_one_copy_of_a_weight_and_dtype():
    weight = torch.randn(3, 4, requires_grad=True)
    with sharing_weight_copies():
        copies = shared_copies()
        copy = copies.of(weight, torch.bfloat16)
        assert copies.of(weight, torch.bfloat16) is copy
        assert copies.of(weight, torch.float32).data_ptr() == weight.data_ptr()
    assert copy.dtype == torch.bfloat16
    assert not copy.requires_grad
    assert torch.equal(copy, weight.detach().bfloat16())
