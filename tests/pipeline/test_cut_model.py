"""The model in one process has the gradients of the textbook loop, with codecs at its cuts and without."""

import json
from functools import partial

import pytest
import torch
from support.cuts import codec_table, cut_sides
from support.plain_loop import PlainModel
from support.runs import tiny
from support.small_slices import EXPERTS
from torch.nn import functional

from tahq.config.cluster import ClusterConfig
from tahq.data.batches import BatchSource
from tahq.data.dataset import load_dataset
from tahq.data.tokenizer import load_tokenizer
from tahq.errors import ConfigError
from tahq.models.experts.load_balance import router_loss_of
from tahq.models.slice import HEAD_WEIGHT
from tahq.pipeline.boundary import CutIdentity
from tahq.pipeline.cut_model import UNCOMPRESSED, CutModel, ProbedWire
from tahq.pipeline.engine import Chunk, StageEngine, StepShape
from tahq.pipeline.schedule.generators import generate
from tahq.pipeline.schedule.schedule import Action

CPU = torch.device("cpu")

WIRE = ProbedWire("tah", "fixed:bits=4,round=stochastic")


def configured(**sections) -> ClusterConfig:
    model = {"num_layers": 4, "hidden_size": 32, "vocab_size": 256, **sections.pop("model", {})}
    wire = {"activations": WIRE.activations, "gradients": WIRE.gradients}
    return ClusterConfig.model_validate(tiny(model=model, wire=wire, **sections))


def cut_model(config: ClusterConfig, *, cut: bool = True) -> CutModel:
    num_pieces = partial(config.training.num_pieces, seq_len=config.data.seq_len)
    slices = PlainModel(config, cut=cut).slices
    router_loss = router_loss_of(config.training.router_aux_loss, slices[0].spec)
    return CutModel(slices, seed=config.run.seed, num_pieces=num_pieces, router_loss=router_loss)


def batch_source(config: ClusterConfig) -> BatchSource:
    dataset, training = load_dataset(config.data, load_tokenizer(config.data)), config.training
    return BatchSource(
        dataset, seed=config.run.seed, global_batch=training.global_batch, micro_batch=training.micro_batch
    )


def first_batch(config: ClusterConfig):
    return batch_source(config).train(3)


def plain_gradients(config: ClusterConfig, *, cut: bool) -> tuple[float, dict[str, torch.Tensor]]:
    model, batch, total = PlainModel(config, cut=cut), first_batch(config), 0.0
    for index in range(config.training.num_micro_batches):
        tokens, labels = batch.micro_batch(index)
        balance = model.begin_balance(tokens.numel())
        logits = model.forward(tokens, 3, index)
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / batch.num_tokens
        if balance is not None:
            balance.totals = balance.sums[0]
        loss.backward()
        total += float(loss.detach())
    return total, {name: p.grad for name, p in model.parameters().items()}


def assert_same_gradients(model: CutModel, expected: dict[str, torch.Tensor]) -> None:
    assert model.parameters.keys() == expected.keys()
    assert [name for name, p in model.parameters.items() if not torch.equal(p.grad, expected[name])] == []


CONFIGS = {
    "gpt2 with dropout": {"model": {"dropout": 0.1}},
    "llama": {"model": {"family": "llama", "num_kv_heads": 1, "intermediate_size": 48}},
    "two stages": {"pipeline": {"stages": 2}},
    "balanced experts": {
        "model": {"family": "mixtral", "num_kv_heads": 1, "overrides": EXPERTS["mixtral"]},
        "training": {"router_aux_loss": "pooled"},
    },
    "samples in pieces": {"pipeline": {"stages": 2}, "training": {"seq_len_schedule": [[8, 4]]}},
}


@pytest.mark.parametrize("sections", CONFIGS.values(), ids=CONFIGS.keys())
def test_gradients_with_codecs_are_those_of_the_plain_loop_with_codecs_to_the_bit(sections):
    config = configured(**sections)
    model, (loss, expected) = cut_model(config), plain_gradients(config, cut=True)
    assert model.compute_gradients(first_batch(config), 3, WIRE) == pytest.approx(loss, rel=1e-6)
    assert_same_gradients(model, expected)


