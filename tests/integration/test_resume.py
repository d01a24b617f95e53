"""A resumed run equals one that was never stopped; allowed changes are reported, others refused."""

import re
import shutil
from pathlib import Path

import pytest
from support.runs import Run, assert_same_run, finish, launch, overrides, tiny, train, write_config

LOSSY = {"activations": "tah", "gradients": "fixed:bits=8,round=stochastic"}
CONFIG = tiny(
    run={"checkpoint_every": 2},
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


def test_resume_with_other_gradient_bits_continues_and_says_that_it_is_not_exact(tmp_path, halfway, uninterrupted):
    run = resume(tmp_path, "wire.gradients=fixed:bits=10")
    assert run.returncode == 0, run.stderr
    assert "wire.gradients" in run.stdout + run.stderr
    assert "exact" in run.stdout + run.stderr
    assert run.losses[:3] == uninterrupted.losses[:3]
    link = run.metrics[-1]["links"]
    gradients = [row for row in link if row["direction"] == "gradients"]
    assert all(10 < row["bits_per_element"] < 10.6 for row in gradients)


@pytest.mark.acceptance
def test_resume_by_other_arithmetic_continues_and_every_stage_says_so(tmp_path, halfway):
    run = resume(tmp_path, "run.threads=2")
    assert run.returncode == 0, run.stderr
    warnings = [line for line in run.stdout.splitlines() if " threads: 1 -> 2" in line]
    assert sorted(line.partition(" (")[0] for line in warnings) == ["warning: stage 0", "warning: stage 1"]
    assert all("no longer exact" in line for line in warnings)
    assert len(run.losses) == 6


def test_resume_refuses_what_cannot_change(tmp_path, halfway):
    run = resume(tmp_path, "run.seed=8")
    assert run.returncode == 2
    assert "run.seed" in run.stderr
    assert "Traceback" not in run.stderr
    assert len(run.losses) == 3


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def test_checkpoint_before_a_damaged_one_is_used_with_a_warning(tmp_path, halfway, uninterrupted):
    (damaged,) = (halfway / "snapshots" / "step-00000003").glob("stage-001*.safetensors")
    flip_a_bit(damaged)
    run = resume(tmp_path)
    assert run.returncode == 0, run.stderr
    warning = run.stdout.splitlines()[1]
    assert warning.startswith("warning: ")
    assert f"{damaged.name} is damaged" in warning
    assert warning.endswith("resuming from step-00000002 instead")
    assert "is damaged" in (halfway / "logs" / "launcher.log").read_text()
    assert [row["step"] for row in run.metrics] == [1, 2, 3, 4, 5, 6]
    assert_same_run(run, uninterrupted)


def test_runs_without_a_name_get_different_ones_and_the_newest_is_resumed(tmp_path):
    config = with_steps(1)
    write_config(tmp_path, {**config, "run": {key: value for key, value in config["run"].items() if key != "name"}})
    for _ in range(2):
        done = finish(tmp_path, "tahq-launch", "cluster.yaml")
        assert done.returncode == 0, done.stderr
    first, second = sorted((tmp_path / "runs").iterdir())
    assert re.fullmatch(r"cluster-\d{8}-\d{6}", first.name)
    assert f"run {second.name}: 2 stages" in done.stdout
    assert f"--resume --set run.name={second.name}" in done.stdout
    resumed = finish(tmp_path, "tahq-launch", "cluster.yaml", "--resume", *overrides("training.steps=2"))
    assert resumed.returncode == 0, resumed.stderr
    assert [len((folder / "metrics.jsonl").read_text().splitlines()) for folder in (first, second)] == [1, 2]
