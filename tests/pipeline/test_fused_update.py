"""The update within the backward: its results, and the configurations that refuse it."""

from functools import partial

import pytest
import torch
from pydantic import ValidationError

from tahq.config.cluster import ClusterConfig
from tahq.data.batches import BatchSource
from tahq.data.config import DataConfig
from tahq.data.dataset import load_dataset
from tahq.data.tokenizer import load_tokenizer
from tahq.errors import ConfigError
from tahq.memory.galore.qgalore import build_low_rank_slice, low_rank_weights
from tahq.memory.offload.blocks import offload_blocks, place_on_host
from tahq.memory.offload.host_memory import HostMemory
from tahq.models.config import ModelConfig
from tahq.models.keyed_dropout import RandomContext
from tahq.models.model_spec import load_spec
from tahq.models.partition import BlockRange
from tahq.pipeline.config import PipelineConfig, TrainingConfig
from tahq.pipeline.engine import StepShape
from tahq.pipeline.optimizer import low_rank_settings
from tahq.pipeline.stage import Stage, StagePlan
from tahq.pipeline.update import StageUpdate
from tahq.quant.config import WireConfig

SHAPE = StepShape(num_micro_batches=1, micro_batch=2, seq_len=8, hidden_size=16)
ALONE = {
    "steps": 4,
    "global_batch": 2,
    "micro_batch": 2,
    "clip_norm": None,
    "non_finite": "halt",
    "optimizer": "qgalore",
    "qgalore": {"fused": True},
}


def low_rank_slice(training: TrainingConfig, vocab_size: int = 32, which=()):
    config = ModelConfig(family="qwen2", num_layers=2, hidden_size=16, num_heads=2)  # some linear layers have biases
    spec = load_spec(config, vocab_size=vocab_size, seq_len=8)
    settings, device = low_rank_settings(training, 3), torch.device("cpu")
    memory = HostMemory(device)
    placed = partial(place_on_host, which=which, memory=memory, copies=None)
    module = build_low_rank_slice(
        spec, BlockRange(0, 2, 2), settings, seed=3, device=device, random=RandomContext(3), placed=placed
    )
    offload_blocks(module, which, memory)
    return module


def stage(training: TrainingConfig):
    module = low_rank_slice(training)
    parameters, low_rank = module.canonical_parameters(), low_rank_weights(module)
    update = StageUpdate(training, parameters, module.is_decayed, 4, None, low_rank, SHAPE.gradient_scale)
    return module, update


