"""Slices against transformers' whole models, and against each other under different cuts."""

import math
import os
import threading
import weakref
from concurrent.futures import Future

import pytest
import torch
from torch import nn

from tahq.errors import ModelError
from tahq.memory.stored_slice import build_slice
from tahq.models import slice as slice_module
from tahq.models.keyed_dropout import KeyedDropout, RandomContext
from tahq.models.partition import BlockRange
from tahq.models.slice import random_weight, slice_parameters

from .conftest import FAMILIES, SEQ_LEN, VOCAB_SIZE, build_all, parameters_of, whole_model

CUTS = [(0, 4), (0, 2, 4), (0, 1, 4), (0, 1, 2, 3, 4)]


def run(slices, tokens):
    """Logits, and gradients of every parameter, passed over the cuts by hand as the pipeline does."""
    inputs, x = [], tokens
    for part in slices:
        x = x.detach().requires_grad_() if x.is_floating_point() else x
        inputs.append(x)
        x = part(x)
    logits = x
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())
    outputs = [*inputs[1:], loss]
    loss.backward()
    for part, x, after in list(zip(slices, inputs, outputs, strict=True))[-2::-1]:
        part(x).backward(after.grad)
    return logits.detach(), {name: p.grad for name, p in parameters_of(slices).items()}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("bounds", CUTS, ids=str)
def test_logits_and_gradients_equal_transformers(family, bounds, tiny_spec, tokens):
    spec = tiny_spec(family)
    slices = build_all(spec, bounds)
    spec.hf_config.tie_word_embeddings = False
    spec.hf_config._attn_implementation = "eager" if family == "gemma2" else "sdpa"  # its scores are capped
    model = whole_model(spec)
    model.load_state_dict({name: p.detach() for name, p in parameters_of(slices).items()}, strict=True)
    logits, gradients = run(slices, tokens)

    expected = model(tokens, use_cache=False).logits
    nn.functional.cross_entropy(expected.flatten(0, 1), tokens.roll(-1, 1).flatten()).backward()

    assert logits.shape == (3, SEQ_LEN, VOCAB_SIZE)
    assert torch.equal(logits, expected)
    for name, parameter in model.named_parameters():
        if spec.layout.experts is None:
            assert torch.equal(gradients[name], parameter.grad), name
        else:  # products of experts add in another order
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dropout", [0.0, 1e-12], ids=["fused attention", "written out"])
def test_records_of_a_row_have_the_losses_and_gradients_that_they_have_alone(family, dropout, tiny_spec, tokens):
    spec = tiny_spec(family, dropout=dropout)
    records = [[tokens[0, :7], tokens[1, :4]], [tokens[2, :1], tokens[0, 7:], tokens[1, 4:9]]]
    rows = torch.stack([nn.functional.pad(torch.cat(row), (0, SEQ_LEN - sum(map(len, row)))) for row in records])
    last = [torch.arange(SEQ_LEN - sum(map(len, row[:-1]))) for row in records]  # continued by the padding
    positions = torch.stack(
        [torch.cat([*(torch.arange(len(r)) for r in row[:-1]), end]) for row, end in zip(records, last, strict=True)]
    )

    def losses(logits: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits, own.flip(0), reduction="sum")

    packed, alone = build_all(spec, (0, 1, 4)), build_all(spec)
    logits = packed[1](packed[0](rows, positions), positions)
    for row, of_row in zip(records, logits, strict=True):
        parts = of_row[: sum(map(len, row))].split([len(record) for record in row])
        for record, part in zip(row, parts, strict=True):
            loss, expected = losses(part, record), losses(alone[0](record[None])[0], record)
            assert abs(float(loss.detach() - expected.detach())) < 1e-5 * len(record)
            loss.backward(retain_graph=True)
            expected.backward()
    gradients = {name: p.grad for name, p in parameters_of(packed).items()}
    for name, parameter in parameters_of(alone).items():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cut_divides_the_parameters_and_changes_no_random_weight(family, tiny_spec):
    spec = tiny_spec(family)
    whole = parameters_of(build_all(spec))
    for bounds in CUTS[1:]:
        slices = build_all(spec, bounds)
        cut = parameters_of(slices)
        assert list(cut) == list(whole)
        assert all(torch.equal(cut[name], whole[name]) for name in whole)
        assert spec.layout.embedding_weight in slices[0].canonical_parameters()
        assert "lm_head.weight" in slices[-1].canonical_parameters()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("bounds", [(0, 4), (0, 1, 2, 3, 4)], ids=str)
