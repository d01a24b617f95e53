"""Optimizers with small states train four stages with TAH on the wire, and resume to the bit."""

import pytest
import torch
from support.runs import assert_same_run, overrides, tiny, train

WIRE = {"activations": "tah", "gradients": "fixed:bits=8"}
TRAINING = {
    "adamw8bit": {"optimizer": "adamw8bit", "adamw8bit": {"min_elements": 1000}, "lr_schedule": "constant"},
    "fp8_adamw": {"optimizer": "fp8_adamw", "lr": 3e-3},
}


@pytest.mark.parametrize("optimizer", [pytest.param("adamw8bit", marks=pytest.mark.acceptance), "fp8_adamw"])
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
