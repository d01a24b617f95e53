"""The report of a step, and the trace of a traced step."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import schedules

from tahq.comm.control.encoding import decode_message, encode_message
from tahq.comm.link.frame import Direction, LogicalId, Purpose
from tahq.comm.link.wire_time import HeartbeatTimes, PieceTimes
from tahq.comm.transport import LinkStats
from tahq.pipeline.spans import Stopwatch
from tahq.pipeline.step_meter import PART, StepMeter, TraceRow, trace_parts

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD


def name(micro_batch, direction=FORWARD, step=4, purpose=Purpose.TRAIN):
    return LogicalId(1, 0, step, purpose, micro_batch, 1, direction)


def stats(*pieces, frames=1, busy_s=1.0, sending_s=0.75):
    """A piece that was sent in step 4, and acknowledged."""
    nbytes = sum(piece.nbytes for piece in pieces if piece.id.step == 4)
    direction = pieces[0].id.direction if pieces else FORWARD
    return LinkStats(1, direction, frames, nbytes, nbytes + 100, 4 * nbytes, busy_s, sending_s, pieces)


def piece(micro_batch, taken_s, acked_s, **changes):
    return PieceTimes(name(micro_batch, **changes), 100_000, taken_s - 0.5, taken_s, acked_s, acked_s)


@pytest.fixture
def meter():
    return StepMeter(Stopwatch(), 1, {0: 0, 1: 2}, lambda step: step == 4, clock=lambda: 0.0)


def test_row_has_what_prepare_says(meter):
    beats = (HeartbeatTimes(1, 5.0, 9.0, 5.5), HeartbeatTimes(1, 7.0, 11.0, 7.25))
    meter.note([stats(piece(0, 1.0, 2.0), piece(0, 1.0, 3.0))])
    nothing = {"payload_bytes": 0, "wire_bytes": 0, "elements": 0}
    meter.note([replace(stats(frames=0, busy_s=0.0, sending_s=0.0), **nothing, heartbeats=beats)])
    # Two pieces back to back, 1 s each: the bare round trip is nothing, and the wire was taken from 1 to 3.
    assert meter.take_rows() == [[1.0, 0.0, 1.0, 200_000.0, 200_100.0, 800_000.0, 1.0, 0.75, pytest.approx(2.0), 0.25]]
    assert meter.take_rows() == []


@pytest.mark.parametrize("purpose", [Purpose.EVAL, Purpose.EVAL_RAW])
def test_what_an_evaluation_sent_is_in_no_step(purpose):
    """All are queued at once, one second per piece: that of training waits two seconds for the evaluation's."""
    meter = StepMeter(Stopwatch(), 1, {1: 2}, lambda step: True, clock=lambda: 0.0)
    meter.begin(4)
    evaluation = [piece(n, 0.0, n + 1.0, step=3, purpose=purpose) for n in range(2)]
    meter.note([stats(*evaluation, piece(0, 0.0, 3.0))])
    ((*_, wire_s, _),) = meter.take_rows()
    assert wire_s == pytest.approx(1.0)
    (part,) = meter.trace(4)
    assert part.frames == ["train step 5 cut 1 forward 0"]
    assert part.ends_s[0] - part.begins_s[0] == pytest.approx(1.0)


def test_traced_step_tells_what_was_done_and_sent():
    stopwatch = Stopwatch()
    meter = StepMeter(stopwatch, 1, {0: 0, 1: 2}, lambda step: step == 4, clock=lambda: 0.0)
    meter.begin(4)
    stopwatch.add("forward", 1.0, 2.0, schedules.action("1F0"))
    stopwatch.add("encode", 2.0, 2.5, name(0))
    stopwatch.add("wait:2", 2.5, 4.0, name(0, BACKWARD))
    stopwatch.add("wait:memory", 4.0, 5.0, name(1, BACKWARD))
    stopwatch.take()
    meter.note([stats(piece(0, 2.5, 3.5), piece(0, 2.5, 4.5))])
    (part,) = meter.trace(4)
    assert decode_message(encode_message(part), "stage 1") == part
    rows = list(zip(part.lanes, part.categories, part.names, part.frames, strict=True))
    frame = "train step 5 cut 1 forward 0"
    assert rows == [
        ("compute", "forward", "1F0", ""),
        ("compute", "encode", "encode: activations 0", frame),
        ("compute", "wait", "wait for stage 2: gradients 0", "train step 5 cut 1 backward 0"),
        ("compute", "wait", "wait for room: gradients 1", "train step 5 cut 1 backward 1"),
        ("link 1→2 activations", "send", "activations 0", frame),
    ]
    assert (part.begins_s[-1], part.ends_s[-1]) == (2.5, pytest.approx(4.5))
    assert (part.nbytes[-1], part.queued_s[-1]) == (200_000, 0.5)
    assert meter.trace(4) == meter.trace(None) == []


def tracing_meter():
    return StepMeter(Stopwatch(), 1, {1: 2}, lambda step: True, clock=lambda: 0.0)


def sent_frames(parts):
    return [(part.step, frame) for part in parts for frame in part.frames]


def test_picture_waits_for_frames_that_are_acknowledged_in_the_next_step():
    meter = tracing_meter()
    meter.begin(4)
    first, last = piece(0, 1.0, 2.0), piece(1, 2.0, 13.0)
    meter.note([replace(stats(first), payload_bytes=first.nbytes + last.nbytes, frames=2)])
    assert meter.trace(4) == []
    meter.begin(5)
    meter.note([replace(stats(last, piece(0, 13.0, 14.0, step=5)), payload_bytes=last.nbytes)])
    told = sent_frames(meter.trace(5))
    assert told == [(4, f"train step 5 cut 1 forward {n}") for n in range(2)] + [(5, "train step 6 cut 1 forward 0")]
    assert meter.trace(None) == []


@pytest.mark.parametrize("is_last", [False, True])
def test_picture_is_not_waited_for_longer_than_until_the_end_of_the_next_step_or_the_last(is_last):
    meter = tracing_meter()
    meter.begin(4)
    first = piece(0, 1.0, 2.0)
    meter.note([replace(stats(first), payload_bytes=2 * first.nbytes)])
    assert meter.trace(4) == []
    meter.begin(5)
    told = meter.trace(None) if is_last else meter.trace(5)
    assert sent_frames(told)[0] == (4, "train step 5 cut 1 forward 0")
    meter.note([stats(piece(1, 2.0, 33.0))])
    meter.begin(6)
    assert (4, "train step 5 cut 1 forward 1") not in sent_frames(meter.trace(6))


@given(st.integers(0, 3 * PART + 1))
def test_parts_hold_every_row_once_and_are_numbered(num_rows):
    rows = [TraceRow("compute", "forward", str(n), "", float(n), n + 1.0) for n in range(num_rows)]
    parts = trace_parts(7, 1, rows)
    assert [part.part for part in parts] == list(range(len(parts)))
    assert {part.num_parts for part in parts} == {len(parts)}
    assert [name for part in parts for name in part.names] == [row.name for row in rows]
    assert max(len(part.names) for part in parts) <= PART