@pytest.mark.parametrize("sections", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize("wire", [UNCOMPRESSED, ProbedWire("raw:dtype=fp32", "raw:dtype=fp32")], ids=["none", "raw"])
def test_gradients_without_codecs_are_those_of_the_uncut_model_to_the_bit(sections, wire):
    config = configured(**sections)
    model, (_, expected) = cut_model(config), plain_gradients(config, cut=False)
    model.compute_gradients(first_batch(config), 3, wire)
    assert_same_gradients(model, expected)


def test_gradients_too_small_for_fp16_cross_in_fp16():
    """A head of small weights stands for a step of many tokens: without the scale fp16 errs by a tenth."""
    config = configured()
    model, batch = cut_model(config), first_batch(config)
    with torch.no_grad():
        model.parameters[HEAD_WEIGHT].mul_(1e-4)
    model.compute_gradients(batch, 0)
    exact = {name: p.grad.clone() for name, p in model.parameters.items()}
    model.compute_gradients(batch, 0, ProbedWire("raw:dtype=fp32", "raw:dtype=fp16"))
    below = [name for name in exact if name.startswith("transformer.h.0.") and name.endswith(".weight")]
    errors = {name: float((model.parameters[name].grad - exact[name]).norm() / exact[name].norm()) for name in below}
    assert all(0 < error < 1e-3 for error in errors.values()), errors


def engine_gradients(config: ClusterConfig, batches: BatchSource, wire: ProbedWire) -> dict[str, torch.Tensor]:
    """The gradients of two stages in one thread: the upper one runs before the lower one's first backward."""
    training, model = config.training, PlainModel(config, cut=True)
    shape = StepShape(training.num_micro_batches, training.micro_batch, config.data.seq_len, 32)
    identity = CutIdentity(1, config.run.seed, 0)
    lower_cut, upper_cut = cut_sides(lambda: codec_table(wire.activations, wire.gradients), identity)
    rows = generate("gpipe", 2, training.num_micro_batches).actions
    common = {"shape": shape, "batches": batches, "random": model.random, "device": CPU}
    lower, upper = model.slices
    above = StageEngine(chunks={1: Chunk(upper, upper_cut, None)}, actions=rows[1], **common)

    def before(step: int, action: Action) -> None:
        if str(action) == "0B0":
            above.run_step(step)

    below = StageEngine(chunks={0: Chunk(lower, None, lower_cut)}, actions=rows[0], on_action=before, **common)
    below.run_step(3)
    return {name: p.grad for name, p in model.parameters().items()}


def test_gradients_of_few_labels_are_those_of_the_engine_to_the_bit_where_fp16_rounds_them(tmp_path):
    """fp16 has other subnormal numbers at another scale: it must be that of the engine, which counts all tokens."""
    rows = [json.dumps({"prompt": f"question {index} of", "response": " a"}) for index in range(32)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(rows))
    config = configured(pipeline={"stages": 2}, data={"text": None, "jsonl": str(tmp_path / "pairs.jsonl")})
    batches, wire = batch_source(config), ProbedWire("raw:dtype=fp32", "raw:dtype=fp16")
    assert batches.train(3).num_tokens * 4 < batches.train(3).tokens.numel()
    model = cut_model(config)
    model.compute_gradients(batches.train(3), 3, wire)
    assert_same_gradients(model, engine_gradients(config, batches, wire))


def test_groups_name_where_each_parameter_is_and_leave_none_out():
    model = cut_model(configured(pipeline={"stages": 2}))
    groups = model.groups()
    assert list(groups) == ["embedding", "stage 0", "stage 1", "head"]
    assert list(groups["embedding"]) == ["transformer.wte.weight", "transformer.wpe.weight"]
    assert list(groups["head"]) == ["transformer.ln_f.weight", "transformer.ln_f.bias", HEAD_WEIGHT]
    assert all(name.startswith(("transformer.h.2.", "transformer.h.3.")) for name in groups["stage 1"])
    assert {name for group in groups.values() for name in group} == model.parameters.keys()


def test_tied_copies_have_equal_gradients_and_count_once():
    config = configured(model={"tie": "sync"})
    model = cut_model(config)
    model.compute_gradients(first_batch(config), 3)
    embedding = model.parameters["transformer.wte.weight"]
    assert torch.equal(embedding.grad, model.parameters[HEAD_WEIGHT].grad)
    assert HEAD_WEIGHT not in model.groups()["head"]


def test_codecs_with_state_are_refused_by_name():
    with pytest.raises(ConfigError, match="aqsgd remembers what it sent"):
        ProbedWire("aqsgd:bits=4", "fixed:bits=8").codecs()
    ProbedWire("aqsgd:bits=4,cache=none", "fixed:bits=8").codecs()
