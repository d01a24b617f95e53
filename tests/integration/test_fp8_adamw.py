"""COAT's optimizer in a real pipeline: four workers, TAH-Quant on the wire, stopped and resumed."""

import torch
from support.runs import Run, launch, tiny

CONFIG = tiny(
    run={"name": "fp8"},
    training={"optimizer": "fp8_adamw", "steps": 6, "lr": 3e-3},
    wire={"activations": "tah", "gradients": "fixed:bits=8"},
)


def with_steps(steps: int) -> dict:
    return {**CONFIG, "training": {**CONFIG["training"], "steps": steps}}


def assert_same_state(left: Run, right: Run) -> None:
    ours, theirs = left.snapshot(), right.snapshot()
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def test_four_stages_train_with_fp8_moments_and_resume_exactly(tmp_path):
    whole = tmp_path / "whole"
    whole.mkdir()
    expected = launch(whole, with_steps(6))
    assert expected.returncode == 0, expected.stderr
    stopped = launch(tmp_path, with_steps(3))
    assert stopped.returncode == 0, stopped.stderr
    run = launch(tmp_path, with_steps(3), "--resume", "--set", "training.steps=6")
    assert run.returncode == 0, run.stderr
    assert "no longer exact" not in run.stdout
    assert run.losses == expected.losses
    assert run.losses[-1] < run.losses[0] - 0.2
    assert_same_state(run, expected)
    snapshot = run.snapshot()
    for name in [name.removeprefix("model/") for name in snapshot if name.startswith("model/")]:
        assert snapshot[f"optimizer/exp_avg/{name}"].dtype == torch.uint8
        assert snapshot[f"optimizer/exp_avg/{name}"].shape == snapshot[f"model/{name}"].shape
        assert snapshot[f"optimizer/exp_avg_scale/{name}"].dtype == torch.bfloat16
        assert snapshot[f"optimizer/step/{name}"] == 6


def test_resume_in_other_formats_is_refused(tmp_path):
    config = tiny(pipeline={"stages": 1}, training={"optimizer": "fp8_adamw", "steps": 1})
    assert launch(tmp_path, config).returncode == 0
    run = launch(tmp_path, config, "--resume", "--set", "training.fp8_adamw.second=e5m2")
    assert run.returncode == 2
    assert "training.fp8_adamw.second was 'e4m3', is 'e5m2' (the checkpoint has moments in those formats)" in run.stderr
