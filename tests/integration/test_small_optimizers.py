"""Optimizers with small states or weights: the same at any number of stages, and resumed to the bit."""

import pytest
import torch
from support.runs import assert_same_run, overrides, tiny, train

pytestmark = pytest.mark.ci

WIRE = {"activations": "tah", "gradients": "fixed:bits=8"}
LLAMA = {"family": "llama", "num_kv_heads": 1, "intermediate_size": 96}
TRAINING = {
    "adamw8bit": {"optimizer": "adamw8bit", "adamw8bit": {"min_elements": 1000}, "lr_schedule": "constant"},
    "fp8_adamw": {"optimizer": "fp8_adamw", "lr": 3e-3},
}


@pytest.mark.acceptance
@pytest.mark.parametrize("optimizer", ["adamw8bit", "fp8_adamw"])
def test_four_stages_resume_to_the_bit(tmp_path, optimizer):
    def config(steps: int) -> dict:
        return tiny(wire=WIRE, training={"steps": steps, **TRAINING[optimizer]})

    whole = train(tmp_path / "whole", config(6))
    assert whole.losses[-1] < whole.losses[0]
    train(tmp_path, config(3))
    resumed = train(tmp_path, config(3), "--resume", *overrides("training.steps=6"))
    assert "no longer exact" not in resumed.stdout
    assert_same_run(resumed, whole)
    state = resumed.snapshot()
    for name in [name.removeprefix("model/") for name in state if name.startswith("model/")]:
        if state[f"model/{name}"].numel() >= 1000:
            assert state[f"optimizer/exp_avg_sq/{name}"].dtype == torch.uint8
        if optimizer == "fp8_adamw":
            assert state[f"optimizer/exp_avg/{name}"].shape == state[f"model/{name}"].shape
            assert state[f"optimizer/exp_avg_scale/{name}"].dtype == torch.bfloat16
            assert state[f"optimizer/step/{name}"] == 6


def in_bf16(memory: dict, model: dict, **sections: dict) -> dict:
    """Weights, moments and, with `memory`, more in bf16."""
    training = {
        "optimizer": "adamw_bf16",
        "adamw_bf16": {"weights": "bf16"},
        "eval_every": 2,
        "lr_schedule": "constant",
    }
    precision = "bf16" if "residual" in memory else "fp32"
    training |= {"precision": precision, **sections.pop("training", {})}
    return tiny(model=model, memory=memory, training=training, **sections)


@pytest.mark.parametrize(
    ("memory", "model"),
    [
        ({"residual": "bf16", "gradients": "bf16"}, LLAMA),
        pytest.param({}, {"tie": "sync"}, marks=pytest.mark.acceptance),
    ],
    ids=["all", "weights"],
)
def test_bf16_training_is_the_same_at_any_number_of_stages_and_resumed_to_the_bit(tmp_path, memory, model):
    one = train(tmp_path / "one", in_bf16(memory, model, pipeline={"stages": 1, "schedule": "gpipe"}))
    parts = {"stages": 2, "schedule": "zero-bubble"}
    train(tmp_path, in_bf16(memory, model, pipeline=parts, training={"steps": 2}))
    more = overrides("training.steps=4", "pipeline.stages=3", "pipeline.schedule=1f1b")
    resumed = train(tmp_path, in_bf16(memory, model, pipeline=parts, training={"steps": 2}), "--resume", *more)
    assert "no longer exact" not in resumed.stdout
    assert_same_run(resumed, one)
    assert [row.get("validation") for row in resumed.metrics] == [row.get("validation") for row in one.metrics]
    assert {tensor.dtype for tensor in one.weights.values() if tensor.ndim >= 2} == {torch.bfloat16}
    plain = train(tmp_path / "plain", tiny(model=model, pipeline={"stages": 1}))
    assert one.losses == pytest.approx(plain.losses, rel=1e-3)
    assert one.losses[-1] < one.losses[0]


@pytest.mark.acceptance
def test_bf16_training_learns_as_fp32_does(tmp_path):
    """Both under bf16 products, with β₂ = 0.999; the mean loss of the last 20 of 150 steps."""
    training = {"steps": 150, "lr": 3e-3, "betas": [0.9, 0.999], "precision": "bf16", "eval_every": None}
    memory, sections = {"residual": "bf16", "gradients": "bf16"}, {"training": training, "pipeline": {"stages": 1}}
    bf16 = train(tmp_path / "bf16", in_bf16(memory, LLAMA, **sections))
    fp32 = train(tmp_path / "fp32", tiny(model=LLAMA, **sections))
    assert sum(bf16.losses[-20:]) / 20 == pytest.approx(sum(fp32.losses[-20:]) / 20, rel=0.02)
