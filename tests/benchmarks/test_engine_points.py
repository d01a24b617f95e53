"""What bench_engine measures, without measuring it."""

import pytest
from engine_points import FP32, PLACES, TAH, Choices, chosen_depth, depths, sweeps

from tahq_netem.bound import LinkSpeed, step_bound_s
from tahq_netem.compute import StageTimes
from tahq_netem.session_config import planned_work
from tahq_netem.sweep_points import sweep_points


def place(name):
    return next(place for place in PLACES if place.name == name)


def test_every_network_has_both_sizes_of_a_step_and_both_wires():
    points = [point for config in sweeps(PLACES, Choices(runtimes=("tahq",))) for point in sweep_points(config)]
    assert len(points) == 5 * 2 * 2 + 1
    assert {point.session.wire for point in points} == {TAH, FP32}
    assert {point.session.stages for point in points} == {4, 8}


def test_others_are_measured_in_fp32_with_the_smaller_step():
    others = list(sweeps(PLACES, Choices(runtimes=("torch", "bare"))))
    assert len(others) == 5
    assert {config.global_batch for config in others} == {32}
    found = {(p.session.runtime, p.session.schedule) for config in others for p in sweep_points(config)}
    assert found == {
        ("torch", "gpipe"),
        ("torch", "1f1b"),
        ("torch", "1f1b-runtime"),
        ("bare", "1f1b"),
        ("bare", "1f1b-deep"),
    }


def test_tcp_is_cubic_that_does_not_begin_slowly_again():
    for config in sweeps(PLACES, Choices()):
        assert config.congestion_control == "cubic"
        assert config.tcp_slow_start_after_idle is False


def test_choices_leave_out_what_is_not_wanted():
    only = Choices(runtimes=("tahq",), wires=("tah",), micro_batches=(32,), steps=9)
    configs = list(sweeps([place("100"), place("8-stages")], only))
    assert [config.global_batch for config in configs] == [128, 128]
    assert [len(sweep_points(config)) for config in configs] == [1, 1]
    assert configs[0].steps.at_least == 9
    assert not list(sweeps([place("8-stages")], Choices(micro_batches=(8,))))


def test_bound_of_the_issues_example():
    # 3 · (73 + 25) + 8 · 225 + 3 · (152 + 35) ms, with frames as TAH and 6 bits have them
    config = next(sweeps([place("100")], Choices(runtimes=("tahq",), wires=("tah",), micro_batches=(8,))))
    point = sweep_points(config)[0]
    work = planned_work(config, point.session, StageTimes(point.session.forward_s, point.session.backward_s))
    assert step_bound_s(work, LinkSpeed.of(point.network.plan(4))) == pytest.approx(2.650, abs=0.01)


def test_candidates_for_the_depth_go_from_1f1b_to_gpipe():
    found = depths(4, 8)
    assert found[0] == (4, 3, 2, 1)
    assert found[-1] == (8, 8, 8, 8)
    assert len(set(found)) == len(found)
    assert all(max(depth) <= 8 and min(depth) >= 1 for depth in found)


def test_depth_is_chosen_by_the_simulator_unless_it_is_said():
    def depth(**changes):
        only = Choices(runtimes=("tahq",), micro_batches=(8,), wires=("tah",), **changes)
        [point] = sweep_points(next(sweeps([place("100-50ms")], only)))
        return point.session.in_flight

    assert depth() == chosen_depth(place("100-50ms"), 8, "1f1b", TAH)
    assert depth(depth=5) == 5
    assert depth(schedules=("gpipe",)) is None


def test_deeper_pipeline_is_chosen_over_a_longer_way():
    near, far = (chosen_depth(place(name), 8, "1f1b", TAH) for name in ("unshaped", "100-50ms"))
    # 1F1B's own is 4, 3, 2, 1; without a wire there are only codecs to hide
    assert (4, 3, 2, 1) <= near <= (6, 5, 4, 2)
    assert sum(far) > sum(near)
