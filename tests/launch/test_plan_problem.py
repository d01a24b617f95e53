"""What of a cluster.yaml the planner is told."""

import numpy as np
import pytest
from support.planner_problems import cluster, host
from support.runs import tiny, write_config

from tahq.config.file import load_config
from tahq.config.stage_estimate import stage_estimate
from tahq.models.model_spec import load_spec
from tahq.plan.search.stages import StageCosts
from tahq.plan.search.table import ClusterTable
from tahq_launch.plan.problem import PlanChoices, model_numbers, problem_of

LLAMA = {"family": "llama", "num_layers": 4, "hidden_size": 64, "num_heads": 2, "intermediate_size": 96}
MATRICES = 4 * 64 * 64 + 3 * 64 * 96
"""Elements of a block's matrices."""


def test_weights_in_fp8_that_are_kept_count_as_memory_of_a_block(tmp_path):
    def block_nbytes(memory: dict) -> float:
        write_config(tmp_path, tiny(model=LLAMA, memory=memory))
        config = load_config(tmp_path / "cluster.yaml")
        return model_numbers(config, load_spec(config.model, vocab_size=256, seq_len=config.data.seq_len)).block_nbytes

    plain = block_nbytes({"activations": "none"})
    kept = block_nbytes({"activations": "coat"})
    made_anew = block_nbytes({"activations": "coat", "coat": {"keep_weight_codes": False}})
    assert (made_anew, kept) == (plain, plain + MATRICES)


@pytest.mark.parametrize("checkpointing", ["none", "block"])
@pytest.mark.parametrize(
    "training", [{}, {"optimizer": "qgalore"}, {"optimizer": "galore"}], ids=["adamw", "qgalore", "galore"]
)
def test_memory_of_a_plan_is_what_the_dry_run_counts(tmp_path, training, checkpointing):
    """With a vocabulary large enough for head and logits to be most of what the last stage takes."""
    given = {**training, "global_batch": 4, "micro_batch": 2, "activation_checkpointing": checkpointing}
    values = tiny(model=LLAMA, training=given, pipeline={"stages": 2, "layers": [2, 2], "schedule": "gpipe"})
    write_config(tmp_path, values)
    config = load_config(tmp_path / "cluster.yaml")
    spec = load_spec(config.model, vocab_size=4096, seq_len=config.data.seq_len)
    problem = problem_of(config, spec, cluster(host("a"), host("b")), PlanChoices())
    stages = StageCosts(ClusterTable(problem), (0, 1), 2, problem.activations[0], problem.gradients[0])
    layers = np.array([2.0, 2.0])
    planned = stages.fixed_nbytes(layers) + 2 * stages.held_nbytes(layers)
    counted = [stage_estimate(config, spec, stage, bf16=False).total for stage in range(2)]
    # the planner's frames have headers, and blocks are taken to be alike
    assert planned.tolist() == pytest.approx(counted, rel=0.005)


def test_checkpointing_leaves_zero_bubble_out_unless_it_is_named(tmp_path):
    given = {"global_batch": 4, "micro_batch": 2, "activation_checkpointing": "block"}
    write_config(tmp_path, tiny(model=LLAMA, training=given, pipeline={"stages": 2}))
    config = load_config(tmp_path / "cluster.yaml")
    spec = load_spec(config.model, vocab_size=256, seq_len=config.data.seq_len)
    hosts = cluster(host("a"), host("b"))
    usual, named = (
        problem_of(config, spec, hosts, PlanChoices(schedules=names)) for names in ((), ("1f1b", "zero-bubble"))
    )
    assert usual.schedules == ("1f1b", "gpipe")
    # a block's input, [2, 32, 64] in fp32, is all that checkpointing keeps until a split backward computes it again
    assert usual.model.held[2].block == 4 * 2 * 32 * 64
    assert named.model.held[2].block > 10 * usual.model.held[2].block
