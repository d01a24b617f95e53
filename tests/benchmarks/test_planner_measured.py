"""Small clusters that are trained on: what is slowed, the network, the stages' naps, and what is said of results."""

import json

import pytest
from bench_planner import small_cluster
from bench_planner_measured import described, simulated
from planner_rows import BEST, PLANNER, figures, report, verdicts
from small_clusters import (
    CODEC_TIMES,
    codec_seconds,
    network_config,
    network_plan,
    problem,
    session_key,
    slowed,
    stage_times,
    sweep,
)

from tahq.comm.network_model import GOODPUT_SHARE
from tahq.errors import TahqError
from tahq.plan.prediction import predict
from tahq.plan.problem import PipelinePlan
from tahq.plan.search.table import ClusterTable
from tahq_netem.measure.machine import BusyCores
from tahq_netem.runtimes.session import StepRecord
from tahq_netem.sweep.measurement import Measurement
from tahq_netem.sweep.workload import session_config

SEED, SCALE = 0, 4.0
SETTINGS = {"num_steps": 5, "settle": None, "backend": "auto", "max_busy_cores": None}


@pytest.fixture
def asked():
    return problem(SEED, SCALE)


def plan_of(hosts=(2, 1, 0), layers=(6, 2, 4), schedule="zero-bubble", depths=(4, 4, 3)):
    cuts = len(hosts) - 1
    return PipelinePlan(hosts, layers, 2, 4, schedule, depths, ("tah",) * cuts, ("fixed:bits=6",) * cuts)


def test_slowed_cluster_has_longer_compute_and_lower_rates_and_the_same_round_trips():
    before, after = small_cluster(SEED), slowed(small_cluster(SEED), 4.0)
    for one, other in zip(before.hosts, after.hosts, strict=True):
        assert (other.up, other.down) == (one.up / 4, one.down / 4)
        assert other.compute[1].block_backward == pytest.approx(4 * one.compute[1].block_backward)
        assert other.compute[0].last_forward == pytest.approx(4 * one.compute[0].last_forward)
        assert (other.memory, other.codecs) == (one.memory, CODEC_TIMES)
    assert [path.round_trip for path in after.paths] == [path.round_trip for path in before.paths]
    capped = [path.rate for path in after.paths if path.rate is not None]
    assert set(capped) == {30e6 / 4}


def test_network_gives_tcp_what_the_numbers_say_and_caps_one_way(asked):
    plan, cluster = network_plan(asked.cluster), asked.cluster
    for host in cluster.hosts:
        assert plan.host_shapes[host.name].up_bits_per_s * GOODPUT_SHARE == pytest.approx(host.up)
        assert plan.host_shapes[host.name].down_bits_per_s * GOODPUT_SHARE == pytest.approx(host.down)
    capped = next(path for path in cluster.paths if path.rate is not None)
    there, back = plan.paths[capped.source, capped.target], plan.paths[capped.target, capped.source]
    assert there.rate_bits_per_s * GOODPUT_SHARE == pytest.approx(7.5e6)
    assert back.rate_bits_per_s is None
    for path in cluster.paths:
        assert plan.round_trip_s(path.source, path.target) == pytest.approx(path.round_trip)
    assert (plan.congestion_control, plan.tcp_slow_start_after_idle) == ("cubic", False)
    assert network_config(cluster).pairs[0].rate is None


def test_network_and_planner_see_the_same_paths(asked):
    table, plan = ClusterTable(asked), network_plan(asked.cluster)
    names = [host.name for host in asked.cluster.hosts]
    for source, target in plan.paths:
        ends = names.index(source), names.index(target)
        assert plan.rate_bits_per_s(source, target) * GOODPUT_SHARE == pytest.approx(table.pair_rate[ends])
        assert plan.paths[source, target].delay_s == pytest.approx(table.latency_s[ends])


def test_stages_sleep_as_the_planner_counts_with_the_last_ones_extra(asked):
    plan = plan_of()
    times = stage_times(asked, plan)
    # hosts 2, 1, 0 take a micro-batch of 1 for 8, 16, 8 ms a layer and one of 8 for six times that; of 2: 1 + 5/7
    layer = [SCALE * ms * (1 + 5 / 7) / 1e3 for ms in (8, 16, 8)]
    expected = [6 * layer[0], 2 * layer[1], (4 + 1) * layer[2]]
    assert times.forward_s == pytest.approx(expected)
    # backwards are two forwards, that of the last stage's head is one
    assert times.backward_s == pytest.approx([2 * expected[0], 2 * expected[1], (2 * 4 + 1) * layer[2]])


