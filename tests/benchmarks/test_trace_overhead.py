"""What a trace says of the runtime: every moment counted once."""

import pytest
from trace_overhead import overheads

from tahq.observe.trace_file import FIRST_STAGE_PID


def span(name, category, begin_ms, end_ms, pid=FIRST_STAGE_PID, tid=1):
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": pid,
        "tid": tid,
        "ts": 1e3 * begin_ms,
        "dur": 1e3 * (end_ms - begin_ms),
    }


def trace(*spans):
    names = [
        {"ph": "M", "name": "thread_name", "pid": FIRST_STAGE_PID, "tid": tid, "args": {"name": name}}
        for tid, name in ((1, "compute"), (2, "encode"))
    ]
    return {"traceEvents": [*names, span("step 3", "step", 0, 100, pid=1), *spans]}


def test_every_moment_of_a_step_counts_once():
    found = trace(
        span("data", "data", 0, 5),
        span("wait for stage 1: gradients 0", "wait", 5, 20),
        span("wait for the codec: gradients 0", "wait", 20, 22),
        span("0B0", "backward", 21, 71),  # begins while the codec is still waited for
        span("encode: gradients 0", "encode", 0, 100, tid=2),  # beside: no time of the step
        span("wait for room: gradients 1", "wait", 70, 80),
        span("commit", "commit", 85, 100),
    )
    (stage,) = overheads(found)
    shares = (stage.compute, stage.frames, stage.update, stage.commit, stage.codec, stage.rest)
    assert shares == pytest.approx((0.50, 0.24, 0.05, 0.15, 0.01, 0.05))
    assert stage.overhead == pytest.approx(0.06)
    assert sum(shares) == pytest.approx(1)


def test_what_lies_outside_of_the_step_is_not_of_it():
    (stage,) = overheads(trace(span("commit", "commit", -20, 10), span("0F0", "forward", 90, 130)))
    assert (stage.commit, stage.compute, stage.rest) == pytest.approx((0.1, 0.1, 0.8))
