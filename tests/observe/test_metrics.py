"""metrics.jsonl: one JSON object per step, whatever happens; read back, and medians of its steps."""

import json
import math
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tahq.coordinator.observer import LinkRecord, RunEnd, SamplesRecord, StageRecord, StageSplit, ValidationRecord
from tahq.coordinator.steps import stage_split
from tahq.errors import UserError
from tahq.observe.metrics import MetricsFile, keep_until, step_object
from tahq.observe.metrics_reader import median_step, read_steps, step_record


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def steps_in(path):
    return [row["step"] for row in read(path)]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def test_every_key_is_in_the_reference(record):
    page = (Path(__file__).parents[2] / "docs/reference/metrics.md").read_text(encoding="utf-8")
    line = step_object(record(1))
    assert [key for key in (*line, *line["links"][0]) if f"`{key}`" not in page] == []
    assert "| `tokens_per_s` | `computed_tokens` by `step_time_s` |" in page


def test_line_has_the_agreed_keys(record):
    line = step_object(record(12))
    assert {"step", "loss", "tokens_per_s", "step_time_s", "grad_norm", "lr", "links", "stages"} <= line.keys()
    assert (line["step"], line["tokens_per_s"], line["grad_norm"], line["lr"]) == (12, 2000.0, 1.25, 3e-4)
    assert line["links"][0] == {
        "link": 0,
        "from": 0,
        "to": 1,
        "direction": "activations",
        "codec": "",
        "relayed_bytes": 0,
        "relative_error": None,
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
        "round_trip_s": 0.0,
    }
    own = {"stage": 0, "waiting_share": 0.25, "timing_s": {"forward": 3.0, "wait": 1.0}, "codec_state_bytes": 0}
    assert own.items() <= line["stages"][0].items()


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
    assert steps_in(path) == [1]
    free()
    file.step_committed(record(4))
    assert steps_in(path) == [1, 2, 3, 4]
    fill()
    file.step_committed(record(5))
    free()
    file.ended(RunEnd(0, "", 5, 5, 5))
    assert steps_in(path) == [1, 2, 3, 4, 5]
    assert [text.count("its lines are kept") for text in caplog.messages] == [1, 1]


def test_lines_that_are_lost_with_a_disk_that_stays_full_are_counted(filled, record):
    file, fill, _ = filled
    fill()
    for step in (1, 2):
        file.step_committed(record(step))
    with pytest.raises(OSError, match=r"no room for the last 2 lines of .*metrics\.jsonl"):
        file.ended(RunEnd(0, "", 2, 2, 2))


def test_parts_of_a_stage_add_up_to_its_step(record):
    timing = {"forward": 0.1, "encode": 0.02, "wait:1": 0.125, "wait:2": 0.125, "beside:encode": 0.03}
    stage = StageRecord(0, timing, 0, stage_split(timing, active_s=0.4, step_time_s=0.5))
    line = step_object(record(1, stages=(stage,)))["stages"][0]
    assert line["timing_s"] == {"forward": 0.1, "encode": 0.05, "wait": 0.25}
    assert (line["wait_s"], line["beside_s"]) == ({"1": 0.125, "2": 0.125}, {"encode": 0.03})
    parts = [value for key, value in line.items() if key.endswith("_s") and isinstance(value, float)]
    assert sum(parts) + sum(line["wait_s"].values()) == pytest.approx(0.5)


def test_line_waits_for_its_validation_loss_until_the_next_step(path, record, end):
    file = MetricsFile(path)
    file.step_committed(record(1, evaluating=True))
    assert read(path) == []
    file.validated(ValidationRecord(1, 500, 2.5, 2.0))
    losses = {"loss": 2.5, "perplexity": math.exp(2.5), "loss_raw": 2.0, "perplexity_raw": math.exp(2.0)}
    assert read(path)[0]["validation"] == {"tokens": 500, **losses}
    for step in (2, 3):
        file.step_committed(record(step, evaluating=True))
    assert steps_in(path) == [1, 2]
    file.ended(end)
    assert steps_in(path) == [1, 2, 3]
    assert all("validation" not in line for line in read(path)[1:])


def test_line_has_the_losses_of_all_validation_sets_and_the_first_under_the_old_name(path, record, end):
    file = MetricsFile(path)
    file.step_committed(record(1, evaluating=True))
    other = ValidationRecord(1, 300, 3.5, 3.0, "chats")
    file.validated(ValidationRecord(1, 500, 2.5, 2.0, "books", (other,)))
    (line,) = read(path)
    assert line["validation"] == line["validations"]["books"]
    assert [(name, each["tokens"], each["loss_raw"]) for name, each in line["validations"].items()] == [
        *(("books", 500, 2.0), ("chats", 300, 3.0))
    ]
    file.ended(end)


def test_line_waits_for_its_samples_too(path, record, end):
    file = MetricsFile(path)
    file.step_committed(record(1, evaluating=True, sampling=True))
    file.validated(ValidationRecord(1, 500, 2.5, 2.0))
    assert read(path) == []
    file.sampled(SamplesRecord(1, (("Once", " upon"),)))
    file.step_committed(record(2, sampling=True))
    file.sampled(SamplesRecord(2, (("Once", " more"),)))
    texts = [line["samples"] for line in read(path)]
    assert texts == [[{"prompt": "Once", "text": " upon"}], [{"prompt": "Once", "text": " more"}]]
    file.ended(end)


