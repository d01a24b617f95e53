"""The points of bench_engine, without measuring them."""

import engine_points
import pytest
from engine_points import FP32, PLACES, TAH, chosen_depth, depths, sweeps

from tahq.pipeline.schedule.generators import generate
from tahq_netem.sweep.points import sweep_points
from tahq_netem.sweep.stage_times import StageTimes
from tahq_netem.sweep.workload import planned_work, step_bound_s


def place(name):
    return next(place for place in PLACES if place.name == name)


@pytest.fixture
def quick_depth(monkeypatch):
    """Do not let the simulator choose depths."""
    monkeypatch.setattr(engine_points, "chosen_depth", lambda place, *_: tuple(range(place.stages, 0, -1)))


def test_every_network_has_both_sizes_of_a_step_and_both_wires(quick_depth):
    configs = list(sweeps(PLACES, ["tahq"]))
    points = [point for config in configs for point in sweep_points(config)]
    assert len(points) == 2 * (5 * 2 * 2 + 1)
    assert {point.session.schedule for point in points} == {"1f1b", "zero-bubble"}
    assert {point.session.wire for point in points} == {TAH, FP32}
    assert {point.session.stages for point in points} == {4, 8}
    assert {(config.congestion_control, config.tcp_slow_start_after_idle) for config in configs} == {("cubic", False)}


def test_others_are_measured_in_fp32_with_the_smaller_step():
    others = list(sweeps(PLACES, ["torch", "bare"]))
    assert len(others) == 5
    assert {config.global_batch for config in others} == {32}
    assert {(p.session.runtime, p.session.schedule) for config in others for p in sweep_points(config)} == {
        ("torch", "gpipe"),
        ("torch", "1f1b"),
        ("torch", "1f1b-runtime"),
        ("bare", "1f1b"),
        ("bare", "1f1b-deep"),
    }


def test_bound_of_the_first_example(quick_depth):
    # 3 · (73 + 25) + 8 · 225 + 3 · (152 + 35) ms, with frames as TAH and 6 bits have them
    config = next(sweeps([place("100")], ["tahq"]))
    point = next(point for point in sweep_points(config) if point.session.wire == TAH)
    work = planned_work(config, point.session, StageTimes(point.session.forward_s, point.session.backward_s))
    assert step_bound_s(work, point.network.plan(4)) == pytest.approx(2.650, abs=0.01)


@pytest.mark.parametrize(("schedule", "most"), [("1f1b", 8), ("zero-bubble", 11)])
def test_candidates_for_the_depth_go_from_1f1b_to_everything_at_once(schedule, most):
    found = depths(schedule, 4, 8)
    assert found[0] == (4, 3, 2, 1)
    assert (most,) * 4 in found
    assert len(set(found)) == len(found)
    for depth in found:
        assert most >= depth[0] >= depth[1] >= depth[2] >= depth[3] >= 1
        generate(schedule, 4, 8, depths=depth)


def test_deeper_pipeline_is_chosen_for_a_longer_delay():
    near, far = (chosen_depth(place(name), 8, "1f1b", TAH) for name in ("unshaped", "100-50ms"))
    # 1F1B's own is 4, 3, 2, 1; without a wire there are only codecs to hide
    assert (4, 3, 2, 1) <= near <= (6, 5, 4, 2)
    assert sum(far) > sum(near)
