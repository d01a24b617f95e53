"""An optimizer with 8-bit moments trains the stages of a real run, with TAH on the wire, and resumes to the bit."""

import torch
from support.runs import launch, tiny

TRAINING = {
    "optimizer": "adamw8bit",
    "adamw8bit": {"min_elements": 1000},
    "lr_schedule": "constant",
}


def config(steps: int) -> dict:
    return tiny(
        wire={"activations": "tah", "gradients": "fixed:bits=8"},
        training={"steps": steps, **TRAINING},
    )


def test_four_stages_train_with_8_bit_moments_and_resume_to_the_bit(tmp_path):
    (tmp_path / "whole").mkdir()
    whole = launch(tmp_path / "whole", config(6))
    assert whole.returncode == 0, whole.stderr
    assert whole.losses[-1] < whole.losses[0]
    assert launch(tmp_path, config(3)).returncode == 0
    resumed = launch(tmp_path, config(3), "--resume", "--set", "training.steps=6")
    assert resumed.returncode == 0, resumed.stderr
    assert "no longer exact" not in resumed.stdout
    assert resumed.losses == whole.losses
    ours, theirs = resumed.snapshot(), whole.snapshot()
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    moments = {name: tensor for name, tensor in ours.items() if name.startswith("optimizer/exp_avg_sq/")}
    assert {tensor.dtype for tensor in moments.values() if tensor.numel() >= 1000} == {torch.uint8}
