"""Traced steps as a picture: Chrome's trace event format."""

import json
import math
from collections import defaultdict

import pytest
from support.disks import can_mount, fill, small_disk

from tahq.coordinator.observer import StageTrace, StepTrace, TracedSpan
from tahq.observe.trace_file import TraceFiles, merged, read_picture, trace_object, trace_path

FRAME = "train step 5 cut 0 forward 0"


def trace(step=5, begin_s=100.0, extra=(), pid=1):
    first = (
        TracedSpan("compute", "forward", "0F0", begin_s + 0.001, begin_s + 0.004),
        TracedSpan("encode", "encode", "encode: activations 0", begin_s + 0.004, begin_s + 0.005, FRAME),
        TracedSpan(
            "link 0→1 activations", "send", "activations 0", begin_s + 0.006, begin_s + 0.008, FRAME, 999, 0.001
        ),
        *extra,
    )
    second = (
        TracedSpan("compute", "wait", "wait for stage 0: activations 0", begin_s, begin_s + 0.009, FRAME),
        TracedSpan("decode", "decode", "decode: activations 0", begin_s + 0.009, begin_s + 0.010, FRAME),
    )
    a = StageTrace(0, f"stage 0 (a, pid {pid})", 0.5, 0.001, first)
    b = StageTrace(1, "stage 1 (b, pid 2)", 0.0, math.nan, second)
    return StepTrace(step, begin_s, begin_s + 0.02, (a, b))


def events(picture, *phases):
    return [event for event in picture["traceEvents"] if event["ph"] in phases]


