"""Explanations of a plan: bottlenecks by hand, what-ifs in the right direction, a different second best."""

import pytest
from support.planner_problems import cluster, host, model, random_problem

from tahq.plan.explanation import bottleneck, second_best, shares, what_ifs
from tahq.plan.planner import plan
from tahq.plan.prediction import predict
from tahq.plan.problem import PipelinePlan, PlanProblem
from tahq.plan.search.table import ClusterTable

RAW = ("raw:dtype=fp32",)


def predicted(hosts, depths, num_micro_batches, round_trip):
    problem = PlanProblem(model(2, num_micro_batches), cluster(*hosts, round_trip=round_trip), RAW, RAW)
    table = ClusterTable(problem)
    return table, predict(table, PipelinePlan((0, 1), (1, 1), 1, num_micro_batches, "1f1b", depths, RAW, RAW))


@pytest.mark.parametrize(
    ("hosts", "depths", "count", "round_trip", "resource", "bound_s"),
    [
        ([host("slow", 0.1), host("fast", 0.01)], (4, 2), 64, 0.0, ("compute", 0), 64 * 0.3),
        # 16 kB and a header each; 1 Mbit/s takes 0.13 s for one, twice as long as a micro-batch computes
        ([host("a", up=1e6), host("b")], (12, 6), 64, 0.0, ("uplink", 0), 64 * 0.1311),
        # every two micro-batches wait for a round trip of 0.5 s and 0.06 s of compute
        ([host("a"), host("b")], (2, 1), 64, 0.5, ("depth", 0), 32 * 0.56),
    ],
)
def test_bottleneck_is_the_resource_that_bounds_the_step(hosts, depths, count, round_trip, resource, bound_s):
    limit = bottleneck(*predicted(hosts, depths, count, round_trip))
    assert limit.resource == resource
    assert limit.bound_s == pytest.approx(bound_s, rel=0.02)
    assert limit.share > 0.95


def test_bottleneck_of_a_pipeline_that_is_mostly_filling_is_fill():
    assert bottleneck(*predicted([host("a"), host("b")], (2, 1), 2, 0.4)).resource[0] == "fill"


def test_shares_of_compute_are_those_of_the_simulation():
    problem = random_problem(3)
    planned = plan(problem)
    needed = shares(planned.table, planned.best)
    for stage in range(planned.best.plan.num_stages):
        spans = [span for span in planned.best.timeline.actions if span.stage == stage]
        busy_s = sum(span.end_s - span.start_s for span in spans)
        assert needed["compute", stage] == pytest.approx(busy_s / planned.best.step_s)


def test_second_best_is_another_plan():
    planned = plan(random_problem(14))
    second = second_best(planned)
    assert second is not None
    best = planned.best.plan
    assert any(getattr(second.plan, name) != getattr(best, name) for name in ("hosts", "micro_batch", "layers"))
    assert second.tokens_per_s <= planned.best.tokens_per_s * 1.001


def test_a_lone_host_has_no_second_best_order():
    planned = plan(PlanProblem(model(2, 1), cluster(host("a")), RAW, RAW))
    assert second_best(planned) is None
    assert [each.change for each in what_ifs(planned)] == ["hosts twice as fast"]
    assert what_ifs(planned)[0].tokens_per_s == pytest.approx(2 * planned.best.tokens_per_s)


def test_what_ifs_change_the_prediction_as_expected():
    hosts = [host("a", up=4e5), host("b", down=4e5)]
    spec = "fixed:bits=8,group=64,round=nearest"
    planned = plan(PlanProblem(model(4, 16), cluster(*hosts, round_trip=0.05), (spec,), (spec,), num_stages=2))
    answers = {each.change: each.tokens_per_s for each in what_ifs(planned)}
    base = planned.best.tokens_per_s
    assert answers["rates twice as high"] > 1.3 * base
    assert base < answers["latency half as long"] < 1.2 * base
    assert answers["hosts twice as fast"] >= base
    [fewer_bits] = [change for change in answers if change.endswith("on the links")]
    assert answers[fewer_bits] > 1.1 * base