def trained(training: TrainingConfig, schedule: str, batches: BatchSource, which, bf16) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint after two steps, with a restart, of a stage under that schedule."""
    plan = StagePlan(
        stage=0,
        run=1,
        seed=3,
        seq_len=8,
        total_steps=4,
        training=training,
        pipeline=PipelineConfig(stages=1, schedule=schedule),
        wire=WireConfig(),
        tie=False,
    )
    tensors: dict[str, torch.Tensor] = {}
    for step in range(2):
        modules = {0: low_rank_slice(training, 256, which)}
        stage = Stage(plan, modules, batches, {}, device=torch.device("cpu"), autocast=torch.bfloat16 if bf16 else None)
        if tensors:
            stage.update.load(tensors.__getitem__, set(tensors))
        stage.engine.run_step(step)
        stage.update.squared_norms()
        stage.update.apply(step, 1.0)
        second = [weight.moments["exp_avg_sq"] for weight in low_rank_weights(modules[0]).values()]
        assert {each.untyped_storage().nbytes() == 0 for each in second} == {"v" in which}
        tensors = stage.tensors()
    return tensors


@pytest.fixture
def batches(tmp_path) -> BatchSource:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 20)
    config = DataConfig(text=str(tmp_path), seq_len=8)
    return BatchSource(load_dataset(config, load_tokenizer(config)), seed=0, global_batch=2, micro_batch=2)


def backward(module, update, step, factor=1.0) -> None:
    tokens = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(step))
    update.begin(step)
    (factor * SHAPE.gradient_scale * module(tokens).square().mean()).backward()


def test_no_gradient_is_left_and_weights_have_moved():
    module, update = stage(TrainingConfig(**ALONE))
    before = {name: tensor.clone() for name, tensor in update.tensors().items()}
    backward(module, update, 0)
    assert all(each.grad is None for each in (*module.parameters(), *low_rank_weights(module).values()))
    after = update.tensors()
    unmoved = [name for name in before if name.startswith("model/") and torch.equal(before[name], after[name])]
    assert unmoved == []
    norms = update.squared_norms()
    assert len(norms) == len(low_rank_weights(module)) + len(list(module.parameters()))
    assert all(norm > 0 for norm in norms)


@pytest.mark.parametrize("ends", ["bf16", "fp32", "int8"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("which", "bf16"), [((), False), (("m", "v"), True), (("residual", "v"), True)], ids=str)
def test_weights_and_states_are_those_of_an_update_after_the_backward(batches, schedule, ends, which, bf16):
    def training(fused: bool) -> TrainingConfig:
        return TrainingConfig(**(ALONE | {"qgalore": {"fused": fused, "ends": ends}}))

    after = trained(training(False), "1f1b", batches, (), bf16)
    for fused in (True, False):
        got = trained(training(fused), schedule, batches, which, bf16)
        assert got.keys() == after.keys()
        assert [name for name in after if not torch.equal(got[name], after[name])] == []


@pytest.mark.parametrize("fused", [True, False])
def test_searches_report_progress_in_a_step_with_many(fused):
    module, update = stage(TrainingConfig(**ALONE | {"qgalore": {"fused": fused, "gap": 2}}))
    reports: list[tuple[int, int]] = []
    update.on_search = lambda searched, due: reports.append((searched, due))
    for step, expected in enumerate(([(index + 1, 14) for index in range(14)], [], [])):  # 7 of 14 at step 2
        backward(module, update, step)
        update.apply(step, 1.0)
        assert reports == expected
        reports.clear()
    assert sorted(weight.subspace.num_searches for weight in projected(module)) == [1] * 7 + [2] * 7


def projected(module):
    return [weight for weight in low_rank_weights(module).values() if weight.subspace is not None]


def test_a_gradient_that_comes_past_the_hooks_is_an_internal_error_and_takes_no_step():
    """A split backward, which computes weight gradients later, would cause it."""
    module, update = stage(TrainingConfig(**ALONE | {"qgalore": {"fused": True, "ends": "fp32"}}))
    head = module.canonical_parameters()["lm_head.weight"]
    before = head.detach().clone()
    head.grad = torch.ones_like(head)
    update.begin(0)
    weight = next(iter(low_rank_weights(module).values()))
    weight.take(torch.ones(weight.shape))
    assert torch.equal(head, before)
    with pytest.raises(AssertionError, match="bypassed the hooks"):
        update.squared_norms()


REFUSED = [
    ({"training": {"global_batch": 4}}, "updates within the backward of the only micro-batch, but there are 2"),
    ({"training": {"clip_norm": 1.0}}, "updates before the norm of all gradients is known"),
    ({"training": {"non_finite": "skip"}}, "cannot skip a non-finite step"),
    ({"pipeline": {"stages": 2}}, "needs pipeline.stages 1"),
    ({"model": {"tie": "sync"}}, "model.tie: sync"),
    ({"pipeline": {"schedule": "zero-bubble"}}, "computes weight gradients later.*: use 1f1b"),
]


@pytest.mark.parametrize(("sections", "message"), REFUSED)
def test_refused_where_a_step_is_not_decided_in_the_backward(sections, message):
    usual = {
        "model": {"family": "llama", "num_layers": 2, "hidden_size": 16, "num_heads": 2},
        "data": {"text": "stdlib", "seq_len": 8},
        "training": ALONE,
        "pipeline": {"stages": 1},
    }
    config = {name: values | sections.get(name, {}) for name, values in usual.items()}
    with pytest.raises((ValidationError, ConfigError), match=message):
        ClusterConfig.model_validate(config)
    ClusterConfig.model_validate(config | {"training": config["training"] | {"optimizer": "adamw"}})
