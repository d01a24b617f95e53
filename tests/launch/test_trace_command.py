"""`tahq trace` over a run of two stages: what it prints and writes, and what it says of files that are not whole."""

import json
import math
from pathlib import Path

import pytest

from tahq.coordinator.observer import LinkRecord, StageRecord, StageSplit, StageTrace, StepRecord, StepTrace, TracedSpan
from tahq.errors import UserError
from tahq.observe.metrics import step_object
from tahq.observe.trace_file import TraceFiles
from tahq_launch.analysis.trace import trace


def step_row(step: int) -> str:
    stages = tuple(StageRecord(stage, {}, 0, StageSplit(forward_s=0.2, wait_s={1 - stage: 0.1})) for stage in range(2))
    links = (
        LinkRecord(0, 0, 1, "activations", 4, 1000, 1100, 2000, 0.2, 0.1, 0.1, 0.2),
        LinkRecord(0, 1, 0, "gradients", 4, 1000, 1100, 2000, 0.2, 0.1, 0.1, 0.2),
    )
    record = StepRecord(step, math.nan, 1000, 0.4, 1.0, 1.0, False, False, stages, links)
    return json.dumps(step_object(record)) + "\n"


def step_trace(step: int, begin_s: float) -> StepTrace:
    spans = (TracedSpan("compute", "forward", "0F0", begin_s + 0.1, begin_s + 0.3),)
    stages = tuple(StageTrace(n, f"stage {n} (a, pid {10 + n})", 0.0, 0.001 * step, spans) for n in range(2))
    return StepTrace(step, begin_s, begin_s + 0.4, stages)


@pytest.fixture
def run(tmp_path) -> Path:
    """A run of four steps, the second and the third of them traced."""
    folder = tmp_path / "runs" / "tiny"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(map(step_row, range(1, 5))))
    files = TraceFiles(folder / "trace")
    for step in (2, 3):
        files.step_traced(step_trace(step, 100.0 + step))
    return folder


def test_all_traced_steps_are_one_picture(run, tmp_path, capsys):
    trace(run, None, tmp_path / "all.json")
    assert capsys.readouterr().out.splitlines()[-1] == f"{tmp_path}/all.json: step 2, 3, for https://ui.perfetto.dev"
    events = json.loads((tmp_path / "all.json").read_text())["traceEvents"]
    assert [event["name"] for event in events if event.get("cat") == "step"] == ["step 2", "step 3"]


def test_step_that_was_not_traced_says_what_to_set(run, tmp_path):
    with pytest.raises(UserError, match=r"has no picture of step 4; set run\.trace_steps"):
        trace(run, 4, tmp_path / "four.json")


@pytest.mark.parametrize("output", ["none/x.json", "."])
def test_output_that_cannot_be_written_is_named(run, tmp_path, output):
    with pytest.raises(UserError, match=f"cannot write {tmp_path / output}: "):
        trace(run, None, tmp_path / output)


DAMAGED = ["", "{}", "[]", "7", '{"traceEvents": [', '{"traceEvents": [], "otherData": {"step": 2}}', "\x85"]


@pytest.mark.parametrize("text", DAMAGED)
def test_damaged_picture_is_named_and_the_others_are_shown(run, tmp_path, capsys, text):
    damaged = run / "trace" / "step-000002.json"
    damaged.write_text(text)
    trace(run, None, tmp_path / "all.json")
    said = capsys.readouterr()
    assert said.out.splitlines()[-1].startswith(f"{tmp_path}/all.json: step 3,")
    assert said.err.startswith(f"tahq trace: {damaged} is not the whole picture of a step (")
    assert said.err.endswith("); it is left out\n")
    with pytest.raises(UserError, match=rf"{damaged} is not the whole picture"):
        trace(run, 2, tmp_path / "two.json")


def test_without_a_whole_picture_every_damaged_one_is_named(run, tmp_path):
    (run / "trace" / "step-000002.json").write_text("{}")
    whole = (run / "trace" / "step-000003.json").read_text()
    (run / "trace" / "step-000003.json").write_text(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"step-000002\.json is not .*; .*step-000003\.json is not "):
        trace(run, None, tmp_path / "all.json")
    assert not (tmp_path / "all.json").exists()