def test_dropout_does_not_depend_on_the_cut_or_on_what_ran_before(family, bounds, tiny_spec, tokens):
    spec = tiny_spec(family, dropout=0.2)
    random = RandomContext(7)
    random.at(step=3, replica=0, micro_batch=2, purpose=0)
    logits, gradients = run(build_all(spec, random=random), tokens)
    torch.rand(1)  # moves the global generator, which must not matter
    random.at(step=3, replica=0, micro_batch=1, purpose=0)
    other, _ = run(build_all(spec, random=random), tokens)
    random.at(step=3, replica=0, micro_batch=2, purpose=0)
    again, gradients_again = run(build_all(spec, bounds, random=random), tokens)

    assert torch.equal(again, logits)
    assert all(torch.equal(gradients_again[name], gradients[name]) for name in gradients)
    assert not torch.equal(other, logits)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_checkpointing_gives_equal_gradients(family, dropout, tiny_spec, tokens):
    spec = tiny_spec(family, dropout=dropout)
    results = []
    for checkpoint_blocks in (False, True):
        random = RandomContext(7)
        (part,) = build_all(spec, random=random)
        part.checkpoint_blocks = checkpoint_blocks
        random.at(0, 0, 0, 0)
        loss = nn.functional.cross_entropy(part(tokens).flatten(0, 1), tokens.flatten())
        random.at(0, 0, 1, 0)  # another micro-batch's forward comes between, as under 1F1B
        part(tokens)
        loss.backward()
        results.append({name: p.grad for name, p in part.canonical_parameters().items()})
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_written_out_attention_agrees_with_the_fused_one(family, tiny_spec, tokens):
    # A keep probability of 1 − 1e-12 drops nothing among these few weights, but takes the other path.
    written = build_all(tiny_spec(family, dropout=1e-12))[0](tokens)
    fused = build_all(tiny_spec(family))[0](tokens)
    # fp32 sums of at most 48 products in another order: some ulps of values near 0.1
    torch.testing.assert_close(written, fused, rtol=1e-5, atol=1e-6)


def test_every_parameter_has_its_own_memory_even_in_a_tied_model(tiny_spec):
    spec = tiny_spec("gpt2")
    assert spec.tied
    parameters = parameters_of(build_all(spec))
    head, embedding = parameters["lm_head.weight"], parameters["transformer.wte.weight"]
    assert torch.equal(head, embedding)
    assert len({p.data_ptr() for p in parameters.values()}) == len(parameters)


def test_decay_spares_norms_and_biases(tiny_spec):
    (part,) = build_all(tiny_spec("qwen3", overrides={"attention_bias": True}))
    decayed = {name for name, p in part.canonical_parameters().items() if part.is_decayed(name, p)}
    spared = set(part.canonical_parameters()) - decayed
    assert all("norm" in name or name.endswith("bias") for name in spared)
    assert all("norm" not in name and not name.endswith("bias") for name in decayed)
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= decayed


def test_a_padding_token_gets_no_gradient_as_in_transformers(tiny_spec, tokens):
    spec = tiny_spec("llama", overrides={"pad_token_id": 0})
    tokens[0, :4] = 0
    slices = build_all(spec, (0, 2, 4))
    _, gradients = run(slices, tokens)
    assert torch.equal(parameters_of(slices)["model.embed_tokens.weight"][0], torch.zeros(32))
    assert torch.equal(gradients["model.embed_tokens.weight"][0], torch.zeros(32))


@pytest.mark.parametrize("overrides", [{"hidden_act": "sorcery"}, {"rope_parameters": {"rope_type": "sorcery"}}])
def test_a_model_that_transformers_cannot_build_is_refused(overrides, tiny_spec):
    with pytest.raises(ModelError, match="overrides") as caught:
        build_all(tiny_spec("llama", overrides=overrides))
    assert "\n" not in str(caught.value)


# -- random weights --


@pytest.mark.parametrize("family", FAMILIES)
def test_distributions_of_random_weights_equal_transformers(family, tiny_spec):
    spec = tiny_spec(family, hidden_size=64, intermediate_size=128, vocab_size=128)
    torch.manual_seed(0)
    reference = whole_model(spec)
    for name, theirs in reference.state_dict().items():
        ours = random_weight(spec, name, theirs.shape, seed=0)
        if theirs.std() == 0:
            assert torch.equal(ours, theirs), name
        else:
            # The deviation of n normal numbers is itself known to 1/√(2n); ten of that is generous.
            tolerance = 10 / math.sqrt(2 * theirs.numel())
            assert ours.std().item() == pytest.approx(theirs.std().item(), rel=tolerance), name
            assert abs(ours.mean().item()) < 6 * ours.std().item() / math.sqrt(ours.numel()), name


