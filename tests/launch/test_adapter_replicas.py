"""Adapters over slow links: replicas, whose sums are small, instead of a pipeline, whose cuts carry activations."""

from dataclasses import replace
from functools import partial

import pytest
from support.planner_problems import cluster
from support.runs import tiny

from tahq.config.cluster import ClusterConfig
from tahq.models.model_spec import load_spec
from tahq.plan.cluster_numbers import HostNumbers, LayerTimes, PathNumbers
from tahq.plan.planner import plan
from tahq.plan.problem import PlanProblem
from tahq_launch.plan.problem import PlanChoices, problem_of
from tahq_launch.plan.replicas import most_replicas

MODEL = {
    "family": "llama",
    "num_layers": 16,
    "hidden_size": 2048,
    "num_heads": 32,
    "num_kv_heads": 8,
    "intermediate_size": 8192,
}
quick = partial(plan, budget_actions=10_000)
VOCABULARY = 32_000
"""With MODEL 1.1 billion parameters, 2.2 GB in bf16."""
SLOW, FAST = 50e6, 1e9


def asked(names, *, memory=None, paths=(), most=None, **sections) -> PlanProblem:
    """Equal hosts with uplinks of 50 Mbit/s, unless paths say otherwise; a sample takes one of them 0.7 s."""
    training = {"global_batch": 48, "micro_batch": 1, "precision": "bf16"}
    values = tiny(model=MODEL, data={"seq_len": 2048}, training=training, pipeline={"stages": len(names)})
    values |= {"wire": {}, "hosts": [{"address": name} for name in names], **sections}
    config = ClusterConfig.model_validate(values)
    spec = load_spec(config.model, vocab_size=VOCABULARY, seq_len=2048, adapter=config.adapter)
    times = LayerTimes(micro_batch=1, block_forward=0.015, block_backward=0.03)
    rates = {} if paths else {"up": SLOW, "down": SLOW}
    hosts = [HostNumbers(name=name, site=f"site {name[0]}", memory=memory, compute=[times], **rates) for name in names]
    choices = PlanChoices(schedules=("1f1b",), max_replicas=most or most_replicas(config))
    problem = problem_of(config, spec, cluster(*hosts, paths=list(paths), round_trip=0.04), choices)
    return replace(problem, model=problem.model.with_sizes({1}))


@pytest.mark.parametrize("num_hosts", [3, pytest.param(4, marks=pytest.mark.acceptance)])
def test_hosts_that_hold_the_whole_model_are_replicas_for_adapters(num_hosts):
    names = "abcd"[:num_hosts]
    planned = quick(asked(names, adapter="lora"))
    assert [each.hosts for each in planned.replicas.plans] == [(host,) for host in range(num_hosts)]
    assert planned.tokens_per_s > 1.1 * planned.best.tokens_per_s
    assert planned.best.plan.num_stages > 1
    full = quick(asked(names, most=num_hosts))
    assert full.replicas is None  # gradients of all weights, 1.1 GB in FP8, take minutes
    assert most_replicas(ClusterConfig.model_validate(tiny())) == 1


SITES = ("a1", "b1", "a2", "b2")
BETWEEN = [
    PathNumbers(
        source=one, target=other, rate=FAST if one == other else SLOW, round_trip=0.001 if one == other else 0.04
    )
    for one in ("site a", "site b")
    for other in ("site a", "site b")
]


def test_two_sites_of_two_hosts_are_two_replicas_of_two_stages_for_adapters():
    """Two hosts have the memory for the model, and one has not."""
    planned = quick(asked(SITES, adapter="lora", memory=2_800_000_000, paths=BETWEEN))
    assert {frozenset(each.hosts) for each in planned.replicas.plans} == {frozenset((0, 2)), frozenset((1, 3))}
    assert planned.tokens_per_s > 1.1 * planned.best.tokens_per_s
    full = quick(asked(SITES, most=2, paths=BETWEEN))
    assert full.replicas is None
    assert full.best.plan.num_stages > 1
