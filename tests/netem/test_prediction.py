"""The simulator's prediction of a measured step and its bound, by hand where possible."""

import pytest
from support.schedules import schedule
from support.sweeps import small

from tahq.comm.network_model import GOODPUT_SHARE
from tahq.errors import ScheduleError
from tahq.pipeline.schedule.generators import generate
from tahq.plan.simulate.costs import StepWork
from tahq_netem.measure.machine import BusyCores
from tahq_netem.network.description import PathShape, plan_network, uniform
from tahq_netem.runtimes.session import RuntimeStep
from tahq_netem.sweep.measurement import Measurement, prediction_of
from tahq_netem.sweep.points import SessionKey
from tahq_netem.sweep.stage_times import StageTimes
from tahq_netem.sweep.workload import (
    CodecSeconds,
    planned_work,
    predicted_step_s,
    schedule_with_depth,
    session_schedule,
    step_bound_s,
)

SECOND = GOODPUT_SHARE * 1e6 / 8
"""Bytes that take a second at 1 Mbit/s."""
RAW = "raw:dtype=fp32"


def key(runtime="tahq", schedule="1f1b", **changes):
    return SessionKey(runtime, schedule, RAW, RAW, stages=2, micro_batch=2, compute="sleep", **changes)


def record(seconds=1.0, codec_s=()):
    return RuntimeStep(1, seconds, None, (1000.0,), (1000.0,), codec_s=codec_s)


def test_codecs_of_both_ends_are_told_apart_where_the_runtime_reports_them():
    step = record(codec_s=((0.4, 0.8), (5.0, 5.0), (1.2, 1.6)))
    # the first stage encodes activations and decodes gradients, the last one the other way round
    assert CodecSeconds.measured([step, step], 4) == CodecSeconds(*(pytest.approx(s) for s in (0.1, 0.4, 0.3, 0.2)))
    assert CodecSeconds.measured([record()], 4) is None
    assert CodecSeconds.measured([], 4) is None


def test_bound_is_the_pipeline_with_its_fill_and_counts_hosts_by_their_own_links():
    work = StepWork([1.0, 1.0], [2.0, 2.0], [SECOND], [SECOND], 4)
    assert step_bound_s(work, plan_network(uniform(2))) == 1 + 4 * 3 + 2
    assert step_bound_s(work, plan_network(uniform(2, delay=0.5))) == 1 + 0.5 + 12 + 0.5 + 2
    assert step_bound_s(work, plan_network(uniform(2, rate=1e6))) == pytest.approx(17)
    assert step_bound_s(work, plan_network(uniform(2, up=0.1e6))) == pytest.approx(1 + 40 + 3 + 10 + 2)
    asymmetric = plan_network(uniform(2, delay=0.5)).with_path("host1", "host0", PathShape())
    assert step_bound_s(work, asymmetric) == 15.0  # of the two directions the shorter: never above the truth


def test_step_without_a_wire_is_the_pipeline_and_its_codecs():
    work = StepWork([1.0, 1.0], [2.0, 2.0], [SECOND], [SECOND], 4)
    plan = plan_network(uniform(2))
    schedule = generate("1f1b", 2, 4)
    assert predicted_step_s(schedule, work, plan, CodecSeconds()) == pytest.approx(1 + 4 * 3 + 2)
    slow = predicted_step_s(schedule, work, plan, CodecSeconds(0.1, 0.1, 0.1, 0.1))
    assert slow > 15.0


def test_rates_are_goodput_and_the_way_to_the_coordinator_counts():
    work = StepWork([1.0, 1.0], [2.0, 2.0], [SECOND], [SECOND], 1)
    plan = plan_network(uniform(2, rate=1e6, delay=0.25))
    alone = predicted_step_s(generate("1f1b", 2, 1), work, plan, CodecSeconds())
    # forward, its frame, forward and backward there, its frame, backward: nothing overlaps
    assert alone == pytest.approx(1 + 1.25 + 1 + 2 + 1.25 + 2)
    # one stage's end is the step's, unless another's PREPARE comes later
    last = StepWork([0.0, 1.0], [0.0, 2.0], [0.0], [0.0], 1)
    split = StepWork([0.0, 1.0], [0.0, 2.0], [0.0], [0.0], 1, input_gradient_s=[0.0, 0.0])
    late = schedule("0F0 0I0 0W0\n1F0 1I0 1W0")
    assert predicted_step_s(generate("1f1b", 2, 1), last, plan, CodecSeconds()) == pytest.approx(0.25 + 3 + 0.25)
    assert predicted_step_s(late, split, plan, CodecSeconds()) == pytest.approx(0.25 + 3 + 0.25)
    assert predicted_step_s(late, split, plan, CodecSeconds(), has_coordinator=False) == pytest.approx(0.25 + 3)


def test_prediction_lies_above_the_bound_and_is_part_of_a_row():
    times = StageTimes((0.01, 0.01), (0.02, 0.02))
    work = planned_work(small(), key(), times)
    plan = plan_network(uniform(2, rate=20e6, delay=0.01))
    codec = ((0.001, 0.001),) * 2
    measured = Measurement((record(codec_s=codec),), BusyCores(0.1, 0.1), work, None, tokens_per_step=256)
    row = prediction_of(key(), work, plan, measured)
    assert row["predicted_step_s"] >= step_bound_s(work, plan)
    assert row["predicted_tokens_per_s"] == pytest.approx(256 / row["predicted_step_s"])
    assert row["codec_s"]["forward_encode_s"] == pytest.approx(0.001 / 4)


def test_schedule_is_that_of_the_runtime_and_depth():
    assert session_schedule(key("torch", "gpipe"), 4) is None  # not predicted
    bare = session_schedule(key("bare", "1f1b-deep"), 4)
    assert [bare.max_in_flight(stage) for stage in range(2)] == [3, 1]
    assert schedule_with_depth("1f1b", 2, 4, None) == generate("1f1b", 2, 4)
    deep = schedule_with_depth("1f1b", 2, 4, (3, 2))
    assert [deep.max_in_flight(stage) for stage in range(2)] == [3, 2]
    assert schedule_with_depth("1f1b", 2, 4, 3).max_in_flight(1) == 3
    with pytest.raises(ScheduleError, match="unknown schedule"):
        schedule_with_depth("2f2b", 2, 4, None)
