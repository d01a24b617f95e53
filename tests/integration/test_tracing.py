"""The time of a step in a real run: its parts, the trace and the summary."""

import json
from statistics import median

import pytest
from support.runs import Run, finish, launch, tiny

CONFIG = tiny(
    run={"trace_steps": [2, 3]},
    pipeline={"stages": 2},
    training={"steps": 4, "eval_every": 3, "eval_batches": 1},
    wire={"activations": "fixed:bits=8", "gradients": "fixed:bits=8"},
    emulate={"rate": "8mbit", "delay": "5ms"},
)
PARTS = (
    "forward_s", "backward_s", "encode_s", "decode_s", "wait_codec_s", "wait_memory_s", "data_s", "optimizer_s",
    "snapshot_s", "other_s", "commit_s",
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    run = launch(tmp_path_factory.mktemp("traced"), CONFIG)
    assert run.returncode == 0, run.stderr
    return run


def test_parts_of_every_stage_add_up_to_the_step(run):
    """Up to PREPARE by the worker's clock, from there by the coordinator's; what neither measured is `other`.

    Exact but for two things: a worker learns of a commit 5 ms and a wake-up after the coordinator, which is counted as
    waiting for the next; and after an evaluation (step 3) a stage may begin before the coordinator's clock does.
    """
    for row in run.metrics:
        for stage in row["stages"]:
            parts_s = sum(stage[part] for part in PARTS) + sum(stage["wait_s"].values())
            if row["step"] == 4:
                assert parts_s >= 0.99 * row["step_time_s"]
            else:
                assert parts_s == pytest.approx(row["step_time_s"], rel=0.01)
            assert stage["forward_s"] > 0
            assert stage["backward_s"] > 0
    for stage in range(2):
        others = [row["stages"][stage]["other_s"] / row["step_time_s"] for row in run.metrics]
        assert median(others) < 0.5, "most of a step is accounted for"


def test_metrics_name_the_stage_waited_for_and_the_links_sending_time(run):
    for row in run.metrics:
        first, last = row["stages"]
        assert first["wait_s"].keys() == {"1"}
        assert last["wait_s"].keys() == {"0"}
        for link in row["links"]:
            assert link["frames"] == 4
            assert link["wire_s"] > 0
            assert link["sending_s"] <= link["busy_s"] + 1e-6
            assert link["queued_s"] == pytest.approx(link["busy_s"] - link["sending_s"], abs=1e-6)
    for number in range(2):
        wire_s, sending_s = (sum(row["links"][number][key] for row in run.metrics) for key in ("wire_s", "sending_s"))
        # What an evaluation interrupts is counted whole as the wire's and in part as sending: 4 frames of 7 ms at most.
        assert wire_s <= sending_s + 0.03


def test_traced_steps_have_spans_of_both_workers(run):
    folder = run.folder / "trace"
    assert sorted(path.name for path in folder.iterdir()) == ["step-000002.json", "step-000003.json"]
    picture = json.loads((folder / "step-000002.json").read_text())
    spans = [event for event in picture["traceEvents"] if event["ph"] == "X"]
    for pid in (2, 3):
        own = {event["cat"] for event in spans if event["pid"] == pid}
        assert own >= {"forward", "backward", "encode", "decode", "wait", "send", "commit", "norms", "optimizer"}
        assert [e["name"] for e in spans if (e["pid"], e["cat"]) == (pid, "forward")] == [
            f"{pid - 2}F{n}" for n in range(4)
        ]
    # Both read one machine's clock: the offset that is found is the error that is made, and below what is said of it.
    for clock in picture["otherData"]["clocks"]:
        assert abs(clock["offset_s"]) <= clock["error_s"] + 1e-4


def test_frames_are_decoded_after_they_were_encoded(run):
    """Clocks agree within the error that they report: at most about 5 ms here, the delay in each direction."""
    picture = json.loads((run.folder / "trace" / "step-000003.json").read_text())
    error_us = 1e6 * sum(clock["error_s"] for clock in picture["otherData"]["clocks"])
    spans = [event for event in picture["traceEvents"] if event["ph"] == "X"]
    encoded = {e["args"]["frame"]: e["ts"] + e["dur"] for e in spans if e["cat"] == "encode"}
    decoded = {e["args"]["frame"]: e["ts"] for e in spans if e["cat"] == "decode"}
    assert len(encoded) == 8
    assert encoded.keys() == decoded.keys()
    assert all(decoded[frame] >= encoded[frame] - error_us for frame in encoded)


def test_totals_of_a_traced_step_are_the_sums_of_its_spans(run):
    picture = json.loads((run.folder / "trace" / "step-000002.json").read_text())
    for stage in run.metrics[1]["stages"]:
        own = [e for e in picture["traceEvents"] if e["ph"] == "X" and e["pid"] == 2 + stage["stage"]]
        for category in ("forward", "backward", "encode", "decode"):
            seconds = sum(event["dur"] for event in own if event["cat"] == category) / 1e6
            assert seconds == pytest.approx(stage["timing_s"][category], abs=1e-6 * len(own))


def test_summary_and_trace_command_name_the_bottleneck(run):
    assert "  its limit   " in run.stdout
    root = run.folder.parents[1]
    shown = finish(root, "tahq", "trace", "runs/tiny", "--step", "2", "--output", "picture.json")
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert lines[0].startswith("step 2: ")
    assert lines[1].split() == [
        "stage", "forward", "backward", "encode", "decode", "wait", "from", "memory", "other", "commit",
    ]  # fmt: skip
    assert any(line.split()[:4] == ["1", "→", "0", "gradients"] for line in lines)
    assert lines[-1] == "picture.json: step 2, for https://ui.perfetto.dev"
    assert json.loads((root / "picture.json").read_text())["otherData"]["step"] == 2
    missing = finish(root, "tahq", "trace", "runs/tiny", "--step", "4", "--output", "picture.json")
    assert missing.returncode == 2
    assert "has no trace of step 4; set run.trace_steps" in missing.stderr
