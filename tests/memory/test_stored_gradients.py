"""Gradients in 8 bits: what is added, scaled and decoded, and what optimizers get."""

import pytest
import torch
from support.samples import normal
from support.small_slices import MICRO_BATCH, MIDDLE, SEQ_LEN, make_slice, make_spec
from torch.nn import Parameter

from tahq.memory.agoq import stored_gradients
from tahq.memory.agoq.stored_gradients import (
    gradient_of,
    is_stored,
    scale_gradients,
    store_gradient,
    with_gradients,
)
from tahq.memory.galore.low_rank_weight import LowRankSettings
from tahq.memory.galore.qgalore import build_low_rank_slice, low_rank_weights
from tahq.memory.small_floats.block_codes import dequantize_blocks, quantize_blocks, stored_nbytes
from tahq.models.deferred_gradients import DeferredGradients
from tahq.models.keyed_dropout import RandomContext
from tahq.models.slice import ModelSlice
from tahq.pipeline.config import TrainingConfig
from tahq.pipeline.gradients import TiedEmbedding, squared_norms
from tahq.pipeline.optimizer import OPTIMIZERS
from tahq.pipeline.update import StageUpdate


def rounded(x: torch.Tensor) -> torch.Tensor:
    return dequantize_blocks(quantize_blocks(x, 8, torch.float32), x.shape)


def stored(*shape: int) -> Parameter:
    parameter = Parameter(torch.zeros(shape))
    store_gradient(parameter)
    return parameter


def add(parameter: Parameter, gradient: torch.Tensor) -> None:
    (parameter * gradient).sum().backward()


def run(module: ModelSlice, deferred: DeferredGradients | None = None) -> None:
    """A micro-batch, forward and backward."""
    module.deferred = deferred
    y = module(normal((MICRO_BATCH, SEQ_LEN, module.spec.hidden_size)).requires_grad_())
    y.backward(normal(y.shape, seed=1))
    if deferred is not None:
        deferred.run()


def test_each_micro_batch_is_added_in_fp32_and_the_sum_rounded():
    parameter, parts = stored(3, 100), [normal((3, 100), seed=seed) for seed in range(3)]
    for part in parts:
        add(parameter, part)
        assert parameter.grad is None
    expected = rounded(rounded(rounded(parts[0]) + parts[1]) + parts[2])
    assert torch.equal(gradient_of(parameter), expected)
    assert squared_norms([parameter]) == [float(expected.double().flatten().dot(expected.double().flatten()))]
    codes = parameter.gradient_codes[1]
    assert codes.codes.nbytes + codes.scales.nbytes == stored_nbytes(300, 8, scale_nbytes=4)


def test_scaling_moves_no_code_and_dropping_forgets():
    parameter = stored(200)
    add(parameter, normal(200))
    before, codes = gradient_of(parameter), parameter.gradient_codes[1].codes.clone()
    scale_gradients([parameter], 0.3)
    assert torch.equal(parameter.gradient_codes[1].codes, codes)
    torch.testing.assert_close(gradient_of(parameter), 0.3 * before)
    stored_gradients.drop_gradient(parameter)
    assert gradient_of(parameter) is None


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_seen_in_the_norm(broken):
    parameter = stored(200)
    add(parameter, torch.ones(200))
    add(parameter, torch.tensor([broken, *[1.0] * 199]))
    (square,) = squared_norms([parameter])
    assert square != square


def test_tied_copies_keep_equal_sums():
    embedding, head = stored(130), stored(130)
    add(embedding, normal(130))
    add(head, normal(130, seed=1))
    total = gradient_of(embedding) + gradient_of(head)
    TiedEmbedding(embedding, head, None).exchange(0)
    assert torch.equal(gradient_of(embedding), rounded(total))
    assert torch.equal(gradient_of(head), rounded(total))


def test_deferred_weight_gradients_are_folded_to_the_same_bits():
    spec = make_spec("llama")
    found = []
    for deferred in (None, DeferredGradients()):
        module = make_slice(spec)
        for parameter in module.parameters():
            store_gradient(parameter)
        for _ in range(2):
            run(module, deferred)
        found.append({name: gradient_of(parameter) for name, parameter in module.named_parameters()})
    assert [name for name in found[0] if not torch.equal(found[0][name], found[1][name])] == []


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_takes_the_decoded_gradients(monkeypatch, optimizer):
    """Its step is that with the same gradients in fp32, however few are decoded at a time."""
    monkeypatch.setattr(stored_gradients, "DECODED_AT_A_TIME", 5000)
    config, spec, moved = TrainingConfig(optimizer=optimizer, lr=1e-2), make_spec("llama"), []
    for stores in (True, False):
        if config.is_low_rank:
            settings = LowRankSettings(rank=8)
            random, device = RandomContext(0), torch.device("cpu")
            module = build_low_rank_slice(spec, MIDDLE, settings, seed=0, device=device, random=random).train()
        else:
            module = make_slice(spec)
        holders = module.canonical_parameters(), low_rank_weights(module)
        kept_as = "fp8" if stores else "fp32"
        update = StageUpdate(config, holders[0], module.is_decayed, 4, None, holders[1], gradients=kept_as)
        for step in range(2):
            update.begin(step)
            run(module)
            if not stores:
                for each in (*holders[0].values(), *holders[1].values()):
                    each.grad = rounded(each.grad)
            update.apply(step, 0.5)
            assert all(gradient_of(each) is None for each in (*holders[0].values(), *holders[1].values()))
        moved.append({name: tensor.clone() for name, tensor in update.tensors().items()})
    assert moved[0].keys() == moved[1].keys()
    # the scale of a block, not its numbers, is multiplied by the clipping factor
    for name, tensor in moved[0].items():
        torch.testing.assert_close(tensor.float(), moved[1][name].float(), atol=1e-6, rtol=1e-5, msg=name)


def test_unstored_holders_come_in_one_part():
    plain = [Parameter(torch.zeros(9)) for _ in range(3)]
    assert [len(part) for part in with_gradients(plain)] == [3]
    assert not any(map(is_stored, plain))
