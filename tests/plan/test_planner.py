"""The planner's choices: against all plans of small problems, and by hand where the answer is plain."""

import math
from dataclasses import replace
from functools import partial
from typing import get_args

import pytest
from exhaustive_plans import best_of_all
from hypothesis import given, settings
from hypothesis import strategies as st
from support.planner_problems import ask, cluster, host, model, random_problem
from support.schedules import check

from tahq.comm.link.spec import First
from tahq.errors import UserError
from tahq.pipeline.schedule.generators import generate
from tahq.plan.cluster_numbers import CodecTimes, HostNumbers, LayerTimes, PathNumbers, RelayNumbers
from tahq.plan.explanation import bottleneck
from tahq.plan.planner import plan
from tahq.plan.prediction import Prediction, Speed, predict, step_time_s
from tahq.plan.problem import HeldBytes, MemoryOption, ModelNumbers, PipelinePlan, PlanProblem
from tahq.plan.search.codecs import TOLERANCE, with_best_codecs
from tahq.plan.search.search import Simulations
from tahq.plan.search.stages import StageCosts, best_divisions
from tahq.plan.search.table import ClusterTable, times_of

SCHEDULES = ("1f1b", "gpipe", "zero-bubble")
quick = partial(plan, budget_actions=20_000)


@pytest.mark.parametrize("seed", range(6))
def test_choice_is_within_three_percent_of_the_best_of_all(seed):
    problem = random_problem(seed, num_hosts=3, num_layers=5 + seed % 2, schedules=SCHEDULES[: 2 + seed % 2])
    planned = plan(problem)
    _, best_s, _ = best_of_all(problem)
    assert step_time_s(planned.table, planned.best.plan) <= 1.03 * best_s


@given(st.integers(0, 10_000))
@settings(max_examples=8, deadline=None)
def test_any_plan_fits_its_hosts(seed):
    planned = quick(random_problem(seed, num_layers=6, schedules=SCHEDULES))
    best, chosen = planned.best, planned.best.plan
    assert sum(chosen.layers) == 6
    assert len(set(chosen.hosts)) == len(chosen.layers) == len(best.in_flight)
    assert (planned.table.memory[list(chosen.hosts)] >= best.memory_nbytes).all()
    check(generate(chosen.schedule, chosen.num_stages, chosen.num_micro_batches, depths=chosen.depths or None))


def test_equal_problems_give_equal_plans():
    assert quick(random_problem(5)).best.plan == quick(random_problem(5)).best.plan


@pytest.mark.parametrize(("num_hosts", "max_replicas"), [(3, 1), (8, 3)])
def test_progress_rises_from_none_to_all(num_hosts, max_replicas):
    shares: list[float] = []
    problem = replace(random_problem(3, num_hosts, schedules=SCHEDULES), max_replicas=max_replicas, num_stages=2)
    plan(problem, budget_actions=2_000, progress=shares.append)
    assert shares == sorted(shares)
    assert shares[0] < 0.1
    assert 0.5 < shares[-1] <= 1


# -- memory options ------------------------------------------------------------------------------

RECOMPUTED = MemoryOption({1: HeldBytes(block=10.0)}, block_nbytes=1e6, repeated=1.0, splits=False, recompute="block")
OFFLOADED = MemoryOption(
    {1: HeldBytes(block=4e5)}, block_nbytes=2e5, host_block_nbytes=8e5, updated=8e5, offload=("m", "v")
)


def on_one_gpu(*, memory=2_400_000, link=1e9, host_memory=None, count=4) -> Prediction:
    """Two blocks of 1 MB that keep 0.4 MB of a micro-batch, and 0.01 + 0.02 s for a block."""
    options = (MemoryOption({1: HeldBytes(block=4e5)}, block_nbytes=1e6), RECOMPUTED, OFFLOADED)
    gpu = host("gpu", memory=memory, host_memory=host_memory, host_link=link)
    return plan(PlanProblem(ModelNumbers(2, 64, 64, count, options), cluster(gpu), num_stages=1)).best


def test_nothing_is_recomputed_or_offloaded_where_there_is_room():
    assert [each.recompute for each in on_one_gpu(memory=10**7).options] == ["none"]
    assert on_one_gpu(memory=10**7).step_s == pytest.approx(4 * 0.06)


