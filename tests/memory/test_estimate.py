from dataclasses import replace
from functools import partial

import pytest
import torch

from tahq.memory.estimate import StageMemory, StepNumbers, stage_memory
from tahq.memory.galore.qgalore import build_low_rank_slice, low_rank_weights
from tahq.memory.saved_tensors import MicroBatchShape, deferred_by_slice, saved_by_block, saved_by_slice
from tahq.memory.shares import shares_of
from tahq.memory.stored_slice import build_slice
from tahq.models.config import ModelConfig
from tahq.models.keyed_dropout import RandomContext
from tahq.models.model_spec import load_spec
from tahq.models.partition import BlockRange
from tahq.pipeline.config import TrainingConfig
from tahq.pipeline.optimizer import (
    OPTIMIZERS,
    build_optimizer,
    low_rank_settings,
    optimizer_nbytes,
    optimizer_tensors,
)
from tahq.pipeline.update import StageUpdate

SPEC = load_spec(
    ModelConfig(family="llama", num_layers=4, hidden_size=32, num_heads=4, num_kv_heads=2), vocab_size=64, seq_len=16
)
SHAPE = MicroBatchShape(micro_batch=2, seq_len=16)
CHECKPOINTED = replace(SHAPE, recompute="block")
TENSOR = 4 * 2 * 16 * 32
"""Bytes of a boundary tensor, 4·T·C."""


def two_states(shapes):
    return 2 * 4 * sum(shape.numel() for shape in shapes)


def numbers(**changes) -> StepNumbers:
    values = {
        "shape": SHAPE,
        "in_flight": 3,
        "optimizer_nbytes": two_states,
        "frame_nbytes": 1000,
    }
    return StepNumbers(**(values | changes))


def estimate(blocks, **changes) -> StageMemory:
    return stage_memory(SPEC, blocks, numbers(**changes))


def plain_slice(blocks):
    return build_slice(SPEC, blocks, seed=0, device="cpu", random=RandomContext(0))


@pytest.mark.parametrize("shards", [("optimizer",), ("optimizer", "gradients"), ("optimizer", "gradients", "weights")])
def test_replica_has_its_share_and_what_all_have(shards):
    parameters = {name: p.shape for name, p in plain_slice(BlockRange(0, 3, 4)).canonical_parameters().items()}
    shares = shares_of(SPEC, parameters, 3, shards)
    memory = estimate(BlockRange(0, 3, 4), shards=shards, replicas=3)
    totals = []
    for replica in range(3):
        own = {name: shape.numel() for name, shape in parameters.items() if shares[name].owner == replica}
        of_all = {name: shape.numel() for name, shape in parameters.items()}
        matrices = {name for name, shape in parameters.items() if len(shape) == 2 and ".layers." in name}
        had = [
            sum(numel for name, numel in of_all.items() if name in own or name not in matrices or shard not in shards)
            for shard in ("weights", "gradients")
        ]
        totals.append(4 * sum(had) + 8 * sum(own.values()))
    assert memory.weights + memory.gradients + memory.optimizer == max(totals)
    assert max(totals) < 1.1 * min(totals)
    whole = estimate(BlockRange(0, 3, 4))
    assert memory.weights + memory.gradients + memory.optimizer < whole.weights + whole.gradients + whole.optimizer
    assert (memory.workspace > whole.workspace) == (len(shards) > 1)


def test_bytes_of_weights_gradients_and_optimizer_equal_those_of_the_slice():
    nbytes = sum(parameter.nbytes for parameter in plain_slice(BlockRange(0, 2, 4)).parameters())
    memory = estimate(BlockRange(0, 2, 4))
    assert (memory.weights, memory.gradients, memory.optimizer) == (nbytes, nbytes, 2 * nbytes)
    kinds = (memory.weights, memory.gradients, memory.optimizer, memory.activations, memory.boundary, memory.workspace)
    assert memory.total == sum(kinds) == sum(memory.kinds().values())


