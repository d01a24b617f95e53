"""A run that is stopped and resumed is the run that was never stopped; and what may change on the way."""

import shutil
from pathlib import Path

import pytest
from support.runs import Run, assert_same_run, launch, overrides, tiny, train

LOSSY = {"activations": "tah", "gradients": "fixed:bits=8,round=stochastic"}
CONFIG = tiny(
    run={"snapshot_every": 2},
    model={"dropout": 0.1},
    wire=LOSSY,
    pipeline={"stages": 2},
    training={"steps": 6, "lr_schedule": "constant", "eval_every": 2, "eval_batches": 1},
)


def with_steps(steps: int) -> dict:
    return {**CONFIG, "training": {**CONFIG["training"], "steps": steps}}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Run:
    return train(tmp_path_factory.mktemp("whole"), with_steps(6))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> Path:
    """A folder with a run that ended after half of its steps."""
    folder = tmp_path_factory.mktemp("halfway")
    train(folder, with_steps(3))
    return folder


@pytest.fixture
def halfway(stopped, tmp_path) -> Path:
    """The folder of such a run in `tmp_path`, as if it had been made there."""
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    return tmp_path / "runs" / CONFIG["run"]["name"]


def resume(tmp_path, *changes: str) -> Run:
    return launch(tmp_path, with_steps(3), "--resume", *overrides("training.steps=6", *changes))


def test_resume_equals_uninterrupted_to_the_bit(tmp_path, halfway, uninterrupted):
    run = resume(tmp_path)
    assert run.returncode == 0, run.stderr
    assert "no longer exact" not in run.stdout
    assert [row["step"] for row in run.metrics] == [1, 2, 3, 4, 5, 6]
    assert_same_run(run, uninterrupted)


def test_resume_with_other_gradient_bits_goes_on_and_says_that_it_is_not_exact(tmp_path, halfway, uninterrupted):
    run = resume(tmp_path, "wire.gradients=fixed:bits=10")
    assert run.returncode == 0, run.stderr
    assert "wire.gradients" in run.stdout + run.stderr
    assert "exact" in run.stdout + run.stderr
    assert run.losses[:3] == uninterrupted.losses[:3]
    link = run.metrics[-1]["links"]
    gradients = [row for row in link if row["direction"] == "gradients"]
    assert all(10 < row["bits_per_element"] < 10.6 for row in gradients)


def test_resume_with_another_number_of_stages_goes_on(tmp_path):
    config = tiny(pipeline={"stages": 4}, training={"steps": 3})
    train(tmp_path, config)
    expected = train(tmp_path / "whole", tiny(pipeline={"stages": 2}, training={"steps": 6}))
    run = train(tmp_path, config, "--resume", *overrides("training.steps=6", "pipeline.stages=2"))
    assert_same_run(run, expected)  # raw fp32 on the wire: exact whatever the number of stages


def test_resume_by_other_arithmetic_goes_on_and_every_stage_says_so(tmp_path, halfway):
    run = resume(tmp_path, "run.threads=2")
    assert run.returncode == 0, run.stderr
    said = [line for line in run.stdout.splitlines() if " threads: 1 -> 2" in line]
    assert sorted(line.partition(" (")[0] for line in said) == ["warning: stage 0", "warning: stage 1"]
    assert all("no longer exact" in line for line in said)
    assert len(run.losses) == 6


def test_resume_with_another_sequence_length_goes_on(tmp_path, halfway):
    run = resume(tmp_path, "data.seq_len=16", "model.max_seq_len=32")
    assert run.returncode == 0, run.stderr
    assert len(run.losses) == 6


@pytest.mark.parametrize("change", ["model.hidden_size=32", "run.seed=8"])  # the others: tests/pipeline/test_resume.py
def test_resume_refuses_what_cannot_change(tmp_path, halfway, change):
    run = resume(tmp_path, change)
    assert run.returncode == 2
    assert change.partition("=")[0] in run.stderr
    assert "Traceback" not in run.stderr
    assert len(run.losses) == 3


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def test_the_snapshot_before_a_damaged_one_is_used_and_said_so(tmp_path, halfway, uninterrupted):
    (damaged,) = (halfway / "snapshots" / "step-00000003").glob("stage-001*.safetensors")
    flip_a_bit(damaged)
    run = resume(tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("warning: ")
    warning = run.stdout.splitlines()[0]
    assert f"{damaged.name} is damaged" in warning
    assert warning.endswith("resuming from step-00000002 instead")
    assert "is damaged" in (halfway / "logs" / "launcher.log").read_text()
    assert [row["step"] for row in run.metrics] == [1, 2, 3, 4, 5, 6]
    assert_same_run(run, uninterrupted)


def test_damaged_snapshots_are_refused_by_the_names_of_their_files(tmp_path, halfway):
    damaged = sorted((halfway / "snapshots").glob("step-*/stage-001*.safetensors"))
    assert len(damaged) == 2
    for path in damaged:
        flip_a_bit(path)
    run = resume(tmp_path)
    assert run.returncode == 2
    assert all(path.name in run.stderr for path in damaged)
    assert run.stderr.count("\n") == 1
    assert "Traceback" not in run.stderr
    assert (halfway / "snapshots" / "latest").read_text() == "step-00000003\n"


def test_a_run_folder_is_never_overwritten(tmp_path, halfway):
    before = (halfway / "metrics.jsonl").read_bytes()
    run = launch(tmp_path, with_steps(3))
    assert run.returncode == 2
    assert "--resume" in run.stderr
    assert (halfway / "metrics.jsonl").read_bytes() == before