def test_update_of_what_is_offloaded_is_weighed_against_recomputation():
    # 1.6 MB each way in 12.8 ms of a step of four micro-batches, against 20 ms for each of these
    assert on_one_gpu().options == (OFFLOADED,)
    assert on_one_gpu().step_s == pytest.approx(4 * 0.06 + 0.0128)
    assert on_one_gpu(link=1e8).options == (RECOMPUTED,)
    assert on_one_gpu(link=1e8).step_s == pytest.approx(4 * 0.08)


def test_nothing_is_offloaded_to_a_host_without_room_or_over_an_unknown_link():
    assert on_one_gpu(host_memory=1_500_000).options == (RECOMPUTED,)
    assert on_one_gpu(link=None).options == (RECOMPUTED,)
    assert on_one_gpu(memory=1_300_000, host_memory=2_000_000).options == (OFFLOADED,)
    with pytest.raises(UserError, match="has the memory for a stage of one block"):
        on_one_gpu(memory=300_000)


# -- plain answers -------------------------------------------------------------------------------


def layers_by_host(planned):
    return dict(zip(planned.best.plan.hosts, planned.best.plan.layers, strict=True))


def test_blocks_without_a_backward_take_the_time_of_a_forward_and_cost_no_bytes_back():
    # seconds of a sample, 0.01 each forward and 0.02 backward: 7 · 0.01 and 3 · 0.03, not twice 5 · 0.03
    hosts = [host("first", up=1e7, down=1e7), host("second", up=1e7, down=1e7)]
    problem = ask(hosts, 10, 32, num_stages=2, in_order=True)
    frozen = replace(problem, model=replace(problem.model, first_trainable=7))
    assert plan(problem).best.plan.layers == (5, 5)
    chosen = quick(frozen)
    assert chosen.best.plan.layers == (7, 3)
    times = StageCosts.of(chosen.table, chosen.best.plan).times_of(chosen.best.plan)
    assert times.backward.tolist() == pytest.approx([0, 0.06 * chosen.best.plan.micro_batch])
    assert {transfer.direction.name for transfer in chosen.best.timeline.transfers} == {"FORWARD"}
    assert chosen.best.in_flight[0] == 0


@pytest.mark.parametrize("seed", range(3))
def test_choice_with_frozen_layers_is_within_three_percent_of_the_best_of_all(seed):
    problem = random_problem(seed, num_hosts=3, num_layers=6, schedules=SCHEDULES[: 2 + seed % 2])
    (option,) = problem.model.options
    model = replace(problem.model, first_trainable=3, options=(replace(option, frozen_nbytes=25_000.0),))
    problem = replace(problem, model=model)
    planned = plan(problem)
    _, best_s, _ = best_of_all(problem)
    assert step_time_s(planned.table, planned.best.plan) <= 1.03 * best_s


def test_layers_follow_the_speed_of_hosts():
    hosts = [host("slow", 0.04), host("fast", 0.01), host("middle", 0.02)]
    # no wire: 8 · 0.03 = 4 · 0.06 = 2 · 0.12 seconds per micro-batch
    assert layers_by_host(quick(ask(hosts, 14, 64, num_stages=3))) == {0: 2, 1: 8, 2: 4}


def test_layers_of_stages_that_share_a_gpu_fill_and_drain_the_pipeline_soon():
    hosts = [host(f"h{index}", 0.001, device="gpu", up=3e5, down=3e5) for index in range(4)]
    planned = plan(ask(hosts, 40, 16, round_trip=0.02, num_stages=4, schedules=("zero-bubble",)))
    # found by moving single blocks, as hosts with a device each are planned where there are many divisions
    other = replace(planned.best.plan, layers=(20, 4, 13, 3), depths=(11, 8, 5, 1))
    assert planned.best.step_s < 0.99 * predict(planned.table, other).step_s


def test_host_that_only_slows_the_others_down_is_left_out():
    hosts = [host("a"), host("b"), host("dial-up", up=1e4, down=1e4)]
    assert set(plan(ask(hosts)).best.plan.hosts) == {0, 1}


