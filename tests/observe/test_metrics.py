"""metrics.jsonl: one JSON object a step, whatever happens."""

import json
import math
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tahq.coordinator.observer import RunEnd, StageRecord, ValidationRecord
from tahq.coordinator.step_report import stage_split
from tahq.errors import UserError
from tahq.observe.metrics import MetricsFile, keep_until, step_object


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def test_line_has_the_agreed_keys(record):
    line = step_object(record(12))
    assert {"step", "loss", "tokens_per_s", "step_time_s", "grad_norm", "lr", "links", "stages"} <= line.keys()
    assert (line["step"], line["tokens_per_s"], line["grad_norm"], line["lr"]) == (12, 2000.0, 1.25, 3e-4)
    assert line["links"][0] == {
        "link": 0,
        "from": 0,
        "to": 1,
        "direction": "activations",
        "frames": 4,
        "payload_bytes": 441_000,
        "wire_bytes": 442_000,
        "elements": 800_000,
        "busy_s": 0.1,
        "sending_s": 0.08,
        "queued_s": pytest.approx(0.02),
        "idle_s": 0.4,
        "wire_s": 0.05,
        "bits_per_element": 4.41,
        "goodput_bits_per_s": 35_280_000.0,
        "codec": "",
        "relative_error": None,
    }
    stage = line["stages"][0]
    own = ("stage", "waiting_share", "timing_s", "codec_state_bytes")
    assert {key: stage[key] for key in own} == {
        "stage": 0,
        "waiting_share": 0.25,
        "timing_s": {"forward": 3.0, "wait": 1.0},
        "codec_state_bytes": 0,
    }


@pytest.fixture
def filled(path):
    """A file whose disk can be filled: (MetricsFile, fill, free). /dev/full takes nothing, as a full disk."""
    file = MetricsFile(path)
    descriptor = file._file.fileno()
    real, full = os.dup(descriptor), os.open("/dev/full", os.O_WRONLY)
    yield file, lambda: os.dup2(full, descriptor), lambda: os.dup2(real, descriptor)
    os.close(real)
    os.close(full)


def test_file_that_is_removed_ends_the_run_with_one_line_that_names_it(path, record):
    file = MetricsFile(path)
    file.step_committed(record(1))
    path.unlink()
    with pytest.raises(UserError, match=r"metrics\.jsonl was removed while the run was using it"):
        file.step_committed(record(2))
    file.ended(RunEnd(2, "", 2, 10))


def test_lines_that_a_full_disk_does_not_take_are_written_when_there_is_room(path, filled, record, caplog):
    file, fill, free = filled
    file.step_committed(record(1))
    fill()
    for step in (2, 3):
        file.step_committed(record(step))
    assert [row["step"] for row in read(path)] == [1]
    free()
    file.step_committed(record(4))
    assert [row["step"] for row in read(path)] == [1, 2, 3, 4]
    fill()
    file.step_committed(record(5))
    free()
    file.ended(RunEnd(0, "", 5, 5, 5))
    assert [row["step"] for row in read(path)] == [1, 2, 3, 4, 5]
    assert [text.count("its lines are kept") for text in caplog.messages] == [1, 1]


def test_lines_that_are_lost_with_a_disk_that_stays_full_are_counted(path, filled, record):
    file, fill, _ = filled
    fill()
    for step in (1, 2):
        file.step_committed(record(step))
    with pytest.raises(OSError, match=r"no room for the last 2 lines of .*metrics\.jsonl"):
        file.ended(RunEnd(0, "", 2, 2, 2))


def test_stage_has_its_step_in_parts(record):
    timing = {"forward": 0.1, "encode": 0.02, "wait:1": 0.125, "wait:2": 0.125, "beside:encode": 0.03}
    stage = StageRecord(0, timing, 0, stage_split(timing, active_s=0.4, step_time_s=0.5))
    line = step_object(record(1, stages=(stage,)))["stages"][0]
    assert line["timing_s"] == {"forward": 0.1, "encode": 0.05, "wait": 0.25}
    assert (line["wait_s"], line["beside_s"]) == ({"1": 0.125, "2": 0.125}, {"encode": 0.03})
    parts = [value for key, value in line.items() if key.endswith("_s") and isinstance(value, float)]
    assert sum(parts) + sum(line["wait_s"].values()) == pytest.approx(0.5)


def test_line_waits_for_its_validation_loss(path, record, end):
    file = MetricsFile(path)
    file.step_committed(record(1, evaluating=True))
    assert read(path) == []
    file.validated(ValidationRecord(1, 500, 2.5, 2.0))
    (line,) = read(path)
    assert line["validation"] == {
        "tokens": 500,
        "loss": 2.5,
        "perplexity": math.exp(2.5),
        "loss_raw": 2.0,
        "perplexity_raw": math.exp(2.0),
    }
    file.ended(end)


def test_line_whose_validation_loss_never_came_is_written_all_the_same(path, record, end):
    file = MetricsFile(path)
    file.step_committed(record(1, evaluating=True))
    file.step_committed(record(2, evaluating=True))
    file.ended(end)
    assert [line["step"] for line in read(path)] == [1, 2]
    assert all("validation" not in line for line in read(path))


def test_whole_run_has_one_object_a_step(path, play_run, end):
    file = MetricsFile(path)
    play_run(file)
    assert len(read(path)) == 20  # each line as soon as it is complete
    file.ended(end)
    assert [line["step"] for line in read(path)] == list(range(1, 21))
    assert [line["step"] for line in read(path) if "validation" in line] == [2]


numbers = st.floats()


@given(loss=numbers, norm=numbers, step_time_s=numbers)
def test_every_line_is_strict_json_whatever_the_numbers(record, loss, norm, step_time_s):
    text = json.dumps(step_object(record(1, loss=loss, grad_norm=norm, step_time_s=step_time_s)), allow_nan=False)
    value = json.loads(text)
    assert value["loss"] == (loss if math.isfinite(loss) else None)
    assert value["grad_norm"] == (norm if math.isfinite(norm) else None)


def test_continued_run_appends_after_its_snapshot(path, record, end):
    first = MetricsFile(path)
    for step in range(1, 8):
        first.step_committed(record(step, loss=1.0))
    first.ended(end)
    second = MetricsFile(path, start_step=5)
    for step in (6, 7, 8):
        second.step_committed(record(step, loss=2.0))
    second.ended(end)
    assert [(line["step"], line["loss"]) for line in read(path)] == [
        *((step, 1.0) for step in range(1, 6)),
        *((step, 2.0) for step in range(6, 9)),
    ]


@pytest.mark.parametrize(
    "garbage", [b"null\n", b"[]\n", b'{"a": 1}\n', b"\n", b'{"step": "2"}\n', b'{"step": "\xff"}\n', b'{"step": 2, "lo']
)
def test_lines_that_are_no_steps_are_removed(path, garbage):
    path.write_bytes(b'{"step": 1}\n' + garbage)
    keep_until(path, 3)
    assert read(path) == [{"step": 1}]


def test_file_that_needs_no_change_is_left_alone(path):
    path.write_text('{"step": 1}\n')
    before = path.stat().st_ino
    keep_until(path, 3)
    assert path.stat().st_ino == before