def test_plan_reaches_the_workers_configuration(asked, tmp_path):
    plan = plan_of()
    config = sweep(asked, plan, **SETTINGS)
    assert (config.steps.settle, config.steps.at_most) == (16, 5)  # 64 frames, four a step
    key = session_key(asked, plan)
    workers = session_config(config, key, tmp_path, stage_times(asked, plan))
    assert (workers.pipeline.schedule, workers.pipeline.in_flight) == ("zero-bubble", [4, 4, 3])
    assert workers.training.num_micro_batches == 4
    assert workers.model.sleep.of(2) == pytest.approx((key.forward_s[2], key.backward_s[2]))


def test_plan_of_one_host_is_refused(asked):
    with pytest.raises(TahqError, match="one host"):
        session_key(asked, plan_of((0,), (12,), "1f1b", (1,)))


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble", "gpipe"])
def test_both_simulators_agree_up_to_the_way_back_of_the_commit(asked, schedule):
    plan = plan_of(schedule=schedule, depths=() if schedule == "gpipe" else (4, 4, 3))
    said_s = predict(ClusterTable(asked), plan).step_s
    sweeps_s = simulated(asked, plan, sweep(asked, plan, **SETTINGS), codec_seconds(asked, plan))
    # the planner adds its longest round trip, 30 ms; the other counts a way to the first host of 75 ms at most
    assert said_s == pytest.approx(sweeps_s, abs=0.1)
    assert sweeps_s > 1.0


def row(asked, who, seconds):
    plan = plan_of()
    steps = tuple(StepRecord(1, seconds * factor, None, (), ()) for factor in (0.9, 1.0, 1.3))
    seen = figures(Measurement(steps, BusyCores(0.1, 0.2), None, None, 1))
    return described(SEED, who, asked, predict(ClusterTable(asked), plan)) | seen | {"simulated_s": 3.9}


def test_verdicts_hold_prediction_and_choice_to_their_targets(asked):
    predicted_s = row(asked, PLANNER, 1.0)["predicted_s"]
    near, far = row(asked, PLANNER, 1.04 * predicted_s), row(asked, PLANNER, 1.06 * predicted_s)
    assert [verdict.rpartition(": ")[2] for verdict in verdicts([near])] == [
        "-3.8%, met",
        "by the simulator no plan is faster, met",
    ]
    assert next(verdicts([far])).endswith("-5.7%, MISSED")
    best = row(asked, BEST, predicted_s)
    assert list(verdicts([near, best]))[1].endswith("+4.0%, met")
    assert list(verdicts([far, best]))[1].endswith("+6.0%, MISSED")
    lost = {**row(asked, PLANNER, 1.0), "failed": "no such network"}
    assert all(verdict.endswith("not measured, no such network") for verdict in verdicts([lost]))
    unknown = {**best, "failed": "too busy"}
    assert list(verdicts([near, unknown]))[1].endswith("the best of all was not measured, too busy")
    assert len(list(verdicts([near], planner_only=True))) == 1


def test_report_has_a_line_for_each_row_and_each_verdict(asked):
    lost = {key: value for key, value in row(asked, BEST, 1.0).items() if key != "step_s"} | {"failed": "too busy"}
    rows = [row(asked, PLANNER, 4.0), lost]
    clusters = json.loads(json.dumps({SEED: asked.cluster.model_dump(mode="json")}))
    said = list(verdicts(rows))
    found = {"machine": "a machine", "scale": SCALE, "planner_only": False, "clusters": clusters, "rows": rows}
    text = report({**found, "verdicts": said})
    assert "| 0 | planner | h2, h1, h0 | 6, 2, 4 | zero-bubble | 4, 4, 3 | 2 | `tah / fixed:bits=6` |" in text
    assert "| 3.900 | 4.000 (" in text
    assert "| not measured |" in text
    assert "h0 5 / 25, h1 250 / 250" in text
    assert all(verdict in text for verdict in said)
    widths = {line.count("|") for line in text.splitlines() if line.startswith("|")}
    assert widths == {15}


def test_best_step_is_the_planners_own_where_nothing_is_faster_and_unknown_where_nobody_looked(asked):
    found = {"machine": "a machine", "scale": SCALE, "clusters": {}, "rows": [row(asked, PLANNER, 4.0)], "verdicts": []}
    assert report({**found, "planner_only": False}).rstrip().endswith("| 4.000 |")
    assert report({**found, "planner_only": True}).rstrip().endswith("|  |")