def test_slow_uplink_goes_to_the_end_that_sends_less():
    # activations in 16 bits and gradients in 2: the last stage sends gradients alone
    hosts = [host("a", up=1e8, down=1e8), host("narrow", up=2e6, down=1e8), host("c", up=1e8, down=1e8)]
    codecs = {"activations": ("raw:dtype=bf16",), "gradients": ("fixed:bits=2",)}
    assert plan(ask(hosts, 6, 16, num_stages=3, **codecs)).best.plan.hosts[-1] == 1


def test_far_hosts_are_not_neighbours():
    hosts = [host(name, site=name[:1]) for name in ("e1", "w1", "e2", "w2")]
    planned = quick(ask(hosts, 8, paths=[PathNumbers(source="e", target="w", round_trip=0.4)], num_stages=4))
    assert [hosts[index].site for index in planned.best.plan.hosts] in (list("eeww"), list("wwee"))


def test_long_round_trip_is_covered_by_depth():
    planned = plan(ask([host("a"), host("b")], 2, 32, round_trip=0.3, schedules=("1f1b",), num_stages=2))
    own = step_time_s(planned.table, PipelinePlan((0, 1), (1, 1), 1, 32, "1f1b", (), ("wf",), ("eden",)))
    assert planned.best.in_flight[0] > 2
    assert planned.best.step_s < own / 3


def test_depths_between_few_and_all_are_tried_though_the_deepest_is_slow():
    planned = plan(random_problem(106, num_hosts=5, num_layers=6, schedules=("1f1b",)))
    known = PipelinePlan((0, 2, 1), (3, 1, 2), 1, 4, "1f1b", (4, 3, 1), ("wf",) * 2, ("eden",) * 2)
    assert planned.best.step_s <= 1.001 * step_time_s(planned.table, known)


def test_little_memory_keeps_depth_and_layers_down():
    option = MemoryOption(dict.fromkeys((1, 2, 4, 8), HeldBytes(block=100.0)), block_nbytes=1_000.0)
    small = ModelNumbers(6, 8, 8, 8, (option,))
    # 64 elements per micro-batch are little beside a block of 1,000 bytes and 100 per micro-batch in flight
    hosts = [host("a", 0.001, memory=5_000), host("b", 0.1, memory=20_000)]
    planned = plan(PlanProblem(small, cluster(*hosts, round_trip=0.1)))
    assert 1 <= layers_by_host(planned)[0] <= 4
    assert max(planned.best.memory_nbytes) <= 20_000


def test_useless_hosts_change_nothing_wherever_they_are_listed():
    tiny, able = host("tiny", memory=1_000), [host(f"h{index}", memory=250_000) for index in range(8)]
    alone, *with_tiny = (
        quick(ask(hosts, 8, 4, block=1e5, held=8e4)).step_s for hosts in (able, [tiny, *able], [*able, tiny])
    )
    assert with_tiny == [alone] * 2


def pair(**numbers):
    return [host(name, **numbers) for name in "ab"]


APART = [PathNumbers(source=a, target=b, failure="no route to host") for a, b in ("ab", "ba")]


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (
            ask([host("a", memory=1_000), host("b", memory=2_000)], 4, 4, block=1e6),
            r"no host has the memory .* the largest, b, has 2 kB",
        ),
        (
            ask(pair(memory=1_500_000), 4, 4, block=1e6),
            r"no choice of hosts .* take 4 MB, a stage of one block .* or more; all 2 hosts together have 3 MB",
        ),
        # 1 MB of weights on each of two hosts leaves room for two of 8 micro-batches, of 200 kB on two blocks each
        (
            ask(pair(memory=1_400_000), 4, 8, block=5e5, held=1e5, schedules=("gpipe",)),
            r"has the memory for what gpipe keeps in flight.* try --schedules 1f1b",
        ),
        (
            ask([host(name) for name in "abc"], schedules=("interleaved",), num_stages=3),
            r"interleaved with 2 chunks per stage does not work with 3 stages.*global_batch is 8",
        ),
        (
            ask([host(name) for name in "abc"], 3, schedules=("interleaved",)),
            r"not work with 2 to 3 stages: .* 2 layers for each \(the model has 3\)",
        ),
        (ask(pair(), num_stages=3), "3 stages need 3 hosts, the numbers have 2"),
        (ask(pair(), 1, num_stages=2), "2 stages need 2 layers, the model has 1"),
        (ask(pair(), paths=APART, num_stages=2), r"in 2 stages: .* like that from a to b \(no route to host\)"),
    ],
)
def test_problem_without_a_plan_is_refused_with_the_reason(problem, message):
    with pytest.raises(UserError, match=message):
        plan(problem)


