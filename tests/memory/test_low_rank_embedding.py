"""An embedding whose table is a `LowRankWeight`, against torch's."""

import pytest
import torch
from support.samples import normal
from torch import nn

from tahq.memory.galore.low_rank_weight import LowRankSettings, LowRankWeight
from tahq.memory.galore.qgalore import LowRankEmbedding
from tahq.memory.galore.stored_weight import FullWeight, Int8Weight

CPU = torch.device("cpu")
NAME = "model.embed_tokens.weight"


def pair(ends: str, padding: int | None = None, **changes) -> tuple[nn.Embedding, LowRankEmbedding]:
    """torch's, with the values that the other has after rounding."""
    weight = LowRankWeight(NAME, (50, 24), LowRankSettings(ends=ends, **changes).of_ends(), CPU)
    weight.storage.assign(normal((50, 24)))
    plain = nn.Embedding(50, 24, padding)
    with torch.no_grad():
        plain.weight.copy_(weight.storage.decoded(torch.float32))
    return plain, LowRankEmbedding(weight, padding)


@pytest.mark.parametrize("shape", [(7, 256), (7, 512), (9, 24), (5, 700), (300, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_those_of_the_decoded_weight(shape, dtype):
    tokens = torch.tensor([[0, 3, 3], [shape[0] - 1, 1, 0]])
    for storage in (Int8Weight(shape, CPU), FullWeight(shape, CPU, torch.bfloat16)):
        storage.assign(normal(shape))
        assert torch.equal(storage.rows(tokens, dtype), storage.decoded(dtype)[tokens])


@pytest.mark.parametrize("ends", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "autocast"])
def test_rows_and_gradients_have_the_bits_of_torchs_embedding(ends, padding, bf16):
    plain, ours = pair(ends, padding)
    for index in range(2):  # two micro-batches
        tokens = torch.randint(0, 40, (2, 16), generator=torch.Generator().manual_seed(index))
        outputs = []
        for module in (plain, ours):
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                outputs.append(module(tokens))
            outputs[-1].backward(normal((2, 16, 24), seed=index + 1))
        assert torch.equal(*outputs)
        assert outputs[1].dtype == torch.float32
    assert torch.equal(ours.low_rank.grad, plain.weight.grad)


def test_absent_tokens_change_by_decay_and_moments_as_under_adamw():
    """Row 1 has a gradient at step 0 alone, row 2 never, `fp32` so that nothing is rounded."""
    plain, ours = pair("fp32", states="fp32")
    before = plain.weight.detach().clone()
    reference = torch.optim.AdamW(plain.parameters(), lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step, tokens in enumerate([[0, 1], [0, 5], [0, 0]]):
        ours.low_rank.begin(step)
        reference.zero_grad()
        for module in (plain, ours):
            module(torch.tensor(tokens)).square().sum().backward()
        reference.step()
        ours.low_rank.apply(step, 0.01, 0.1)
    after = ours.low_rank.storage.decoded(torch.float32)
    torch.testing.assert_close(after, plain.weight.detach(), rtol=0, atol=1e-6)
    decayed = before[2]
    for _ in range(3):
        decayed = decayed * (1 - 0.01 * 0.1)
    assert torch.equal(after[2], decayed)
    assert float((after[1] - before[1]).abs().min()) > 0.01  # of three steps, two by what is remembered


@pytest.mark.parametrize("ends", ["bf16", "int8"])
def test_absent_tokens_do_not_move_without_decay(ends):
    plain, ours = pair(ends)
    for step in range(20):
        ours.low_rank.begin(step)
        ours(torch.tensor([0, 1])).square().sum().backward()
        ours.low_rank.apply(step, 1e-4, 0.0)
    after = ours.low_rank.storage.decoded(torch.float32)
    never = slice(22, None)  # rows 0 to 21 have a group of INT8 in common with those that occur
    assert torch.equal(after[never], plain.weight.detach()[never])
    assert not torch.equal(after[:2], plain.weight.detach()[:2])
