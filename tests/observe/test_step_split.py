"""Splits read back from metrics.jsonl, and their medians."""

import json

import pytest

from tahq.coordinator.observer import LinkRecord, StageRecord
from tahq.coordinator.stage_split import StageSplit
from tahq.errors import UserError
from tahq.observe.metrics import step_object
from tahq.observe.step_split import median_step, read_steps, step_record


def split_record(record, number, scale=1.0):
    split = StageSplit(
        forward_s=0.1 * scale, wait_s={1: 0.2 * scale}, commit_s=0.1 * scale, beside_s={"encode": 0.05 * scale}
    )
    link = LinkRecord(0, 0, 1, "activations", 4, 1000, 1100, 2000, 0.2 * scale, 0.1 * scale, 0.05 * scale, 0.2 * scale)
    return record(number, step_time_s=0.4 * scale, stages=(StageRecord(0, {"forward": 0.1}, 7, split),), links=(link,))


def test_line_of_metrics_reads_back_as_the_record_it_was_made_of(record):
    step = split_record(record, 3)
    assert step_record(json.loads(json.dumps(step_object(step)))) == step


def test_medians_are_of_every_part(record):
    middle = median_step([split_record(record, number, scale) for number, scale in enumerate((1.0, 9.0, 2.0), start=1)])
    split = middle.stages[0].split
    assert (middle.step, middle.step_time_s) == (3, 0.8)
    assert (split.forward_s, split.wait_s, split.beside_s) == (0.2, {1: 0.4}, {"encode": 0.1})
    assert (middle.links[0].wire_s, middle.links[0].queued_s) == (0.1, pytest.approx(0.2))


def test_metrics_of_an_older_tahq_are_refused_in_one_line(tmp_path, record):
    path = tmp_path / "metrics.jsonl"
    old = step_object(record(1))
    del old["stages"][0]["forward_s"]
    path.write_text(json.dumps(old) + "\n")
    with pytest.raises(UserError, match="a line has no split of its step"):
        read_steps(path)
    with pytest.raises(UserError, match="cannot read"):
        read_steps(tmp_path / "none.jsonl")
