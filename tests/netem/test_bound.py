"""The bound: by hand, against every schedule in the simulator, and for hosts that differ."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tahq.pipeline.schedule.generators import generate
from tahq.pipeline.schedule.schedule import ActionKind, validate
from tahq.plan.simulate.costs import Costs, CutCosts, HostCosts, StepWork
from tahq.plan.simulate.simulator import simulate
from tahq_netem.bound import LinkSpeed, step_bound_s
from tahq_netem.measure.figures import GOODPUT_SHARE
from tahq_netem.network.description import plan_network, uniform

SECOND = GOODPUT_SHARE * 1e6 / 8
"""Bytes that take a second at 1 Mbit/s."""


def two_stages(count=4, frame=SECOND):
    return StepWork([1.0, 1.0], [2.0, 2.0], [frame], [frame], count)


def test_example_of_the_docstring():
    assert step_bound_s(two_stages(), LinkSpeed(1e6, 1e6)) == pytest.approx(17)


def test_without_a_wire_it_is_the_pipeline_with_its_fill():
    # f and b of the first stage stand on either side of the second's m·(f + b)
    assert step_bound_s(two_stages(), LinkSpeed()) == 1 + 4 * 3 + 2


def test_slow_link_is_what_counts():
    # host 0 sends 4 frames of 10 s, and the last of them has to come back
    assert step_bound_s(two_stages(frame=10 * SECOND), LinkSpeed(1e6, 1e6)) == pytest.approx(1 + 40 + 3 + 10 + 2)


def test_delay_is_met_on_the_way_there_and_back():
    assert step_bound_s(two_stages(), LinkSpeed(delay_s=0.5)) == 1 + 0.5 + 12 + 0.5 + 2


def test_work_that_does_not_fit_together_is_refused():
    with pytest.raises(ValueError, match="one cut less"):
        StepWork([1.0, 1.0], [2.0, 2.0], [1.0, 1.0], [1.0], 4)


def test_example_of_four_stages_at_100_mbit():
    # 3 · (73 + 25) + 8 · 225 + 3 · (152 + 35) ms: frames of 25 and 35 ms at the goodput of the links
    frames = [[GOODPUT_SHARE * 100e6 / 8 * seconds] * 3 for seconds in (0.025, 0.035)]
    work = StepWork([0.073] * 4, [0.152] * 4, *frames, 8)
    assert step_bound_s(work, LinkSpeed(100e6, 100e6)) == pytest.approx(2.655)


def test_split_backward_lets_the_gradient_go_on_at_once():
    work = StepWork([1.0, 1.0], [2.0, 2.0], [SECOND], [SECOND], 4, input_gradient_s=[0.5, 0.5])
    # stage 1: 1 + 1 before it, 4 · (1 + 0.5), the gradient, and stage 0's whole backward of the last micro-batch;
    # or its own 4 · (1 + 2). The latter: all weights' gradients are in the step.
    assert step_bound_s(work, LinkSpeed(1e6, 1e6)) == pytest.approx(max(2 + 6 + 1 + 2, 2 + 12))
    # a whole backward has to go back, too
    assert step_bound_s(two_stages(), LinkSpeed(1e6, 1e6)) == pytest.approx(17)


@pytest.mark.parametrize("parts", [[1.0], [1.0, 3.0]])
def test_input_gradient_is_a_part_of_every_backward(parts):
    with pytest.raises(ValueError, match="part of each of the 2 backwards"):
        StepWork([1.0, 1.0], [2.0, 2.0], [1.0], [1.0], 4, input_gradient_s=parts)


durations = st.floats(0.0, 2.0)
nbytes = st.floats(0.0, 3 * SECOND)


@st.composite
def works(draw):
    stages = draw(st.integers(2, 5))

    def many(values, count):
        return draw(st.lists(values, min_size=count, max_size=count))

    return StepWork(
        many(durations, stages),
        many(durations, stages),
        many(nbytes, stages - 1),
        many(nbytes, stages - 1),
        draw(st.integers(1, 6)),
    )


@given(works(), st.sampled_from(["gpipe", "1f1b"]), st.sampled_from([5e5, 1e6, 1e9]), st.floats(0.0, 1.0))
def test_no_schedule_is_faster(work, schedule_name, rate, delay_s):
    schedule = generate(schedule_name, len(work.forward_s), work.num_micro_batches)
    step_s = simulate(schedule, costs_of(work, rate, delay_s)).step_time_s
    bound_s = step_bound_s(work, LinkSpeed(rate, rate, delay_s))
    assert bound_s <= step_s * (1 + 1e-9) + 1e-9


@given(
    works(),
    st.lists(st.floats(0.0, 1.0), min_size=5, max_size=5),
    st.sampled_from(["gpipe", "1f1b"]),
    st.integers(0, 5),
    st.sampled_from([5e5, 1e6, 1e9]),
    st.floats(0.0, 1.0),
)
def test_no_split_schedule_is_faster(work, shares, schedule_name, lag, rate, delay_s):
    parts = [share * seconds for share, seconds in zip(shares, work.backward_s, strict=False)]
    work = replace(work, input_gradient_s=parts)
    schedule = generate(schedule_name, len(work.forward_s), work.num_micro_batches)
    split = replace(schedule, actions=tuple(split_row(row, lag) for row in schedule.actions))
    validate(split)
    step_s = simulate(split, costs_of(work, rate, delay_s)).step_time_s
    assert step_bound_s(work, LinkSpeed(rate, rate, delay_s)) <= step_s * (1 + 1e-9) + 1e-9


def split_row(row, lag):
    """Input gradients where the backwards were, and weight gradients `lag` backwards later."""
    split, waiting = [], []
    for action in row:
        if action.kind is not ActionKind.B:
            split.append(action)
            continue
        split.append(replace(action, kind=ActionKind.I))
        waiting.append(replace(action, kind=ActionKind.W))
        if len(waiting) > lag:
            split.append(waiting.pop(0))
    return (*split, *waiting)


def costs_of(work, rate, delay_s):
    """The same step for the simulator."""
    host = HostCosts(GOODPUT_SHARE * rate, GOODPUT_SHARE * rate)
    weights_s = [whole - part for whole, part in zip(work.backward_s, work.returns_s, strict=True)]
    seconds = {
        ActionKind.F: work.forward_s,
        ActionKind.B: work.backward_s,
        ActionKind.I: work.returns_s,
        ActionKind.W: weights_s,
    }
    return Costs(
        compute_s={(stage, kind): row[stage] for kind, row in seconds.items() for stage in range(len(work.forward_s))},
        cuts=[
            CutCosts(out, back, latency_s=delay_s)
            for out, back in zip(work.activation_nbytes, work.gradient_nbytes, strict=True)
        ],
        hosts=[host] * len(work.forward_s),
    )


def test_hosts_that_differ_count_as_the_fastest():
    config = uniform(3, rate=1e6, delay=0.1)
    hosts = dict(config.hosts)
    hosts["host1"] = hosts["host1"].model_copy(update={"up": None, "down": 5e6, "delay": 0.02})
    speed = LinkSpeed.of(plan_network(config.model_copy(update={"hosts": hosts})))
    assert speed == LinkSpeed(math.inf, 5e6, 0.02)
