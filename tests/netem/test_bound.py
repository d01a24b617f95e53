"""The bound: by hand, against every schedule in the simulator, and for hosts that differ."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tahq.pipeline.costs import Costs, CutCosts, HostCosts
from tahq.pipeline.schedule import ActionKind, generate
from tahq.pipeline.simulator import simulate
from tahq_netem.bound import LinkSpeed, StepWork, step_bound_s
from tahq_netem.description import plan_network, uniform
from tahq_netem.figures import GOODPUT_SHARE

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
    stages = len(work.forward_s)
    host = HostCosts(GOODPUT_SHARE * rate / 8, GOODPUT_SHARE * rate / 8)
    costs = Costs(
        compute_s={
            (stage, kind): seconds[stage]
            for stage in range(stages)
            for kind, seconds in ((ActionKind.F, work.forward_s), (ActionKind.B, work.backward_s))
        },
        cuts=[CutCosts(out, back) for out, back in zip(work.activation_nbytes, work.gradient_nbytes, strict=True)],
        hosts=[host] * stages,
        latency_s=delay_s,
    )
    step_s = simulate(generate(schedule_name, stages, work.num_micro_batches), costs).step_time_s
    bound_s = step_bound_s(work, LinkSpeed(rate, rate, delay_s))
    assert bound_s <= step_s * (1 + 1e-9) + 1e-9


def test_hosts_that_differ_count_as_the_fastest():
    config = uniform(3, rate=1e6, delay=0.1)
    hosts = dict(config.hosts)
    hosts["host1"] = hosts["host1"].model_copy(update={"up": None, "down": 5e6, "delay": 0.02})
    speed = LinkSpeed.of(plan_network(config.model_copy(update={"hosts": hosts})))
    assert speed == LinkSpeed(math.inf, 5e6, 0.02)
