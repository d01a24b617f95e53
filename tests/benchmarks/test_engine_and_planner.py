"""Points, rows and verdicts of the engine's and the planner's benchmarks, without measuring anything."""

from argparse import Namespace

import engine_points
import pytest
from bench_engine import cells
from bench_planner import small_cluster
from bench_planner_measured import problem, slowed, verdicts
from default_rows import settled
from engine_points import CONGESTION_CONTROL, FP32, PLACES, TAH, chosen_depth, depths, sweeps
from engine_rows import EngineRow, engine_rows, failures
from harness import Run
from planned_runs import PlannedRun, network_plan

from tahq.comm.network_model import GOODPUT_SHARE
from tahq.errors import TahqError
from tahq.pipeline.schedule.generators import generate
from tahq.plan.prediction import predict
from tahq.plan.problem import PipelinePlan
from tahq.plan.search.table import ClusterTable
from tahq_netem.measure.machine import BusyCores
from tahq_netem.runtimes.session import RuntimeStep
from tahq_netem.sweep.measurement import Measurement
from tahq_netem.sweep.points import sweep_points
from tahq_netem.sweep.spec import split_wire
from tahq_netem.sweep.stage_times import StageTimes
from tahq_netem.sweep.workload import CodecSeconds, planned_work, step_bound_s

OPTIONS = Namespace(steps=5, backend="auto", max_busy_cores=None, dry_run=True)


def place(name):
    return next(place for place in PLACES if place.name == name)


# -- points of bench_engine ----------------------------------------------------------------------


@pytest.fixture
def quick_depth(monkeypatch):
    """Do not let the simulator choose depths."""
    monkeypatch.setattr(engine_points, "chosen_depth", lambda place, *_: tuple(range(place.stages, 0, -1)))


def test_every_network_has_its_points_and_the_first_example_its_bound(quick_depth):
    configs = list(sweeps(PLACES, ["tahq"]))
    points = [point for config in configs for point in sweep_points(config)]
    assert len(points) == 2 * (5 * 2 * 2 + 1 + 2)  # the longest round trip for one number of micro-batches
    assert {(point.session.schedule, point.session.wire) for point in points} == {
        (schedule, wire) for schedule in ("1f1b", "zero-bubble") for wire in (TAH, FP32)
    }
    others = [point.session for config in sweeps(PLACES, ["torch", "bare"]) for point in sweep_points(config)]
    assert {other.wire for other in others} == {FP32}
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
    for depth in found:
        generate(schedule, 4, 8, depths=depth)


def test_deeper_pipeline_is_chosen_for_a_longer_delay():
    near, far = (chosen_depth(place(name), 8, "1f1b", TAH) for name in ("unshaped", "100-50ms"))
    # 1F1B's own is 4, 3, 2, 1; without a wire there are only codecs to hide
    assert (4, 3, 2, 1) <= near <= (6, 5, 4, 2)
    assert sum(far) > sum(near)


# -- rows of bench_engine ------------------------------------------------------------------------


def sweep_row(place, wire=TAH, runtime="tahq", step_s=2.0, **changes):
    activations, gradients = split_wire(wire)
    point = {
        "runtime": runtime,
        "schedule": "1f1b",
        "activations": activations,
        "gradients": gradients,
        "stages": place.stages,
        "micro_batch": 4,
        "in_flight": None,
        "seq_len": 256,
        "global_batch": 4 * place.micro_batches[0],
        "congestion_control": CONGESTION_CONTROL,
        "rate_bits_per_s": place.rate_bits_per_s,
        "round_trip_s": place.round_trip_s,
    }
    row = {"status": "done", "when": "2026-11-22T08:00:00+00:00", "point": point, "bound_s": 1.9, "codec_s": None}
    row |= {"steps": [{"seconds": step_s * factor} for factor in (0.9, 0.95, 1.0, 1.1, 3.0)]}
    row |= {"predicted_step_s": 1.02 * step_s, "busy_cores": 0.2, "busy_cores_of_others": 0.0}
    return row | changes


def test_row_has_median_quartiles_and_the_round_trip_of_tahqs_commit():
    row = EngineRow(sweep_row(place("100")))
    assert row.step_s == pytest.approx((1.9, 2.0, 2.2))
    assert cells(row)[3:] == [
        *("2.000 (1.900–2.200)", "4,096", "1.900", "0.950", "0.950", "2.040", "+2.0%", "0.20 (0.00)"),
    ]
    ours, theirs = (EngineRow(sweep_row(place("100-50ms"), FP32, runtime)) for runtime in ("tahq", "torch"))
    assert ours.share_with_commit == pytest.approx(1.95 / 2.0)
    assert ours.share == theirs.share == theirs.share_with_commit == pytest.approx(0.95)