def test_failed_path_is_not_taken():
    paths = [PathNumbers(source="a", target="b", failure="no route")]
    order = plan(ask([host(name) for name in "abc"], paths=paths, num_stages=3)).best.plan.hosts
    assert order in ((0, 2, 1), (1, 2, 0))
    assert plan(ask(pair(), paths=APART)).best.plan.num_stages == 1
    assert plan(ask(pair(memory=1_400_000), 4, 8, block=5e5, held=1e5, schedules=("1f1b",))).best.plan.num_stages == 2


def relayed(*pairs, **numbers):
    """Paths that are relayed, both ways."""
    return [
        PathNumbers(source=one, target=other, relayed=True, **numbers)
        for pair in pairs
        for one, other in (pair, pair[::-1])
    ]


NARROW = RelayNumbers(up=2e5, down=1e8)


def test_hosts_that_can_dial_each_other_are_neighbours():
    """Of hosts that are equal in all else: a and c would share the relay's uplink if they were neighbours."""
    problem = ask([host(name) for name in "abc"], paths=relayed("ac"), relay=NARROW, num_stages=3)
    assert plan(problem).best.plan.hosts[1] == 1


def test_relayed_links_share_the_uplink_of_the_relays_host():
    hosts = [host(name) for name in "abcd"]
    fixed = PipelinePlan((0, 1, 2, 3), (1, 1, 1, 1), 1, 8, "1f1b", (), ("wf",) * 3, ("eden",) * 3)

    def step_s(*pairs, relay=NARROW):
        paths = relayed(*pairs, rate=1e8)
        return step_time_s(ClusterTable(ask(hosts, 4, 8, paths=paths, relay=relay, num_stages=4)), fixed)

    nbytes = sum(ask(hosts).frame_nbytes(codec, 1) for codec in ("wf", "eden"))
    one, two = step_s("ab"), step_s("ab", "cd")
    assert two >= 8 * 2 * nbytes * 8 / 2e5 > one
    assert step_s("ab", "cd", relay=RelayNumbers(up=1e8, down=1e8)) < two
    assert step_s("ab", "cd", relay=RelayNumbers(host="d", up=2e5, down=1e8)) < two  # c and d are not relayed
    assert step_s("ab", relay=RelayNumbers(host="c", up=2e5, down=1e8)) > one  # beside the frames of c itself


def test_relay_that_limits_the_step_is_the_bottleneck():
    problem = ask([host("a"), host("b")], 2, 32, paths=relayed("ab"), relay=RelayNumbers(up=2e5), num_stages=2)
    planned = plan(problem)
    limit = bottleneck(planned.table, planned.best)
    assert limit.resource == ("relay", 0)
    assert limit.bound_s <= planned.step_s


def test_codecs_are_coarse_only_where_the_wire_limits():
    ladder = ("raw:dtype=bf16", "fixed:bits=8", "fixed:bits=4")
    hosts = [host("a", up=1e9, down=1e9), host("b", up=1e9, down=1e9), host("c", up=1.2e6, down=1e9)]
    planned = plan(ask(hosts, 6, 16, activations=ladder, gradients=ladder, num_stages=3))
    chosen, cut = planned.best.plan, planned.best.plan.hosts.index(2)
    fast = 1 if cut == 0 else 0
    assert chosen.activations[fast] == chosen.gradients[fast] == "raw:dtype=bf16"
    coarse = plan(ask(hosts, 6, 16, activations=ladder[-1:], gradients=ladder[-1:], num_stages=3))
    assert planned.best.step_s <= (1 + TOLERANCE) * coarse.best.step_s
    assert "fixed:bits=4" in {*chosen.activations, *chosen.gradients}


def narrow_problem(activations, **host_numbers) -> PlanProblem:
    """The uplink of the first host is what limits two stages."""
    hosts = [host("a", 0.0125, up=20e6, down=1e9), host("b", 0.0125, up=1e9, down=1e9)]
    hosts = [each.model_copy(update=host_numbers) for each in hosts]
    paths = [PathNumbers(source=a, target=b, rate=rate) for a, b, rate in (("a", "b", 20e6), ("b", "a", 1e9))]
    wide = ModelNumbers(4, 768, 256, 64, (MemoryOption({1: HeldBytes()}),))
    choices = {"activations": activations, "gradients": ("wf",), "schedules": ("1f1b",), "num_stages": 2}
    return PlanProblem(wide, cluster(*hosts, paths=paths), **choices)