def test_weights_depend_on_seed_and_name_alone(tiny_spec):
    spec, shape = tiny_spec("llama"), torch.Size([8, 8])
    weight = random_weight(spec, "model.layers.0.mlp.up_proj.weight", shape, seed=1)
    torch.manual_seed(99)
    assert torch.equal(weight, random_weight(spec, "model.layers.0.mlp.up_proj.weight", shape, seed=1))
    assert not torch.equal(weight, random_weight(spec, "model.layers.1.mlp.up_proj.weight", shape, seed=1))
    assert not torch.equal(weight, random_weight(spec, "model.layers.0.mlp.up_proj.weight", shape, seed=2))


@pytest.fixture
def three_threads(monkeypatch):
    """On a machine with three cores or more; `one_thread` resets torch's number."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    torch.set_num_threads(3)


def test_weights_drawn_at_once_equal_those_drawn_alone(tiny_spec, monkeypatch, three_threads):
    spec, whole = tiny_spec("llama"), BlockRange(0, 4, 4)
    shapes = slice_parameters(spec, whole)
    drawing, first = threading.Barrier(3), iter(range(3))

    def draw(*args):
        if next(first, None) is not None:
            drawing.wait(timeout=60)  # until all three are being drawn
        return random_weight(*args)

    monkeypatch.setattr(slice_module, "random_weight", draw)
    filled = []
    model = build_slice(spec, whole, seed=7, device="cpu", random=RandomContext(7), filled=filled.append)
    for name, weight in model.canonical_parameters().items():
        assert torch.equal(weight, random_weight(spec, name, shapes[name], seed=7)), name
    assert filled == [shape.numel() for shape in shapes.values()]


def test_no_more_drawn_weights_are_in_memory_than_threads(tiny_spec, monkeypatch, three_threads):
    alive, most = set(), []

    class FastPool(slice_module.ThreadPoolExecutor):
        def submit(self, draw, *args):
            """The weight is there at once, though the caller may not need it for long."""
            weight, future = draw(*args), Future()
            alive.add(id(weight))
            most.append(len(alive))
            weakref.finalize(weight, alive.remove, id(weight))
            future.set_result(weight)
            return future

    monkeypatch.setattr(slice_module, "ThreadPoolExecutor", FastPool)
    build_all(tiny_spec("llama"))
    assert max(most) == 3
    assert len(most) > 30
    assert alive == set()


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
    # CUDA sums an embedding's gradient in no fixed order; only the blocks and the head are compared.
    compared = [name for name in gradients if ".h." in name or ".layers." in name or "lm_head" in name]
    assert all(torch.equal(gradients_again[name], gradients[name]) for name in compared)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("family", FAMILIES)
def test_random_weights_on_cuda_equal_those_on_the_cpu(family, tiny_spec):
    spec, whole = tiny_spec(family), BlockRange(0, 4, 4)
    on_cpu, on_cuda = (build_slice(spec, whole, seed=1, device=d, random=RandomContext(1)) for d in ("cpu", "cuda"))
    expected = on_cpu.canonical_parameters()
    assert all(torch.equal(p.cpu(), expected[name]) for name, p in on_cuda.canonical_parameters().items())


ONES = torch.ones(64, 64)


def drop(path="h.0", p=0.25, seed=1, **name):
    random = RandomContext(seed)
    random.at(**({"step": 0, "replica": 0, "micro_batch": 0, "purpose": 0} | name))
    return KeyedDropout(p, path, random)(ONES)


def test_the_mask_scales_what_it_keeps():
    y = drop()
    assert torch.equal(y.unique(), torch.tensor([0.0, 4 / 3]))
    # 4096 draws of p = 1/4: six standard deviations are 6 · √(3/16 / 4096) = 0.04
    assert abs((y == 0).float().mean().item() - 0.25) < 0.04


@pytest.mark.parametrize(
    "other",
    [{"path": "h.1"}, {"seed": 2}, {"step": 1}, {"replica": 1}, {"micro_batch": 1}, {"purpose": 1}],
    ids=lambda other: next(iter(other)),
)
def test_every_part_of_the_name_changes_the_mask(other):
    assert torch.equal(drop(), drop())
    assert not torch.equal(drop(), drop(**other))


def test_dropout_is_the_identity_in_evaluation_and_at_zero():
    module = KeyedDropout(0.5, "h.0", RandomContext(0))
    assert module.eval()(ONES) is ONES
    assert KeyedDropout(0.0, "h.0", RandomContext(0))(ONES) is ONES
