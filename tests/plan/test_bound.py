"""The bound by hand, and that no simulated step is under it."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tahq.pipeline.schedule.generators import generate
from tahq.plan.simulate.bound import StepSeconds, step_bound, step_bounds, step_seconds
from tahq.plan.simulate.costs import Costs, CutCosts, HostCosts, compute_seconds
from tahq.plan.simulate.simulator import simulate


def costs_of(forward, backward, cuts, hosts) -> Costs:
    return Costs(compute_seconds(forward, backward, [b / 4 for b in backward]), cuts, hosts)


def test_each_resource_of_two_stages_by_hand():
    hosts = [HostCosts(8.0, 8.0), HostCosts(16.0, 16.0)]
    cut = CutCosts(1, 2, latency_s=10.0, forward_bits_per_s=4.0, backward_bits_per_s=32.0)
    bounds = step_bounds(step_seconds(costs_of([1, 3], [2, 5], [cut], hosts), 4, np.array([2.0, 1.0]), split=False))
    # an activation alone takes 2 s (the path), a gradient 2 s (the downlink of host 0): hops of 12 s
    assert bounds["compute", 0] == 4 * 3
    assert bounds["compute", 1] == 1 + 12 + 4 * 8 + 12 + 2
    # 1, four frames of 1 s; the last has 10 s to go, 3 + 5 of compute, 12 back, 2
    assert bounds["uplink", 0] == 1 + 4 + 10 + 8 + 12 + 2
    # the first gradient's first byte: 1 + 12 + 8 + 10, four of 2 s, 2
    assert bounds["downlink", 0] == 31 + 8 + 2
    # the first gradient is computed at 1 + 12 + 8; four of 1 s on the uplink, 10, 2
    assert bounds["uplink", 1] == 21 + 4 + 10 + 2
    # the first byte is there at 11, four of half a second, 8, 12, 2
    assert bounds["downlink", 1] == 11 + 2 + 8 + 12 + 2
    # 1, four of 2 s on the path, and then as after the uplink
    assert bounds["activations", 0] == 1 + 8 + 10 + 8 + 12 + 2
    assert bounds["gradients", 0] == 21 + 4 * 0.5 + 10 + 2
    # two turns of 1 + 12 + 8 + 12 + 2; four of 8 on the last stage
    assert bounds["depth", 0] == 2 * 35
    assert bounds["depth", 1] == 13 + 4 * 8 + 14


def test_a_stage_without_a_backward_neither_waits_for_gradients_nor_is_bound_by_depth():
    cut = CutCosts(1, 2, latency_s=10.0)
    costs = costs_of([3, 1], [5, 2], [cut], [HostCosts(8.0, 8.0)] * 2)
    bounds = step_bounds(step_seconds(costs, 4, np.array([1.0, 1.0]), split=False, num_frozen=1))
    # four forwards; the last activation takes 11 s, and 1 + 2 of compute
    assert bounds["compute", 0] == 4 * 3 + 11 + 3
    assert bounds["compute", 1] == 3 + 11 + 4 * 3
    assert max(bounds.values()) == 26
    assert simulate(generate("1f1b", 2, 4, depths=[1, 1], num_frozen=1), costs).step_time_s == 26


def test_a_gpu_does_the_work_of_all_stages_on_it():
    costs = replace(costs_of([1, 3, 2], [2, 5, 4], [CutCosts()] * 2, [HostCosts()] * 3), devices=(7, 4, 4))
    bounds = step_bounds(step_seconds(costs, 4, split=False))
    # the first activation is there at 1, and four micro-batches take 3 + 5 and 2 + 4 each
    assert {stage: seconds for (kind, stage), seconds in bounds.items() if kind == "gpu"} == {1: 1 + 4 * 14}


def test_codec_lanes_by_hand():
    cut = CutCosts(0, 0, 3.0, 4.0, 5.0, 6.0, latency_s=0.0)
    bounds = step_bounds(step_seconds(costs_of([1, 1], [2, 2], [cut], [HostCosts()] * 2), 4, split=False))
    # 1, four of 3, decoding 4, 1 + 2, encoding and decoding 11, 2
    assert bounds["encoder", 0] == 1 + 12 + 4 + 3 + 11 + 2
    # the first gradient is encoded at 1 + 7 + 3 + 5; four of 6, 2
    assert bounds["decoder", 0] == 16 + 24 + 2
    assert bounds["encoder", 1] == 1 + 7 + 3 + 4 * 5 + 6 + 2
    assert bounds["decoder", 1] == 1 + 3 + 4 * 4 + 3 + 11 + 2


def test_issue_five_example():
    # 73 + 152 ms, 25 and 35 ms on the wire: 3·(73+25) + 8·225 + 3·(152+35) = 2,655 ms
    cuts = [CutCosts(25.0, 35.0, latency_s=0.0)] * 3
    hosts = [HostCosts(8000.0, 8000.0)] * 4
    bound = step_bound(step_seconds(costs_of([0.073] * 4, [0.152] * 4, cuts, hosts), 8, split=False))
    assert bound == pytest.approx(2.655)


def test_many_candidates_are_bounded_as_one_by_one():
    generator = np.random.default_rng(0)
    cuts = [CutCosts(3, 2, latency_s=0.5)] * 2
    rows = generator.integers(1, 9, (5, 2, 3)).astype(float)
    each = [step_seconds(costs_of(f, b, cuts, [HostCosts(8.0, 16.0)] * 3), 6, split=False) for f, b in rows]
    stacked = np.stack([one.forward for one in each]), np.stack([one.backward for one in each])
    way, back, latency = each[0].activations, each[0].gradients, each[0].latency
    together = step_bound(StepSeconds(stacked[0], stacked[1], stacked[1], way, back, latency, 6))
    assert together == pytest.approx([float(step_bound(one)) for one in each])


TIMES = st.integers(0, 20).map(float)
RATES = st.sampled_from([8.0, 16.0, 40.0, math.inf])


@st.composite
def steps(draw):
    num_stages, num_micro_batches = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    cut = st.builds(CutCosts, *[TIMES] * 7, RATES, RATES)
    cuts = [draw(cut) for _ in range(num_stages - 1)]
    hosts = [draw(st.builds(HostCosts, RATES, RATES)) for _ in range(num_stages)]
    times = [[draw(TIMES) for _ in range(num_stages)] for _ in range(2)]
    depths = sorted((draw(st.integers(1, num_micro_batches)) for _ in range(num_stages)), reverse=True)
    devices = draw(st.just(()) | st.lists(st.integers(0, 2), min_size=num_stages, max_size=num_stages))
    costs = replace(costs_of(*times, cuts, hosts), devices=devices)
    return costs, num_micro_batches, depths, draw(st.integers(0, num_stages - 1))


@given(steps(), st.booleans())
@settings(max_examples=120, deadline=None)
def test_no_schedule_is_faster_than_the_bound(step, split):
    costs, num_micro_batches, depths, num_frozen = step
    limits = np.array(depths, dtype=float)
    bound = step_bound(step_seconds(costs, num_micro_batches, limits, split=split, num_frozen=num_frozen))
    name = "zero-bubble" if split else "1f1b"
    schedule = generate(name, len(depths), num_micro_batches, depths=depths, num_frozen=num_frozen)
    assert simulate(schedule, costs).step_time_s >= bound - 1e-9