def test_codecs_are_chosen_for_the_depths_that_are_taken():
    planned = plan(narrow_problem(("wf:bits=6", "wf:bits=4", "wf:bits=2")))
    fine_s, coarse_s = (
        step_time_s(planned.table, replace(planned.best.plan, activations=(codec,)))
        for codec in ("wf:bits=6", "wf:bits=2")
    )
    # all at once, as with the deepest pipeline, six bits would cost a tenth; few at a time they are next to free
    assert fine_s < (1 + TOLERANCE) * coarse_s
    assert planned.best.plan.activations == ("wf:bits=6",)


def test_better_codec_of_shorter_frames_is_found_above_one_that_costs_too_much():
    problem = narrow_problem(("wf:bits=4", "tah", "wf:bits=3"))
    simulations = Simulations(ClusterTable(problem))
    coarse = PipelinePlan((0, 1), (2, 2), 1, 64, "1f1b", (64, 64), ("wf:bits=3",), ("wf",))
    four, tah = (simulations.time_s(replace(coarse, activations=(codec,))) for codec in ("wf:bits=4", "tah"))
    assert four < tah
    assert with_best_codecs(simulations, coarse, limit_s=four).activations == ("wf:bits=4",)


def test_better_codecs_have_room_in_memory():
    ladder = ("raw:dtype=bf16", "fixed:bits=8", "wf:bits=4", "wf:bits=2")
    for nbytes in (400_000, 1_000_000):
        assert max(plan(narrow_problem(ladder, memory=nbytes, up=1e9)).best.memory_nbytes) <= nbytes
    roomy = plan(narrow_problem(ladder, up=1e9))
    assert max(roomy.best.memory_nbytes) > 400_000  # so that memory does limit


def test_replicas_add_up_where_averaging_is_cheap():
    hosts = [host(f"h{index}", up=1e10, down=1e10) for index in range(4)]
    one, two = (plan(ask(hosts, 4, 32, block=4_000.0, num_stages=2, max_replicas=most)) for most in (1, 2))
    assert [each.num_micro_batches for each in two.replicas.plans] == [16, 16]
    assert not set(two.replicas.plans[0].hosts) & set(two.replicas.plans[1].hosts)
    assert 1.7 * one.tokens_per_s < two.tokens_per_s < 2 * one.tokens_per_s
    assert len({replace(each, hosts=()) for each in two.replicas.plans}) == 1
    # 10 MB per block to average at 1 Mbit/s
    assert plan(ask(pair(up=1e6, down=1e6), 2, 8, block=4e7, num_stages=1, max_replicas=2)).replicas is None


def test_sending_order_is_chosen_by_simulation():
    hosts, choices = [host(name, up=1e6, down=1e7) for name in "abc"], {"num_stages": 3, "schedules": ("1f1b",)}
    usual, chosen = (plan(ask(hosts, 6, 16, **choices, firsts=firsts)) for firsts in (("oldest",), get_args(First)))
    times = {first: predict(chosen.table, replace(usual.best.plan, first=first)).step_s for first in get_args(First)}
    assert chosen.best.step_s == pytest.approx(min(times.values()), rel=0.002)


# -- parts ---------------------------------------------------------------------------------------


def test_times_between_and_beyond_what_was_measured():
    rows = [LayerTimes(micro_batch=size, block_forward=time, block_backward=1.0) for size, time in ((2, 3.0), (4, 5.0))]
    measured = HostNumbers(name="a", compute=rows)
    # the straight line 1 + size; below 2 no less than in proportion, here 1.5, and the line says 2
    assert [times_of(measured, size)[0] for size in (1, 2, 3, 4, 8)] == [2.0, 3.0, 4.0, 5.0, 9.0]
    alone = HostNumbers(name="a", compute=rows[:1])
    assert [times_of(alone, size)[0] for size in (1, 8)] == [1.5, 12.0]