def check_format(picture):
    """What the format asks for: known phases, numbers, order; on one lane, events nest or follow each other."""
    json.loads(json.dumps(picture, allow_nan=False))
    timed = [event for event in picture["traceEvents"] if "ts" in event]
    assert all(event["ph"] in "XMstf" for event in picture["traceEvents"])
    assert [event["ts"] for event in timed] == sorted(event["ts"] for event in timed)
    names = {(e["pid"], e["tid"]) for e in events(picture, "M") if e["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in timed} <= names
    lanes = defaultdict(list)
    for event in events(picture, "X"):
        assert event["dur"] >= 0
        lanes[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in lanes.values():
        open_until = []
        for begin, end in spans:
            while open_until and open_until[-1] <= begin + 1e-3:  # a nanosecond, where times are rounded to
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 1e-3
            open_until.append(end)


def test_picture_has_a_process_per_worker_and_a_thread_per_lane():
    picture = trace_object(trace())
    check_format(picture)
    spans = {event["name"]: (event["ts"], event["dur"]) for event in events(picture, "X")}
    assert spans["step 5"] == (0.0, pytest.approx(20_000))  # microseconds from the commit before
    assert spans["0F0"] == (pytest.approx(1000), pytest.approx(3000))
    send = next(event for event in events(picture, "X") if event["cat"] == "send")
    assert send["args"] == {"frame": FRAME, "bytes": 999, "queued_ms": 1.0}
    named = {(e["name"], e["pid"], e["tid"]): e["args"].get("name") for e in events(picture, "M")}
    assert named["process_name", 2, 0] == "stage 0 (a, pid 1)"
    assert [named["thread_name", 2, tid] for tid in (1, 2, 3)] == ["compute", "encode", "link 0→1 activations"]
    assert named["thread_name", 1, 1] == "steps, commit to commit"
    clocks = picture["otherData"]["clocks"]
    assert clocks == [{"stage": 0, "offset_s": 0.5, "error_s": 0.001}, {"stage": 1, "offset_s": 0.0, "error_s": None}]


def test_arrow_follows_a_frame_from_encoder_over_the_wire_to_decoder():
    picture = trace_object(trace())
    arrows = events(picture, "s", "t", "f")
    assert [(arrow["ph"], arrow["pid"]) for arrow in arrows] == [("s", 2), ("t", 2), ("f", 3)]
    assert len({arrow["id"] for arrow in arrows}) == 1
    slices = {(event["pid"], event["tid"], event["ts"]) for event in events(picture, "X")}
    assert all((arrow["pid"], arrow["tid"], arrow["ts"]) in slices for arrow in arrows)


def drawn(*steps, start=1):
    """Pictures as they are read again."""
    return [json.loads(json.dumps(trace_object(step, start))) for step in steps]


def test_steps_make_one_picture_with_lanes_that_stay_the_same():
    late = TracedSpan("decode", "decode", "decode: gradients 0", 100.045, 100.046)
    picture = merged(drawn(trace(5, 100.0), trace(6, 100.03, [late])))
    check_format(picture)
    lanes = defaultdict(set)
    for event in events(picture, "M"):
        if event["name"] == "thread_name":
            lanes[event["pid"], event["args"]["name"]].add(event["tid"])
    assert all(len(tids) == 1 for tids in lanes.values())
    steps = [(event["name"], event["ts"]) for event in events(picture, "X") if event["cat"] == "step"]
    assert steps == [("step 5", 0.0), ("step 6", pytest.approx(30_000))]
    assert len({arrow["id"] for arrow in events(picture, "s")}) == 2


def processes(picture):
    """Names by number, each number once."""
    named = [(e["pid"], e["args"]["name"]) for e in events(picture, "M") if e["name"] == "process_name"]
    assert len(dict(named)) == len(named)
    return dict(named)


@pytest.mark.parametrize("begin_s", [147.0, 3.0], ids=["clock goes on", "another machine's clock"])
def test_each_start_of_a_run_has_processes_of_its_own_after_those_before(begin_s):
    first = drawn(trace(5, 100.0), trace(6, 100.03), start=1)
    picture = merged([*drawn(trace(9, begin_s, pid=7), start=3), *first])
    assert [step["step"] for step in picture["otherData"]["steps"]] == [5, 6, 9]
    check_format(picture)
    assert processes(picture) == {
        1: "start 1: coordinator",
        2: "start 1: stage 0 (a, pid 1)",
        3: "start 1: stage 1 (b, pid 2)",
        4: "start 3: coordinator",
        5: "start 3: stage 0 (a, pid 7)",
        6: "start 3: stage 1 (b, pid 2)",
    }
    places = [e["args"]["sort_index"] for e in events(picture, "M") if e["name"] == "process_sort_index"]
    assert places == [2, 3, 5, 6]
    steps = {event["name"]: (event["pid"], event["ts"]) for event in events(picture, "X") if event["cat"] == "step"}
    assert steps == {"step 5": (1, 0.0), "step 6": (1, pytest.approx(30_000)), "step 9": (4, pytest.approx(50_000))}


def test_step_that_was_traced_again_after_the_run_turned_back_keeps_its_time():
    picture = merged(drawn(trace(5, 160.0), trace(6, 100.03)))
    check_format(picture)
    steps = [(event["name"], event["ts"]) for event in events(picture, "X") if event["cat"] == "step"]
    assert steps == [("step 6", 0.0), ("step 5", pytest.approx(59_970_000))]


def test_each_step_is_a_file(tmp_path):
    files = TraceFiles(tmp_path / "trace", start=2)
    for step in (5, 6):
        files.step_traced(trace(step))
    other = json.loads(trace_path(tmp_path / "trace", 6).read_text())["otherData"]
    assert (other["step"], other["start"]) == (6, 2)
    assert sorted(path.name for path in (tmp_path / "trace").iterdir()) == ["step-000005.json", "step-000006.json"]


def test_full_disk_leaves_no_part_of_a_picture(tmp_path):
    if not can_mount():
        pytest.skip("needs root, to make a small disk")
    disk = tmp_path / "trace"
    with small_disk(disk, 1 << 16):
        files = TraceFiles(disk)
        files.step_traced(trace(5))
        fill(disk / "filler")
        for step in (5, 6):
            with pytest.raises(OSError, match="No space left"):
                files.step_traced(trace(step))
        assert sorted(path.name for path in disk.iterdir()) == ["filler", "step-000005.json"]
        assert read_picture(trace_path(disk, 5)) == json.loads(json.dumps(trace_object(trace(5))))