@given(loss=st.floats(), norm=st.floats(), step_time_s=st.floats())
def test_every_line_is_strict_json_whatever_the_numbers(record, loss, norm, step_time_s):
    text = json.dumps(step_object(record(1, loss=loss, grad_norm=norm, step_time_s=step_time_s)), allow_nan=False)
    value = json.loads(text)
    assert value["loss"] == (loss if math.isfinite(loss) else None)
    assert value["grad_norm"] == (norm if math.isfinite(norm) else None)


def test_continued_run_appends_after_its_checkpoint(path, record, end):
    for loss, start, numbers in ((1.0, 0, range(1, 8)), (2.0, 5, (6, 7, 8))):
        file = MetricsFile(path, start_step=start)
        for step in numbers:
            file.step_committed(record(step, loss=loss))
        file.ended(end)
    assert [(line["step"], line["loss"]) for line in read(path)] == [
        *((step, 1.0) for step in range(1, 6)),
        *((step, 2.0) for step in range(6, 9)),
    ]


@pytest.mark.parametrize(
    "garbage",
    [
        b"null\n",
        b"[]\n",
        b'{"a": 1}\n',
        b"\n",
        b'{"step": "2"}\n',
        b'{"step": "\xff"}\n',
        b'{"step": 2, "lo',
        pytest.param(b"[" * 100_000 + b"\n", id="brackets"),
    ],
)
def test_lines_that_are_no_steps_are_removed(path, garbage):
    path.write_bytes(b'{"step": 1}\n' + garbage)
    keep_until(path, 3)
    assert read(path) == [{"step": 1}]
    before = path.stat().st_ino
    keep_until(path, 3)
    assert path.stat().st_ino == before  # a file that needs no change is left alone


# -- read back -----------------------------------------------------------------------------------


def split_record(record, number, scale=1.0):
    split = StageSplit(
        forward_s=0.1 * scale, wait_s={1: 0.2 * scale}, commit_s=0.1 * scale, beside_s={"encode": 0.05 * scale}
    )
    link = LinkRecord(0, 0, 1, "activations", 4, 1000, 1100, 2000, 0.2 * scale, 0.1 * scale, 0.05 * scale, 0.2 * scale)
    stages = tuple(StageRecord(stage, {"forward": 0.1}, 7, split, 10**9) for stage in range(2))
    under = {"schedule": "zero-bubble", "in_flight": (5, 2), "computed_tokens": 8000}
    return record(number, step_time_s=0.4 * scale, stages=stages, links=(link,), **under)


def test_line_reads_back_as_the_record_it_was_made_of(record):
    step = split_record(record, 3)
    line = json.loads(json.dumps(step_object(step)))
    assert step_record(line) == step
    for old in (line, *line["stages"]):
        for name in ("schedule", "in_flight", "memory_bytes", "computed_tokens"):
            old.pop(name, None)
    older = step_record(line)
    assert (step.tokens_per_s, older.tokens_per_s) == (8000 / 0.4, step.tokens / 0.4)
    assert (older.schedule, older.in_flight, older.stages[0].memory_bytes) == ("", (), 0)


def test_medians_are_of_every_part(record):
    middle = median_step([split_record(record, number, scale) for number, scale in enumerate((1.0, 9.0, 2.0), start=1)])
    split = middle.stages[0].split
    assert (middle.step, middle.step_time_s) == (3, 0.8)
    assert (split.forward_s, split.wait_s, split.beside_s) == (0.2, {1: 0.4}, {"encode": 0.1})
    assert (middle.links[0].wire_s, middle.links[0].queued_s) == (0.1, pytest.approx(0.2))


def test_incomplete_last_line_is_left_out_and_any_other_is_named(path, record):
    lines = [json.dumps(step_object(split_record(record, number))) for number in (1, 2, 3)]
    path.write_text("\n".join(lines)[:-10])
    assert [step.step for step in read_steps(path)] == [1, 2]
    path.write_text(f"{lines[0]}\n{lines[1][:-10]}\n{lines[2]}\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl:2 does not have .* \(not JSON from character \d+ on: U"):
        read_steps(path)
    path.write_bytes(b"\xff\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl:1 .*can't decode"):
        read_steps(path)
    with pytest.raises(UserError, match="cannot read"):
        read_steps(path.with_name("none.jsonl"))


@pytest.mark.parametrize(
    ("part", "changes", "reason"),
    [
        (None, {"step_time_s": None}, "step_time_s is null; expected seconds"),
        (None, {"step_time_s": -1.0}, "step_time_s is -1.0"),
        (None, {"step": 0}, "step is 0; expected at least 1"),
        ("stages", {"stage": 7}, "stage 7 is where stage 0 should be"),
        ("stages", {"forward_s": None}, "forward_s is null; expected seconds"),
        ("stages", {"forward_s": ...}, "no key 'forward_s'"),
        ("stages", {"wait_s": {"1": math.inf}}, "wait_s is inf; expected seconds"),
        ("links", {"frames": 0}, "frames is 0; expected at least 1"),
        ("links", {"payload_bytes": 0}, "payload_bytes is 0; expected at least 1"),
        ("links", {"from": -1}, "from is -1; expected at least 0"),
        ("links", {"to": 2}, "to is 2; expected at most 1"),
        ("links", {"direction": "up"}, "direction 'up'"),
        ("links", {"wire_s": None}, "wire_s is null; expected seconds"),
    ],
)
def test_number_that_no_step_can_have_is_named_with_its_line(path, record, part, changes, reason):
    rows = [step_object(split_record(record, number)) for number in (1, 2)]
    changed = rows[1] if part is None else rows[1][part][0]
    for key, value in changes.items():
        if value is ...:
            del changed[key]
        else:
            changed[key] = value
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError) as caught:
        read_steps(path)
    assert f"{path}:2 does not have the split of a step ({reason})" in str(caught.value)
