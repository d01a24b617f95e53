"""Splits read back from metrics.jsonl, and their medians."""

import json
import math

import pytest

from tahq.coordinator.observer import LinkRecord, StageRecord, StageSplit
from tahq.errors import UserError
from tahq.observe.metrics import step_object
from tahq.observe.metrics_reader import median_step, read_steps, step_record


def split_record(record, number, scale=1.0):
    split = StageSplit(
        forward_s=0.1 * scale, wait_s={1: 0.2 * scale}, commit_s=0.1 * scale, beside_s={"encode": 0.05 * scale}
    )
    link = LinkRecord(0, 0, 1, "activations", 4, 1000, 1100, 2000, 0.2 * scale, 0.1 * scale, 0.05 * scale, 0.2 * scale)
    stages = tuple(StageRecord(stage, {"forward": 0.1}, 7, split) for stage in range(2))
    return record(number, step_time_s=0.4 * scale, stages=stages, links=(link,))


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
    new = step_object(split_record(record, 1))
    path.write_text(f"{json.dumps(new)}\n{json.dumps(old)}\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl:2 does not have the split of a step \(no key 'forward_s'\)"):
        read_steps(path)
    with pytest.raises(UserError, match="cannot read"):
        read_steps(tmp_path / "none.jsonl")


def test_last_line_that_was_cut_is_left_out_and_another_is_named(tmp_path, record):
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps(step_object(split_record(record, number))) for number in (1, 2, 3)]
    path.write_text("\n".join(lines)[:-10])
    assert [step.step for step in read_steps(path)] == [1, 2]
    path.write_text(f"{lines[0]}\n{lines[1][:-10]}\n{lines[2]}\n")
    with pytest.raises(
        UserError, match=r"metrics\.jsonl:2 does not have the split of a step \(not JSON from character \d+ on: U"
    ):
        read_steps(path)
    path.write_bytes(b"\xff\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl:1 .*can't decode"):
        read_steps(path)


@pytest.mark.parametrize(
    ("part", "changes", "reason"),
    [
        (None, {"step_time_s": None}, "step_time_s is null; expected seconds"),
        (None, {"step_time_s": -1.0}, "step_time_s is -1.0"),
        (None, {"step": 0}, "step is 0; expected at least 1"),
        ("stages", {"stage": 7}, "stage 7 is where stage 0 should be"),
        ("stages", {"forward_s": None}, "forward_s is null; expected seconds"),
        ("stages", {"wait_s": {"1": math.inf}}, "wait_s is inf; expected seconds"),
        ("links", {"frames": 0}, "frames is 0; expected at least 1"),
        ("links", {"payload_bytes": 0}, "payload_bytes is 0; expected at least 1"),
        ("links", {"from": -1}, "from is -1; expected at least 0"),
        ("links", {"to": 2}, "to is 2; expected at most 1"),
        ("links", {"direction": "up"}, "direction 'up'"),
        ("links", {"wire_s": None}, "wire_s is null; expected seconds"),
    ],
)
def test_number_that_no_step_can_have_is_named_with_its_line(tmp_path, record, part, changes, reason):
    path = tmp_path / "metrics.jsonl"
    rows = [step_object(split_record(record, number)) for number in (1, 2)]
    (rows[1] if part is None else rows[1][part][0]).update(changes)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError) as caught:
        read_steps(path)
    assert f"{path}:2 does not have the split of a step ({reason})" in str(caught.value)
