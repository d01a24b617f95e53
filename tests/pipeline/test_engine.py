"""The engine of one stage, driven by hand: what it computes, sends, and leaves behind."""

import json
from dataclasses import replace

import pytest
import torch
from support import schedules
from support.cuts import lossless_sides
from support.small_slices import Watch

from tahq.comm.link.frame import Direction, Purpose
from tahq.data.batches import BatchSource
from tahq.data.config import DataConfig
from tahq.data.dataset import load_dataset
from tahq.data.tokenizer import load_tokenizer
from tahq.memory.estimate import StepNumbers, stage_memory
from tahq.memory.saved_tensors import MicroBatchShape
from tahq.memory.stored_slice import build_slice
from tahq.models.adapters.config import AdapterConfig
from tahq.models.config import ModelConfig
from tahq.models.deferred_gradients import shared_copies
from tahq.models.keyed_dropout import RandomContext
from tahq.models.loss import summed_cross_entropy
from tahq.models.model_spec import load_spec
from tahq.models.partition import BlockRange
from tahq.models.slice import ModelSlice
from tahq.pipeline.config import DpoConfig
from tahq.pipeline.engine import Chunk, StageEngine, StepShape, held_up_by_depth
from tahq.pipeline.schedule.generators import generate
from tahq.pipeline.schedule.schedule import Action

SHAPE = StepShape(num_micro_batches=3, micro_batch=2, seq_len=8, hidden_size=16)
LAYERS = 2
SPLIT = """0F0 0F1 0F2 0I0 0I1 0W0 0I2 0W1 0W2
1F0 1F1 1I0 1F2 1I1 1I2 1W0 1W1 1W2"""
"""Input gradients as soon as they can be, weight gradients well after them."""


@pytest.fixture
def batches(tmp_path) -> BatchSource:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    config = DataConfig(text=str(tmp_path), seq_len=SHAPE.seq_len, validation=0.2)
    dataset = load_dataset(config, load_tokenizer(config))
    return BatchSource(dataset, seed=0, global_batch=6, micro_batch=2)


def make_slice(start: int, stop: int, frozen_layers: int = 0) -> ModelSlice:
    sizes = {"num_layers": LAYERS, "hidden_size": SHAPE.hidden_size, "num_heads": 2}
    config = ModelConfig(family="llama", frozen_layers=frozen_layers, **sizes)
    spec = load_spec(config, vocab_size=256, seq_len=SHAPE.seq_len)
    return build_slice(spec, BlockRange(start, stop, LAYERS), seed=0, device="cpu", random=RandomContext(0))


def make_engine(
    module: ModelSlice, actions, batches, incoming=None, outgoing=None, is_frozen=False, sends_gradient=True, **options
) -> StageEngine:
    chunk = actions[0].chunk
    return StageEngine(
        chunks={chunk: Chunk(module, incoming, outgoing, is_frozen=is_frozen, sends_gradient=sends_gradient)},
        actions=actions,
        batches=batches,
        random=module.random,
        device=torch.device("cpu"),
        **{"shape": SHAPE, **options},
    )


def test_a_whole_model_gets_the_gradient_of_the_mean_loss_of_the_step(batches):
    module = make_slice(0, LAYERS)
    engine = make_engine(module, generate("gpipe", 1, 3).actions[0], batches)
    result = engine.run_step(0)
    batch = batches.train(0)
    reference = make_slice(0, LAYERS)
    total = summed_cross_entropy(reference(batch.tokens), batch.labels)
    (total / batch.num_tokens).backward()
    assert result.tokens == batch.num_tokens == 6 * 8
    assert result.batch_digest == batch.digest
    assert result.finite
    # one batch of six against three of two: the same sums in another order, fp32
    assert result.loss_sum == pytest.approx(float(total.detach()), rel=1e-5)
    for name, parameter in module.canonical_parameters().items():
        expected = reference.canonical_parameters()[name].grad
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
def test_two_stages_in_turn_give_the_gradients_of_one_to_the_bit(batches, schedule, split):
    """One thread drives both: a GPipe order for the lower stage lets the upper one run in between."""
    whole = make_slice(0, LAYERS)
    make_engine(whole, generate(schedule, 1, 3).actions[0], batches).run_step(5)
    cuts = lossless_sides()
    lower, upper = make_slice(0, 1), make_slice(1, LAYERS)
    upper_rows = schedules.schedule(SPLIT).actions[1] if split else generate("gpipe", 2, 3).actions[1]
    upper_engine = make_engine(upper, upper_rows, batches, incoming=cuts[1])

    def before(step: int, action: Action) -> None:
        if str(action) in ("0B0", "0I0"):
            upper_engine.run_step(step)

    rows = schedules.schedule(SPLIT).actions[0] if split else generate("gpipe", 2, 3).actions[0]
    result = make_engine(lower, rows, batches, outgoing=cuts[0], on_action=before).run_step(5)
    assert result.loss_sum is None
    parts = lower.canonical_parameters() | upper.canonical_parameters()
    for name, parameter in whole.canonical_parameters().items():
        assert torch.equal(parts[name].grad, parameter.grad), name


