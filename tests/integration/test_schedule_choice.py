"""`pipeline.schedule: auto` in real processes: steps get shorter, and no bit of the result changes."""

import os
from statistics import median

import pytest
from support.runs import assert_same_run, finish, start, tiny, train, write_config

pytestmark = pytest.mark.ci

CONFIG = tiny(
    wire={"activations": "tah", "gradients": "eden"},
    model={"dropout": 0.1},
    training={"steps": 14, "global_batch": 16, "clip_norm": 0.5},
    emulate={"rate": "20mbit", "delay": "25ms"},
    run={"checkpoint_every": 10},
)
FREE = {**CONFIG, "pipeline": {"stages": 4, "balance": "counted"}}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return train(tmp_path_factory.mktemp("fixed"), CONFIG)


def changes(run):
    return {row["step"]: row["schedule_change"] for row in run.metrics if row["schedule_change"]}


@pytest.mark.serial
def test_steps_get_shorter_and_the_result_stays(tmp_path, undisturbed):
    run = train(tmp_path, FREE)
    first = min(changes(run))
    assert f"after step {first}: schedule {changes(run)[first]}" in run.stdout
    assert not changes(undisturbed)
    assert_same_run(run, undisturbed)
    assert {row["schedule"] for row in run.metrics if row["step"] <= first} == {"1f1b"}
    after = run.metrics[first]
    assert changes(run)[first].startswith(f"{after['schedule']}, in flight {' '.join(map(str, after['in_flight']))} (")
    assert all(stage["memory_bytes"] > 0 for stage in after["stages"])
    before, since = ([row["step_time_s"] for row in rows] for rows in (run.metrics[1:first], run.metrics[first + 1 :]))
    assert median(since) < 0.9 * median(before)


@pytest.mark.serial
@pytest.mark.acceptance
def test_lost_stage_and_lost_coordinator_go_on_under_the_chosen_schedule(tmp_path, undisturbed):
    """Both die after the change: a new worker computes the steps since the beginning under the old schedule again."""
    plan = "kill@prepared:stage=1:step=8,kill@commit-sent:step=8"
    faults = tmp_path / "faults"
    faults.mkdir()
    extra = {"TAHQ_FAULTS": plan, "TAHQ_FAULTS_FOLDER": os.fspath(faults)}
    killed = start(tmp_path, "tahq-launch", os.fspath(write_config(tmp_path, FREE)), extra=extra)
    text = "".join(killed.communicate(120))
    assert killed.returncode == -9, text
    assert len(list(faults.iterdir())) == 2
    resumed = finish(tmp_path, "tahq-launch", "cluster.yaml", "--resume")
    assert resumed.returncode == 0, resumed.stderr
    run = type(undisturbed)(tmp_path / "runs" / "tiny", 0, resumed.stdout, resumed.stderr)
    assert min(changes(run)) <= 8
    assert_same_run(run, undisturbed)


@pytest.mark.acceptance
def test_resumed_run_begins_with_the_chosen_schedule(tmp_path, undisturbed):
    short = {**FREE, "training": {**FREE["training"], "steps": 10}}
    begun = train(tmp_path, short)
    assert changes(begun)
    resumed = train(tmp_path, FREE, "--resume")
    assert not {step for step in changes(resumed) if step > 10}
    assert_same_run(resumed, undisturbed)