@pytest.mark.parametrize("gradients", ["fp32", "bf16", "fp8"])
@pytest.mark.parametrize("blocks", [BlockRange(0, 2, 4), BlockRange(2, 4, 4)], ids=["first", "last"])
def test_bytes_of_bf16_weights_and_gradients_equal_those_of_the_slice(blocks, gradients):
    config = TrainingConfig(steps=1, optimizer="adamw_bf16", adamw_bf16={"weights": "bf16"})
    random, matrices = RandomContext(0), torch.bfloat16
    module = build_slice(SPEC, blocks, seed=0, device="cpu", random=random, matrices=matrices)
    parameters = module.canonical_parameters()
    update = StageUpdate(config, parameters, module.is_decayed, 1, gradients=gradients)
    x = torch.zeros(2, 16, dtype=torch.int64) if blocks.first else torch.randn(2, 16, 32).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        module(x).sum().backward()
    kept = [
        p.grad.nbytes if p.grad is not None else sum(c.nbytes for c in p.gradient_codes[1]) for p in parameters.values()
    ]
    update.apply(0, 1.0)
    saved = update.tensors()
    shape = MicroBatchShape(2, 16, True, weight_nbytes=2)
    nbytes = partial(optimizer_nbytes, config)
    memory = estimate(blocks, shape=shape, optimizer_nbytes=nbytes, gradients=gradients)
    assert (memory.weights, memory.copies) == (sum(parameter.nbytes for parameter in parameters.values()), 0)
    assert memory.gradients == sum(kept)
    states = ("optimizer/exp_avg/", "optimizer/exp_avg_sq/")
    assert memory.optimizer == sum(each.nbytes for name, each in saved.items() if name.startswith(states))
    fp32 = {"fp32": 0, "fp8": 4 * 32 * 128, "bf16": 4 * 32 * 64 if blocks.first else 0}[gradients]
    plain = estimate(blocks, shape=shape, optimizer_nbytes=nbytes)
    assert memory.workspace - plain.workspace == fp32


@pytest.mark.parametrize(("blocks", "has_head"), [(BlockRange(1, 3, 4), False), (BlockRange(2, 4, 4), True)])
def test_bf16_copies_count_once_except_the_head_with_checkpointing(blocks, has_head):
    of_block = 2 * SPEC.layout.block_weights(SPEC.hf_config)
    of_head = 2 * 32 * 64 if has_head else 0

    def copies(recompute="none", **changes) -> int:
        shapes = (MicroBatchShape(2, 16, is_bf16, recompute=recompute) for is_bf16 in (True, False))
        bf16, fp32 = (estimate(blocks, shape=shape, **changes) for shape in shapes)
        return bf16.weights - fp32.weights

    assert copies(in_flight=1) == copies(in_flight=3) == 2 * of_block + of_head
    # Nothing is shared where blocks are computed again: each graph has its own copy of the head.
    assert copies("block") == of_block + 3 * of_head
    assert copies("block", splits_backward=True) == of_block + of_head


@pytest.mark.parametrize("recompute", ["none", "block"])
def test_a_checkpoint_has_neither_bf16_copies_nor_codes(recompute):
    plain = estimate(BlockRange(2, 4, 4), shape=replace(SHAPE, recompute=recompute))
    bf16 = {"shape": MicroBatchShape(2, 16, True, recompute=recompute), "kept_code_nbytes": 2}
    memory = estimate(BlockRange(2, 4, 4), **bf16)
    matrices = sum(
        parameter.numel() for parameter in plain_slice(BlockRange(1, 3, 4)).parameters() if parameter.ndim > 1
    )
    codes = memory.weights - estimate(BlockRange(2, 4, 4), **(bf16 | {"kept_code_nbytes": 0})).weights
    assert codes == 2 * matrices
    assert memory.weights > plain.weights + codes
    assert memory.snapshot == plain.snapshot == plain.weights + plain.optimizer


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizer_bytes_equal_its_tensors(optimizer):
    blocks = BlockRange(1, 2, 4)
    module = plain_slice(blocks)
    parameters = module.canonical_parameters()
    for parameter in parameters.values():
        parameter.grad = parameter.detach().clone()
    config = TrainingConfig(steps=1, optimizer=optimizer)
    built = build_optimizer(config, parameters, module.is_decayed)
    built.step()
    kept = sum(
        each.nbytes for name, each in optimizer_tensors(built, parameters).items() if not name.startswith("step/")
    )
    assert kept == estimate(blocks, optimizer_nbytes=partial(optimizer_nbytes, config)).optimizer


