"""`tahq trace` over a run of two stages: its table, the file it writes, and damaged files."""

import json
import math
from pathlib import Path

import pytest

from tahq.coordinator.observer import LinkRecord, StageRecord, StageSplit, StageTrace, StepRecord, StepTrace, TracedSpan
from tahq.errors import UserError
from tahq.observe.metrics import step_object
from tahq.observe.trace_file import TraceFiles
from tahq_launch.analysis.trace import print_trace


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


def test_shares_of_stages_and_links_are_printed(run, capsys):
    print_trace(run, 4, None)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "step 4: 0.4 s; shares of it:"
    assert lines[2] == "0 50 % 0 % 0 % 0 % 25 % 1:25 % 0 % 0 % 0 %"
    assert lines[5] == "0 → 1 activations 25 % 25 % 50 % 25 % 50 %"
    assert lines[-1].startswith("stage 1's compute is the bottleneck: 50 % of the step")


def test_all_traced_steps_are_written_to_one_file(run, tmp_path, capsys):
    print_trace(run, None, tmp_path / "all.json")
    assert capsys.readouterr().out.splitlines()[-1] == f"{tmp_path}/all.json: step 2, 3, for https://ui.perfetto.dev"
    events = json.loads((tmp_path / "all.json").read_text())["traceEvents"]
    assert [event["name"] for event in events if event.get("cat") == "step"] == ["step 2", "step 3"]


@pytest.mark.parametrize(
    ("step", "output", "message"),
    [
        (4, "four.json", r"has no trace of step 4; set run\.trace_steps"),
        (9, "nine.json", r"has steps 1 to 4; there is no step 9"),
        (None, "none/x.json", "cannot write .*none/x.json: "),
        (None, ".", "cannot write .*: "),
    ],
)
def test_missing_step_or_unwritable_output_is_named(run, tmp_path, step, output, message):
    with pytest.raises(UserError, match=message):
        print_trace(run, step, tmp_path / output)


@pytest.mark.parametrize("text", ["", "[]", '{"traceEvents": [', '{"traceEvents": [], "otherData": {"step": 2}}'])
def test_damaged_trace_is_named_and_the_others_are_written(run, tmp_path, capsys, text):
    damaged = run / "trace" / "step-000002.json"
    damaged.write_text(text)
    print_trace(run, None, tmp_path / "all.json")
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1].startswith(f"{tmp_path}/all.json: step 3,")
    assert printed.err.startswith(f"tahq trace: {damaged} is not a complete picture of a step (")
    assert printed.err.endswith("); it is left out\n")
    with pytest.raises(UserError, match=rf"{damaged} is not a complete picture"):
        print_trace(run, 2, tmp_path / "two.json")