def test_newest_measurement_of_a_point_counts_and_failures_are_listed():
    old = sweep_row(place("100"), step_s=3.0)
    new = sweep_row(place("100"), when="2026-11-22T09:00:00+00:00")
    new["point"]["in_flight"] = [7, 5, 3, 1]
    failed = sweep_row(place("100"), when="2026-11-22T10:00:00+00:00", status="failed", error="TooBusyError: 1.5")
    [row] = engine_rows([new, old, failed])
    assert (row.step_s[1], row.depth) == (2.0, (7, 5, 3, 1))
    [table] = failures([old, failed])
    assert table.rows == [(EngineRow(failed).series, "100 Mbit/s", "TooBusyError: 1.5")]


# -- plans as runs -------------------------------------------------------------------------------


@pytest.fixture
def asked():
    return problem(0, 4.0)


def run_of(asked, choice="planner", hosts=(2, 1, 0), layers=(6, 2, 4), schedule="zero-bubble", depths=(4, 4, 3)):
    cuts = len(hosts) - 1
    plan = PipelinePlan(hosts, layers, 2, 4, schedule, depths, ("tah",) * cuts, ("fixed:bits=6",) * cuts)
    return PlannedRun(choice, asked, predict(ClusterTable(asked), plan), OPTIONS)


def test_network_and_planner_see_the_same_hosts_and_paths(asked):
    table, plan, cluster = ClusterTable(asked), network_plan(asked.cluster), asked.cluster
    names = [host.name for host in cluster.hosts]
    for source, target in plan.paths:
        ends = names.index(source), names.index(target)
        assert plan.rate_bits_per_s(source, target) * GOODPUT_SHARE == pytest.approx(table.pair_rate[ends])
        assert plan.paths[source, target].delay_s == pytest.approx(table.latency_s[ends])
    before, after = small_cluster(0), slowed(small_cluster(0), 4.0)
    assert [host.up for host in after.hosts] == [host.up / 4 for host in before.hosts]
    assert [path.round_trip for path in after.paths] == [path.round_trip for path in before.paths]


def test_stages_sleep_as_the_planner_counts_and_workers_are_told(asked, tmp_path):
    run = run_of(asked)
    # hosts 2, 1, 0 take a micro-batch of 1 for 8, 16, 8 ms a layer and one of 8 for six times that; of 2: 1 + 5/7
    layer = [4 * ms * (1 + 5 / 7) / 1e3 for ms in (8, 16, 8)]
    # the last stage's head takes a layer's forward, both ways
    assert run.times.forward_s == pytest.approx([6 * layer[0], 2 * layer[1], (4 + 1) * layer[2]])
    assert run.times.backward_s == pytest.approx([12 * layer[0], 4 * layer[1], (2 * 4 + 1) * layer[2]])
    workers = run.config(tmp_path)
    assert (workers.pipeline.schedule, workers.pipeline.in_flight) == ("zero-bubble", [4, 4, 3])
    assert (workers.pipeline.layers, workers.training.num_micro_batches) == ([6, 2, 4], 4)
    assert workers.emulate.sleep.of(2) == pytest.approx((run.times.forward_s[2], run.times.backward_s[2]))
    with pytest.raises(TahqError, match="one host"):
        run_of(asked, hosts=(0,), layers=(12,), schedule="1f1b", depths=(1,))


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble", "gpipe"])
def test_both_simulators_agree_up_to_codecs_and_the_commit(asked, schedule):
    run = run_of(asked, schedule=schedule, depths=() if schedule == "gpipe" else (4, 4, 3))
    # the planner adds its longest round trip, 30 ms; the other counts a path to the first host of 75 ms at most
    assert run.predicted_s == pytest.approx(run.simulated_s(CodecSeconds()), abs=0.1)


@pytest.mark.parametrize(
    ("own", "best", "expected"),
    [
        (1.04, None, ["-3.8%, met", "by the simulator no plan is faster, met"]),
        (1.06, 1.0, ["-5.7%, MISSED", "+6.0%, MISSED"]),
        (0, 1.0, ["not measured", "not measured"]),
    ],
)
def test_verdicts_hold_prediction_and_choice_to_their_targets(asked, own, best, expected):
    runs = [run_of(asked), *([] if best is None else [run_of(asked, "best of all")])]
    for run, share in zip(runs, (own, best), strict=False):
        if share:
            steps = [RuntimeStep(1, share * run.predicted_s * factor, None, (), ()) for factor in (0.9, 1.0, 1.3)]
            run.figures(Measurement(tuple(steps), BusyCores(0.1, 0.2), None, None, 1))
    assert [line.rpartition(": ")[2] for line in verdicts(runs, planner_only=False)] == expected


def test_steps_count_once_the_last_change_has_settled():
    steps = [{"step": step, "schedule_change": "x" if step in (2, 5) else None} for step in range(1, 10)]
    assert [step["step"] for step in settled(Run(steps, "", 0.0, 0.0, {}, 0.0, 0.0))] == [8, 9]
    assert [step["step"] for step in settled(Run(steps[:6], "", 0.0, 0.0, {}, 0.0, 0.0))] == [6]
