"""Plans as runs on networks like their clusters, without running them, and what is made of the measurements."""

from argparse import Namespace

import bench_heterogeneous
import pytest
from bench_planner import small_cluster
from bench_planner_measured import problem, slowed, verdicts
from planned_runs import PlannedRun, network_config, network_plan

from tahq.comm.network_model import GOODPUT_SHARE
from tahq.errors import TahqError
from tahq.plan.prediction import predict
from tahq.plan.problem import PipelinePlan
from tahq.plan.search.table import ClusterTable
from tahq_netem.measure.machine import BusyCores
from tahq_netem.runtimes.session import RuntimeStep
from tahq_netem.sweep.measurement import Measurement
from tahq_netem.sweep.workload import CodecSeconds

SCALE = 4.0
OPTIONS = Namespace(steps=5, backend="auto", max_busy_cores=None, dry_run=True)


@pytest.fixture
def asked():
    return problem(0, SCALE)


def run_of(asked, choice="planner", hosts=(2, 1, 0), layers=(6, 2, 4), schedule="zero-bubble", depths=(4, 4, 3)):
    cuts = len(hosts) - 1
    plan = PipelinePlan(hosts, layers, 2, 4, schedule, depths, ("tah",) * cuts, ("fixed:bits=6",) * cuts)
    return PlannedRun(choice, asked, predict(ClusterTable(asked), plan), OPTIONS)


def measured(run, step_s):
    """The cells of a run whose steps took this long."""
    steps = tuple(RuntimeStep(1, step_s * factor, None, (), ()) for factor in (0.9, 1.0, 1.3))
    return run.figures(Measurement(steps, BusyCores(0.1, 0.2), None, None, 1))


def test_slowed_cluster_has_longer_compute_and_lower_rates_and_the_same_round_trips():
    before, after = small_cluster(0), slowed(small_cluster(0), SCALE)
    for one, other in zip(before.hosts, after.hosts, strict=True):
        assert (other.up, other.down, other.memory) == (one.up / 4, one.down / 4, one.memory)
        assert other.compute[1].block_backward == pytest.approx(4 * one.compute[1].block_backward)
        assert other.compute[0].last_forward == pytest.approx(4 * one.compute[0].last_forward)
    assert [path.round_trip for path in after.paths] == [path.round_trip for path in before.paths]
    assert {path.rate for path in after.paths} == {None, 30e6 / 4}


def test_network_and_planner_see_the_same_hosts_and_paths(asked):
    table, plan, cluster = ClusterTable(asked), network_plan(asked.cluster), asked.cluster
    names = [host.name for host in cluster.hosts]
    for source, target in plan.paths:
        ends = names.index(source), names.index(target)
        assert plan.rate_bits_per_s(source, target) * GOODPUT_SHARE == pytest.approx(table.pair_rate[ends])
        assert plan.paths[source, target].delay_s == pytest.approx(table.latency_s[ends])
    capped = next(path for path in cluster.paths if path.rate is not None)
    assert plan.paths[capped.target, capped.source].rate_bits_per_s is None
    assert network_config(cluster).pairs[0].rate is None
    assert (plan.congestion_control, plan.tcp_slow_start_after_idle) == ("cubic", False)


def test_stages_sleep_as_the_planner_counts_and_workers_are_told(asked, tmp_path):
    run = run_of(asked)
    # hosts 2, 1, 0 take a micro-batch of 1 for 8, 16, 8 ms a layer and one of 8 for six times that; of 2: 1 + 5/7
    layer = [SCALE * ms * (1 + 5 / 7) / 1e3 for ms in (8, 16, 8)]
    # the last stage's head takes a layer's forward, both ways
    assert run.times.forward_s == pytest.approx([6 * layer[0], 2 * layer[1], (4 + 1) * layer[2]])
    assert run.times.backward_s == pytest.approx([12 * layer[0], 4 * layer[1], (2 * 4 + 1) * layer[2]])
    assert (run.sweep.steps.settle, run.sweep.steps.at_most) == (16, 5)  # 64 frames, four a step
    workers = run.config(tmp_path)
    assert (workers.pipeline.schedule, workers.pipeline.in_flight) == ("zero-bubble", [4, 4, 3])
    assert workers.pipeline.layers == [6, 2, 4]
    assert workers.training.num_micro_batches == 4
    assert workers.model.sleep.of(2) == pytest.approx((run.times.forward_s[2], run.times.backward_s[2]))


def test_plan_of_one_host_is_refused(asked):
    with pytest.raises(TahqError, match="one host"):
        run_of(asked, hosts=(0,), layers=(12,), schedule="1f1b", depths=(1,))


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble", "gpipe"])
def test_both_simulators_agree_up_to_codecs_and_the_commit(asked, schedule):
    run = run_of(asked, schedule=schedule, depths=() if schedule == "gpipe" else (4, 4, 3))
    # the planner adds its longest round trip, 30 ms; the other counts a path to the first host of 75 ms at most
    assert run.predicted_s == pytest.approx(run.simulated_s(CodecSeconds()), abs=0.1)


def test_verdicts_hold_prediction_and_choice_to_their_targets(asked):
    def verdicts_at(own, best=None):
        runs = [run_of(asked), *([] if best is None else [run_of(asked, "best of all")])]
        for run, share in zip(runs, (own, best), strict=False):
            if share:
                measured(run, share * run.predicted_s)
        return [line.rpartition(": ")[2] for line in verdicts(runs, planner_only=False)]

    assert verdicts_at(1.04) == ["-3.8%, met", "by the simulator no plan is faster, met"]
    assert verdicts_at(1.06)[0] == "-5.7%, MISSED"
    assert verdicts_at(1.04, 1.0)[1] == "+4.0%, met"
    assert verdicts_at(1.06, 1.0)[1] == "+6.0%, MISSED"
    assert verdicts_at(1.04, 0)[1] == "not measured"
    assert verdicts_at(0) == ["not measured", "by the simulator no plan is faster, met"]
    assert len(list(verdicts([run_of(asked)], planner_only=True))) == 1


def test_row_has_the_median_step_and_its_quartiles(asked):
    assert measured(run_of(asked), 4.0)[1:] == [
        *("4.000 (3.800–4.600)", f"{run_of(asked).predicted_s / 4 - 1:+.1%}", "512", "0.10 (0.10)"),
    ]


def test_naive_pipeline_is_the_list_split_evenly():
    plan = bench_heterogeneous.naive_plan()
    assert (plan.hosts, plan.layers, sum(plan.layers)) == ((0, 1, 2, 3), (3, 3, 3, 3), bench_heterogeneous.NUM_LAYERS)
    desk = bench_heterogeneous.problem().cluster.hosts[0]
    assert desk.up == pytest.approx(47_820_343, abs=1)  # 1448 of 1514 bytes of 50 Mbit/s
