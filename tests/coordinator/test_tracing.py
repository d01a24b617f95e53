"""Parts of traced steps, put together and brought to one clock."""

import math
from dataclasses import replace

import pytest

from tahq.comm.control.clock_offset import ClockOffset
from tahq.comm.control.messages import Prepare, Traced
from tahq.coordinator.step_report import KEPT_STEPS, MAX_PART, MAX_PARTS, TraceCollector
from tahq.errors import RemoteProtocolError

EXACT = [ClockOffset(0.0, 0.0)] * 2


def part(stage, *begins_s, step=4, number=0, num_parts=1):
    n = len(begins_s)
    ends_s = [begin_s + 0.5 for begin_s in begins_s]
    names = [f"F{index}" for index in range(n)]
    texts = (["compute"] * n, ["forward"] * n, names, [""] * n)
    return Traced(step, stage, number, num_parts, *texts, list(begins_s), ends_s, [0] * n, [0.0] * n)


@pytest.fixture
def collector():
    collector = TraceCollector(["stage 0 (a, pid 1)", "stage 1 (b, pid 2)"])
    collector.committed(4, 10.0, 12.0)
    return collector


def test_step_is_whole_when_every_part_of_every_stage_is_there(collector):
    assert collector.take(part(0, 10.5, num_parts=2), EXACT) is None
    assert collector.take(part(1, 10.7), EXACT) is None
    trace = collector.take(part(0, 10.25, number=1, num_parts=2), EXACT)
    assert (trace.step, trace.begin_s, trace.end_s) == (5, 10.0, 12.0)
    assert [[span.begin_s for span in stage.spans] for stage in trace.stages] == [[10.25, 10.5], [10.7]]
    assert trace.stages[1].name == "stage 1 (b, pid 2)"


def test_skewed_clocks_are_brought_to_the_coordinators(collector):
    """Stage 0's clock is 1,000 s ahead, stage 1's 50 s behind: what happened at once is at one place again."""
    offsets = [ClockOffset(1000.0, 0.01), ClockOffset(-50.0, 0.02)]
    collector.take(part(0, 1011.0), offsets)
    trace = collector.take(part(1, -39.0), offsets)
    assert [stage.spans[0].begin_s for stage in trace.stages] == [11.0, 11.0]
    assert [stage.spans[0].end_s for stage in trace.stages] == [11.5, 11.5]
    assert [(stage.offset_s, stage.clock_error_s) for stage in trace.stages] == [(1000.0, 0.01), (-50.0, 0.02)]


def test_clock_that_was_never_compared_is_said_to_be_unknown(collector):
    collector.take(part(0, 11.0), [None, None])
    trace = collector.take(part(1, 11.0), [None, None])
    assert all(math.isnan(stage.clock_error_s) for stage in trace.stages)


@pytest.mark.parametrize(
    "changes",
    [
        {"names": []},
        {"part": -1},
        {"part": 1},
        {"num_parts": MAX_PARTS + 1},
        {"begins_s": [math.nan]},
        {"ends_s": [math.inf]},
        {"ends_s": [0.0]},
    ],
)
def test_trace_that_makes_no_sense_names_its_stage(collector, changes):
    with pytest.raises(RemoteProtocolError, match=r"stage 0 \(a, pid 1\) sent a malformed trace of step 4"):
        collector.take(replace(part(0, 11.0), **changes), EXACT)


def test_part_that_is_too_long_or_comes_twice_or_of_no_such_step_is_refused(collector):
    with pytest.raises(RemoteProtocolError, match="malformed trace"):
        collector.take(part(0, *([11.0] * (MAX_PART + 1))), EXACT)
    collector.take(part(0, 11.0), EXACT)
    with pytest.raises(RemoteProtocolError, match="part 0 of its trace of step 4 twice"):
        collector.take(part(0, 11.0), EXACT)
    with pytest.raises(RemoteProtocolError, match="step 9, which was not committed yet"):
        collector.take(part(0, 11.0, step=9), EXACT)


def test_step_that_a_coordinator_before_this_one_has_committed_is_passed_over(collector):
    assert collector.take(part(0, 11.0, step=3), EXACT) is None
    assert TraceCollector(["stage 0"]).take(part(0, 11.0), EXACT) is None
    assert collector.take(part(1, 11.0), EXACT) is None  # stage 0 has yet to tell of step 4
    assert collector.take(part(0, 11.0), EXACT).step == 5


def test_steps_that_never_get_whole_are_forgotten(collector):
    for step in range(4, 4 + 3 * KEPT_STEPS):
        collector.committed(step, step, step + 1.0)
        collector.take(part(0, 11.0, step=step), EXACT)
    assert len(collector._parts) == len(collector._times) == KEPT_STEPS


def test_coordinator_tells_its_observer_of_a_traced_step(scene, prepare):
    def traced(stage, num_stages=3):
        return [prepare(1, stage, num_stages), part(stage, 5.0 + stage, step=0)]

    scene.server.offsets = {b"worker-0": ClockOffset(2.0, 0.25)}
    # A worker sends the trace of a step after its commit, and so before the next one's Prepare or with it.
    scene.workers(**{f"stage{n}": {"say": {1: traced(n)}} for n in range(3)})
    assert scene.run() == 0
    (trace,) = scene.observer.of("step_traced")
    assert trace.step == 1
    assert [stage.spans[0].begin_s for stage in trace.stages] == [3.0, 6.0, 7.0]
    assert trace.stages[0].clock_error_s == 0.25


def test_trace_before_training_is_refused(scene):
    (worker, *_) = scene.workers(stage0={"answers": False})
    worker.send(part(0, 1.0, step=0))
    assert scene.run(join_timeout_s=1.0) != 0
    assert scene.observer.of("step_traced") == []
    assert all(not isinstance(message, Prepare) for _, message in scene.server.sent)
