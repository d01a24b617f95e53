"""What of a cluster.yaml the planner is told."""

from itertools import product

import numpy as np
import pytest
from support.planner_problems import cluster, host
from support.runs import tiny

from tahq.config.cluster import ClusterConfig
from tahq.config.stage_estimate import stage_estimate
from tahq.memory import estimate
from tahq.models.model_spec import load_spec
from tahq.models.slice import slice_parameters
from tahq.plan.search.stages import StageCosts
from tahq.plan.search.table import ClusterTable
from tahq_launch.plan.problem import PlanChoices, model_numbers, problem_of

LLAMA = {"family": "llama", "num_layers": 4, "hidden_size": 64, "num_heads": 2, "intermediate_size": 96}
MATRICES = 4 * 64 * 64 + 3 * 64 * 96
"""Elements of a block's matrices."""
TWO_MICRO_BATCHES = {"global_batch": 4, "micro_batch": 2}
HOSTS = cluster(host("a"), host("b"))


def loaded(vocab_size: int = 256, **sections):
    """A configuration and its model."""
    config = ClusterConfig.model_validate(tiny(model=LLAMA, **sections))
    sizes = {"vocab_size": vocab_size, "seq_len": config.data.seq_len}
    return config, load_spec(config.model, **sizes, adapter=config.adapter)


def test_weights_in_fp8_that_are_kept_count_as_memory_of_a_block():
    plain, kept, made_anew = (
        model_numbers(*loaded(memory=memory)).options[0].block_nbytes
        for memory in (
            {"activations": "none"},
            {"activations": "coat"},
            {"activations": "coat", "coat": {"keep_weight_codes": False}},
        )
    )
    assert (made_anew, kept) == (plain, plain + MATRICES)


def test_a_slice_is_built_once_however_many_choices_of_memory_there_are():
    slice_parameters.cache_clear()
    config, spec = loaded(run={"device": "cuda"})
    assert len(model_numbers(config, spec, offloads=True).options) > 10
    assert slice_parameters.cache_info().misses <= 4  # the first block, the last, one between, and all


def test_replicas_that_share_optimizer_states_have_more_room_for_blocks():
    config, spec = loaded()
    whole, shared = (model_numbers(config, spec, shares=shares).options[0].block_nbytes for shares in (1, 4))
    assert whole - shared == 0.75 * 2 * 4 * (MATRICES + 2 * 64)
    config, spec = loaded(memory={"shard": ["optimizer", "gradients", "weights"]}, pipeline={"replicas": 4})
    (shared,) = (each.block_nbytes for each in model_numbers(config, spec, shares=4).options[:1])
    assert whole - shared == 0.75 * (2 * 4 * (MATRICES + 2 * 64) + 2 * 4 * MATRICES)


@pytest.mark.parametrize("checkpointing", ["none", "block"])
@pytest.mark.parametrize(
    ("optimizer", "memory"),
    [
        *product(["adamw", "qgalore", "galore"], [{}, {"activations": "agoq", "gradients": "fp8"}]),
        *product(["adamw", "qgalore"], [{"offload": ["residual", "m", "v"]}]),
        ("adamw", {"offload": ["weights", "gradients"]}),
        ("adapter", {"activations": "agoq"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("schedule", ["gpipe", "zero-bubble"])
def test_memory_of_a_plan_is_what_the_dry_run_counts(optimizer, checkpointing, memory, schedule, monkeypatch):
    """With a vocabulary large enough for head and logits to be most of what the last stage takes."""
    monkeypatch.setattr(estimate, "DECODED_AT_A_TIME", 1)  # of a model with parts that are smaller than a stage
    adapter = {"adapter": {"kind": "qlora"}} if optimizer == "adapter" else {}
    config, spec = loaded(
        vocab_size=4096,
        training=TWO_MICRO_BATCHES | ({} if adapter else {"optimizer": optimizer}),
        **adapter,
        pipeline={"stages": 2, "layers": [2, 2], "schedule": schedule},
        memory={**memory, "recompute": checkpointing},
    )
    problem = problem_of(config, spec, HOSTS, PlanChoices(schedules=(schedule,)))
    stages = StageCosts(ClusterTable(problem), (0, 1), 2)
    layers = np.array([2.0, 2.0])
    planned = stages.peak_nbytes(layers, np.array([2.0, 2.0]), np.zeros(2, dtype=int))
    counted = [stage_estimate(config, spec, stage, device="cpu").total for stage in range(2)]
    # The planner's frames have headers, and blocks are taken to be alike. Of two micro-batches of the last stage, the
    # schedule has only one put off while the other is in flight.
    over = 0.005 if schedule == "gpipe" else 0.013
    assert all(-0.005 < got / exact - 1 < over for got, exact in zip(planned, counted, strict=True))


def test_an_update_within_the_backward_takes_the_memory_of_one_gradient(monkeypatch):
    """Of the embedding: neither the head's nor those of blocks are there at the same time."""
    monkeypatch.setattr(estimate, "DECODED_AT_A_TIME", 1)
    fused = {"optimizer": "qgalore", "qgalore": {"fused": True}, "clip_norm": None, "non_finite": "halt"}
    config, spec = loaded(
        vocab_size=4096,
        training={**fused, "global_batch": 2, "micro_batch": 2},
        pipeline={"stages": 1},
        memory={"recompute": "block"},
    )
    stages = StageCosts(ClusterTable(problem_of(config, spec, HOSTS, PlanChoices())), (0,), 2)
    (planned,) = stages.peak_nbytes(np.array([4.0]), np.array([1.0]), np.zeros(1, dtype=int))
    counted = stage_estimate(config, spec, 0, device="cpu")
    assert counted.gradients == 4 * 4096 * 64
    assert planned == pytest.approx(counted.total, rel=0.005)


def test_checkpointing_leaves_zero_bubble_out_unless_it_is_named():
    config, spec = loaded(training=TWO_MICRO_BATCHES, memory={"recompute": "block"}, pipeline={"stages": 2})
    usual, named = (
        problem_of(config, spec, HOSTS, PlanChoices(schedules=names)) for names in ((), ("1f1b", "zero-bubble"))
    )
    assert usual.schedules == ("1f1b", "gpipe")
    # a block's input, [2, 32, 64] in fp32, is all that checkpointing keeps until a split backward computes it again
    assert usual.model.options[0].held[2].block == 4 * 2 * 32 * 64
    assert named.model.options[0].held[2].block == usual.model.options[0].held[2].block
    assert named.model.options[0].held[2].block_put_off > 9 * usual.model.options[0].held[2].block