def test_dpos_reference_takes_what_is_counted_beside_a_micro_batch(batches):
    """Of a stage in the middle, when it hands over: an input, an output, and both outputs as one tensor."""
    sizes = {"num_layers": 3, "hidden_size": SHAPE.hidden_size, "num_heads": 2}
    spec = load_spec(ModelConfig(family="llama", **sizes), vocab_size=256, seq_len=8, adapter=AdapterConfig(rank=2))
    forward, held = generate("gpipe", 1, 1).actions[0][:1], {}
    for dpo in (None, DpoConfig()):
        below, above = lossless_sides(), lossless_sides()
        first, middle = (
            build_slice(spec, BlockRange(n, n + 1, 3), seed=0, device="cpu", random=RandomContext(0)) for n in (0, 1)
        )
        make_engine(first, forward, batches, outgoing=below[0], dpo=dpo).run_step(0)
        engine, watch = make_engine(middle, forward, None, below[1], above[0], dpo=dpo), Watch()
        send = above[0].send

        def sent(*args, send=send, watch=watch, dpo=dpo) -> bool:
            held[dpo] = watch.alive_nbytes()
            return send(*args)

        above[0].send = sent
        with watch:
            engine.run_step(0)
    numbers = StepNumbers(MicroBatchShape(2, 8), 1, lambda shapes: 0, 0)
    counted = [stage_memory(spec, BlockRange(1, 2, 3), replace(numbers, num_forwards=n)).boundary for n in (1, 2)]
    plain, with_reference = held.values()
    assert with_reference - plain == counted[1] - counted[0] == 4 * 4 * 2 * 8 * SHAPE.hidden_size


@pytest.mark.parametrize("frozen_layers", [1, 2])
def test_a_frozen_stage_computes_forwards_gets_no_gradient_and_keeps_nothing(batches, frozen_layers):
    """The upper stage has the head, so something to train."""
    whole = make_slice(0, LAYERS, frozen_layers)
    make_engine(whole, generate("1f1b", 1, 3).actions[0], batches).run_step(5)
    cuts, rows = lossless_sides(), generate("1f1b", 2, 3, num_frozen=1).actions
    lower, upper = make_slice(0, 1, frozen_layers), make_slice(1, LAYERS, frozen_layers)
    below = make_engine(lower, rows[0], batches, outgoing=cuts[0], is_frozen=True)
    below.run_step(5)
    make_engine(upper, rows[1], batches, incoming=cuts[1], sends_gradient=False).run_step(5)
    assert [stats.direction for stats in cuts[0].transport.take_stats()] == [Direction.FORWARD]
    assert cuts[1].transport.take_stats() == []
    assert not below._step.in_flight
    parts = lower.canonical_parameters() | upper.canonical_parameters()
    for name, parameter in whole.canonical_parameters().items():
        assert (parts[name].grad is None) == (parameter.grad is None) == (not whole.spec.is_trained(name))
        assert parameter.grad is None or torch.equal(parts[name].grad, parameter.grad), name


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("checkpoint_blocks", [False, True], ids=["kept", "computed again"])
def test_micro_batches_share_bf16_copies_of_weights_for_a_step(batches, checkpoint_blocks, split):
    module, reference = make_slice(0, LAYERS), make_slice(0, LAYERS)
    module.checkpoint_blocks = checkpoint_blocks
    shared = []
    row = schedules.schedule(SPLIT.splitlines()[0]).actions[0] if split else generate("gpipe", 1, 3).actions[0]
    engine = make_engine(
        *(module, row, batches), autocast=torch.bfloat16, on_action=lambda *_: shared.append(shared_copies())
    )
    engine.run_step(0)
    assert all(copies is shared[0] for copies in shared)
    assert (shared[0] is None) == checkpoint_blocks
    assert shared_copies() is None
    batch = batches.train(0)
    for micro_batch in range(3):
        tokens, labels = batch.micro_batch(micro_batch)
        with torch.autocast("cpu", torch.bfloat16):
            logits = reference(tokens)
        (summed_cross_entropy(logits, labels) / (batch.num_tokens / SHAPE.gradient_scale)).backward()
    for mine, plain in zip(module.parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine.grad, plain.grad / SHAPE.gradient_scale)


