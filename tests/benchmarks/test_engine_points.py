"""What bench_engine measures, without measuring it."""

import pytest
from engine_points import ASSUMED_CODEC, FP32, PLACES, QUEUES_S, TAH, Choices, chosen_depth, depths, sweeps

from tahq.pipeline.schedule.generators import generate
from tahq_netem.sweep.points import sweep_points
from tahq_netem.sweep.prediction import predicted_step_s, step_bound_s
from tahq_netem.sweep.stage_times import StageTimes
from tahq_netem.sweep.workload import planned_work


def place(name):
    return next(place for place in PLACES if place.name == name)


def test_every_network_has_both_sizes_of_a_step_and_both_wires():
    points = [
        point for config in sweeps(PLACES, Choices(runtimes=("tahq",), depth=4)) for point in sweep_points(config)
    ]
    assert len(points) == 2 * (5 * 2 * 2 + 1)
    assert {point.session.schedule for point in points} == {"1f1b", "zero-bubble"}
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
    for config in sweeps(PLACES, Choices(depth=4)):
        assert config.congestion_control == "cubic"
        assert config.tcp_slow_start_after_idle is False


def test_choices_leave_out_what_is_not_wanted():
    only = Choices(runtimes=("tahq",), wires=("tah",), micro_batches=(32,), steps=9, depth=4)
    configs = list(sweeps([place("100"), place("8-stages")], only))
    assert [config.global_batch for config in configs] == [128, 128]
    assert [len(sweep_points(config)) for config in configs] == [2, 2]
    assert configs[0].steps.at_least == 9
    assert not list(sweeps([place("8-stages")], Choices(micro_batches=(8,))))


def test_bound_of_the_issues_example():
    # 3 · (73 + 25) + 8 · 225 + 3 · (152 + 35) ms, with frames as TAH and 6 bits have them
    config = next(sweeps([place("100")], Choices(runtimes=("tahq",), wires=("tah",), micro_batches=(8,), depth=4)))
    point = sweep_points(config)[0]
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


def test_depth_does_not_hang_on_how_long_queues_are():
    """What is best with one length of queues loses a tenth with another, so what loses least anywhere is taken."""
    found = chosen_depth(place("20"), 32, "1f1b", FP32)
    seconds = [_step_s(place("20"), found, queue_s) for queue_s in QUEUES_S]
    assert max(seconds) < 1.005 * min(seconds)
    # as 1F1B goes with twice its own depth, and a last stage that is two micro-batches behind
    shallow = [_step_s(place("20"), (10, 8, 5, 3), queue_s) for queue_s in QUEUES_S]
    assert max(shallow) > 1.05 * min(shallow)


def _step_s(where, depth, queue_s):
    config = next(sweeps([where], Choices(runtimes=("tahq",), micro_batches=(32,), wires=("fp32",), depth=1)))
    key = sweep_points(config)[0].session
    work = planned_work(config, key, StageTimes(key.forward_s, key.backward_s))
    schedule = generate("1f1b", where.stages, 32, depths=depth)
    return predicted_step_s(schedule, work, where.choice.plan(where.stages), ASSUMED_CODEC, queue_s=queue_s)


def test_depth_is_chosen_by_the_simulator_unless_it_is_said():
    def depth(**changes):
        only = Choices(
            **{"runtimes": ("tahq",), "schedules": ("1f1b",), "micro_batches": (8,), "wires": ("tah",)} | changes
        )
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
