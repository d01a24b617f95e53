"""The update within the backward: what is left of gradients, and where it is refused."""

import pytest
import torch
from pydantic import ValidationError

from tahq.config import ClusterConfig
from tahq.errors import ConfigError
from tahq.memory.qgalore import build_low_rank_slice, low_rank_weights
from tahq.models.config import ModelConfig
from tahq.models.keyed_dropout import RandomContext
from tahq.models.model_spec import load_spec
from tahq.models.partition import BlockRange
from tahq.pipeline.chunk import StepShape
from tahq.pipeline.config import TrainingConfig
from tahq.pipeline.low_rank import low_rank_settings
from tahq.pipeline.update import StageUpdate

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


def stage(training: TrainingConfig):
    spec = load_spec(ModelConfig(family="llama", num_layers=2, hidden_size=16, num_heads=2), vocab_size=32, seq_len=8)
    settings = low_rank_settings(training, 3)
    module = build_low_rank_slice(
        spec, BlockRange(0, 2, 2), settings, seed=3, device=torch.device("cpu"), random=RandomContext(3)
    )
    update = StageUpdate(
        training, module.canonical_parameters(), module.is_decayed, 4, None, low_rank_weights(module), SHAPE
    )
    return module, update


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


def test_commit_finds_nothing_left_to_do():
    module, update = stage(TrainingConfig(**ALONE))
    backward(module, update, 0)
    before = {name: tensor.clone() for name, tensor in update.tensors().items()}
    update.apply(0, 1.0)
    assert all(torch.equal(before[name], tensor) for name, tensor in update.tensors().items())


def test_a_norm_that_is_not_finite_is_seen_by_prepare():
    module, update = stage(TrainingConfig(**ALONE))
    backward(module, update, 0, factor=float("inf"))
    assert not all(norm < float("inf") for norm in update.squared_norms())


REFUSED = [
    ({"global_batch": 4}, "updates within the backward of the only micro-batch, and there are 2"),
    ({"clip_norm": 1.0}, "updates before the norm of all gradients is known"),
    ({"non_finite": "skip"}, "cannot skip a step"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[message[:20] for _, message in REFUSED])
def test_refused_where_a_step_is_not_decided_in_the_backward(changes, message):
    with pytest.raises(ValidationError, match=message):
        TrainingConfig(**(ALONE | changes))
    TrainingConfig(**(ALONE | changes | {"optimizer": "adamw"}))


@pytest.mark.parametrize(
    ("sections", "message"),
    [({"pipeline": {"stages": 2}}, "for pipeline.stages 1"), ({"model": {"tie": "sync"}}, "model.tie: sync")],
    ids=["stages", "tie"],
)
def test_refused_with_several_stages_and_with_tied_embeddings(sections, message):
    model = {"family": "llama", "num_layers": 2, "hidden_size": 16, "num_heads": 2}
    config = {
        "model": model | sections.get("model", {}),
        "data": {"text": "stdlib", "seq_len": 8},
        "training": ALONE,
        "pipeline": {"stages": 1} | sections.get("pipeline", {}),
    }
    with pytest.raises((ValidationError, ConfigError), match=message):
        ClusterConfig.model_validate(config)