def test_packed_step_has_the_loss_and_gradients_of_its_records_alone_and_the_cut_carries_where_they_begin(tmp_path):
    rows = [json.dumps({"prompt": "p", "response": "response"[: 1 + n % 2]}) for n in range(60)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(rows))
    config = DataConfig(records=str(tmp_path / "pairs.jsonl"), seq_len=SHAPE.seq_len, packing=True, validation=0.2)
    dataset = load_dataset(config, load_tokenizer(config))
    packed = BatchSource(dataset, seed=0, global_batch=6, micro_batch=2)
    cuts, shape = lossless_sides(), replace(SHAPE, is_packed=True)
    upper_engine = make_engine(
        make_slice(1, LAYERS), generate("gpipe", 2, 3).actions[1], packed, incoming=cuts[1], shape=shape
    )
    evaluated = []

    def before(step: int, action: Action) -> None:
        if str(action) == "0B0":
            evaluated.append(upper_engine.run_step(step))

    lower_engine = make_engine(
        make_slice(0, 1), generate("gpipe", 2, 3).actions[0], packed, outgoing=cuts[0], on_action=before, shape=shape
    )
    lower_engine.run_step(0)
    batch, reference = packed.train(0), make_slice(0, LAYERS)
    total = torch.tensor(0.0)
    for tokens, labels, positions in zip(batch.tokens, batch.labels, batch.positions, strict=True):
        sizes = positions.eq(0).nonzero().flatten().diff(append=torch.tensor([SHAPE.seq_len])).tolist()
        for own, of_own in zip(tokens.split(sizes), labels.split(sizes), strict=True):
            total = total + summed_cross_entropy(reference(own[None]), of_own[None])
    (total / (batch.num_tokens / SHAPE.gradient_scale)).backward()
    assert (batch.positions == 0).sum() > 2 * len(batch.tokens)
    assert evaluated[0].loss_sum == pytest.approx(float(total.detach()), rel=1e-5)
    parts = [engine.chunks[n].module.canonical_parameters() for n, engine in enumerate((lower_engine, upper_engine))]
    for name, parameter in reference.canonical_parameters().items():
        expected = parameter.grad / SHAPE.gradient_scale
        torch.testing.assert_close((parts[0] | parts[1])[name].grad, expected, rtol=1e-4, atol=1e-6, msg=name)


def test_evaluation_touches_no_gradient_and_counts_each_token_once(batches):
    module = make_slice(0, LAYERS)
    engine = make_engine(module, generate("1f1b", 1, 3).actions[0], batches)
    (result,) = engine.evaluate(0, num_batches=2)
    held_out = [batches.validation(index) for index in range(2)]
    assert result.tokens == sum(batch.num_tokens for batch in held_out)
    with torch.no_grad():
        expected = sum(float(summed_cross_entropy(module(batch.tokens), batch.labels)) for batch in held_out)
    assert result.loss_sum == result.raw_loss_sum  # one stage: no cut, no codec
    assert result.loss_sum == pytest.approx(expected, rel=1e-5)
    assert all(p.grad is None for p in module.parameters())


def test_gradients_cross_a_cut_times_a_power_of_two_and_weights_see_nothing_of_it(batches):
    below, above = lossless_sides()
    activations = [torch.randn(SHAPE.boundary, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    returned = [below.name(0, Purpose.TRAIN, n, Direction.BACKWARD) for n in range(3)]
    for n, x in enumerate(activations):
        below.post(returned[n], SHAPE.boundary)
        below.send(below.name(0, Purpose.TRAIN, n, Direction.FORWARD), x)
    module, reference = make_slice(1, LAYERS), make_slice(1, LAYERS)
    make_engine(module, generate("gpipe", 2, 3).actions[1], batches, incoming=above).run_step(0)
    batch = batches.train(0)
    assert batch.num_tokens == 48
    for n, x in enumerate(activations):
        x.requires_grad_()
        (summed_cross_entropy(reference(x), batch.micro_batch(n)[1]) / 48).backward()
        assert torch.equal(below.receive(returned[n]), 64 * x.grad)
    expected = {name: p.grad for name, p in reference.canonical_parameters().items()}
    assert all(torch.equal(p.grad, expected[name]) for name, p in module.canonical_parameters().items())


def test_backwards_before_the_last_forward_wait_for_room_where_the_tokens_are():
    """With depth 2 of 4 micro-batches forwards wait for the backwards of 0 and 1; with depth 4 none waits."""
    bounded = generate("1f1b", 2, 4, depths=[2, 1]).actions
    assert {action.micro_batch for action in held_up_by_depth(bounded[0], {0})} == {0, 1}
    assert held_up_by_depth(bounded[1], set()) == set()  # its forwards wait for frames
    assert held_up_by_depth(generate("1f1b", 2, 4, depths=[4, 1]).actions[0], {0}) == set()