@pytest.mark.parametrize(
    ("optimizer", "keys"),
    [
        ("qgalore", {"ends": "bf16"}),
        ("qgalore", {"ends": "int8", "states": "fp32", "rank": 3}),
        ("qgalore", {"weights": "bf16", "projections": "bf16", "rank": 1000}),
        ("galore", {"ends": "fp32"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("blocks", [BlockRange(1, 3, 4), BlockRange(0, 1, 4), BlockRange(3, 4, 4)], ids=str)
def test_bytes_of_low_rank_weights_equal_the_saved_tensors(optimizer, blocks, keys):
    config = TrainingConfig(steps=1, optimizer=optimizer, qgalore=keys)
    settings = low_rank_settings(config, 0)
    module = build_low_rank_slice(SPEC, blocks, settings, seed=0, device=torch.device("cpu"), random=RandomContext(0))
    update = StageUpdate(config, module.canonical_parameters(), module.is_decayed, 1, None, low_rank_weights(module))
    x = torch.zeros(2, 16, dtype=torch.int64) if blocks.first else torch.randn(2, 16, 32).requires_grad_()
    module(x).sum().backward()
    weights = low_rank_weights(module).values()
    gradients = [p.grad.nbytes for p in module.parameters()]
    gradients += [each.grad.nbytes + (each.subspace.found_nbytes if each.subspace else 0) for each in weights]
    update.apply(0, 1.0)
    saved = update.tensors()
    given = {"optimizer_nbytes": partial(optimizer_nbytes, config), "low_rank": settings}
    memory, fused = (estimate(blocks, is_fused=is_fused, **given) for is_fused in (False, True))
    assert memory.weights == sum(each.nbytes for name, each in saved.items() if name.startswith("model"))
    assert (memory.gradients, fused.gradients) == (sum(gradients), max(gradients))
    counters = ("optimizer/step/", "optimizer/gap/", "optimizer/similarities/")
    states = [each for name, each in saved.items() if name.startswith("optimizer") and not name.startswith(counters)]
    assert memory.optimizer == sum(each.nbytes for each in states)
    moments = {"offload": ["v"], "moments_nbytes": partial(optimizer_nbytes, config, moments=["v"])}
    away = estimate(blocks, **(given | moments))
    of_matrices = [name for name in saved if name.startswith("optimizer/exp_avg_sq") and "norm." not in name]
    assert away.host_optimizer == memory.optimizer - away.optimizer == sum(saved[name].nbytes for name in of_matrices)


def test_activations_cover_micro_batches_in_flight_and_deferred_weight_gradients():
    blocks = BlockRange(1, 3, 4)
    saved, left = saved_by_slice(SPEC, blocks, CHECKPOINTED), deferred_by_slice(SPEC, blocks, SHAPE)
    again = estimate(blocks, shape=CHECKPOINTED, in_flight=3, put_off=2)
    assert again.activations == saved + 2 * left
    kept = saved_by_slice(SPEC, blocks, SHAPE)
    assert kept > left
    for put_off in (0, 2):
        assert estimate(blocks, in_flight=3, put_off=put_off).activations == 3 * kept


@pytest.mark.parametrize(
    ("blocks", "num_tensors"),
    [
        (BlockRange(0, 2, 4), 3 + 1),  # three outputs kept, a gradient received
        (BlockRange(1, 2, 4), 3 + 1 + 1),  # and one to send
        (BlockRange(2, 4, 4), 1),  # one to send
        (BlockRange(0, 4, 4), 0),
    ],
    ids=["first", "middle", "last", "only"],
)
def test_boundary_counts_outputs_gradients_and_frames(blocks, num_tensors):
    assert estimate(blocks).boundary == num_tensors * TENSOR + 3 * 1000
    outputs = 0 if blocks.last else 3  # in half the bytes where the residual stream is bf16
    narrow = estimate(blocks, shape=replace(SHAPE, residual_nbytes=2))
    assert narrow.boundary == estimate(blocks).boundary - outputs * TENSOR // 2


def test_checkpointing_trades_activations_for_one_block_of_workspace():
    plain, checkpointed = (estimate(BlockRange(1, 3, 4), shape=shape) for shape in (SHAPE, CHECKPOINTED))
    assert plain.workspace == 0
    assert checkpointed.workspace == saved_by_block(SPEC, 1, SHAPE)
    assert checkpointed.activations < plain.activations / 5


LOGITS = 2 * 16 * 64


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("kept", [{}, {"gradients": "fp8"}], ids=["fp32", "fp8"])
def test_last_stage_needs_room_for_gradients_of_logits_but_not_on_cuda(bf16, kept):
    plain, fused = (
        estimate(BlockRange(2, 4, 4), shape=MicroBatchShape(2, 16, bf16, on_cuda=is_fused), **kept)
        for is_fused in (False, True)
    )
    largest = 4 * 32 * 128 if kept else 0  # of the MLP, in fp32
    assert plain.workspace == 8 * LOGITS + largest
    assert fused.workspace == largest