def test_paths_of_sites_and_hosts():
    hosts = [host("a", site="x"), host("b", site="x"), host("c", site="y", up=8e6)]
    paths = [
        PathNumbers(source="a", target="c", round_trip=0.5),
        PathNumbers(source="x", target="y", round_trip=0.1, rate=8e3),
        PathNumbers(source="x", target="x", round_trip=0.01),
    ]
    table = ClusterTable(ask(hosts, paths=paths, round_trip=9.0))
    for ends, latency_s in (((0, 1), 0.005), ((1, 2), 0.05), ((0, 2), 0.25)):
        assert table.latency_s[ends] == table.latency_s[ends[::-1]] == latency_s
    assert (table.pair_rate[0, 2], table.pair_rate[2, 0], table.pair_rate[0, 1]) == (8e3, 8e6, math.inf)


@pytest.mark.parametrize("first_trainable", [0, 9, 20])
def test_filled_divisions_are_as_good_as_all(monkeypatch, first_trainable):
    hosts = [host("a", 0.01), host("b", 0.03), host("c", 0.02, memory=400_000)]
    problem = ask(hosts, 20, 16, block=60_000.0, round_trip=0.05)
    problem = replace(problem, model=replace(problem.model, first_trainable=first_trainable))
    stages = StageCosts(ClusterTable(problem), (0, 1, 2), 1)
    every = best_divisions(stages, 20, 1, split=False)
    monkeypatch.setattr("tahq.plan.search.stages.MAX_ALL", 0)
    filled = best_divisions(stages, 20, 1, split=False)
    assert filled[0][1] <= (1.02 if first_trainable else 1.001) * every[0][1]
    assert filled[0][0].sum() == 20


def test_long_steps_are_estimated_from_shorter_ones(monkeypatch):
    table = ClusterTable(ask([host("a", up=1e7), host("b", down=2e6)], 4, 64, round_trip=0.02))
    long = PipelinePlan((0, 1), (2, 2), 1, 64, "1f1b", (6, 3), ("wf",), ("eden",))
    whole = step_time_s(table, long)
    monkeypatch.setattr("tahq.plan.prediction.MAX_ACTIONS_SEARCHED", 100)
    assert step_time_s(table, long) == pytest.approx(whole, rel=0.01)


def test_codec_that_was_not_measured_is_as_slow_as_one_that_was():
    fast, slow = (CodecTimes(encode_per_element=time, decode_per_element=0) for time in (1e-9, 4e-9))
    measured = {"wf:bits=4": fast, "wf:bits=6": slow, "raw:dtype=bf16": slow}
    numbers = host("a", codecs=measured)
    table = ClusterTable(PlanProblem(model(), cluster(numbers, host("b"))))
    elements = table.problem.num_elements(1)
    assert table.codec_s(0, "wf:bits=4", 1) == (1e-9 * elements, 0)
    assert table.codec_s(0, "wf:bits=3", 1) == table.codec_s(0, "eden", 1) == (4e-9 * elements, 0)
    assert table.codec_s(1, "wf:bits=3", 1) == (0, 0)
    # copying is no measure for coding, nor coding for copying
    only_raw = numbers.model_copy(update={"codecs": {"raw:dtype=bf16": slow}})
    assert ClusterTable(PlanProblem(model(), cluster(only_raw))).codec_s(0, "wf", 1) == (0, 0)
    # one micro-batch in transit: its elements are encoded on a
    coded, free = (ClusterTable(ask(hosts, 2, 1)) for hosts in ([numbers, host("b")], pair()))
    alone = PipelinePlan((0, 1), (1, 1), 1, 1, "1f1b", (), ("wf",), ("wf",))
    assert step_time_s(coded, alone) - step_time_s(free, alone) >= 0.99e-9 * elements


def test_depths_leave_slack_for_late_frames():
    table, best = (planned := plan(narrow_problem(("wf:bits=4",)))).table, planned.best
    late = Speed(late_s=best.step_s / best.plan.num_micro_batches / 2)
    first, *others = best.plan.depths
    fewer, more = (replace(best.plan, depths=(depth, *others)) for depth in (first - 1, 4 * first))
    assert step_time_s(table, best.plan, late) < 1.01 * step_time_s(table, more, late)
    assert step_time_s(table, fewer) < 1.001 * best.step_s  # nothing but slack
