"""What the planner chooses under `memory` for random models, cards and hosts, against all choices; no GPU is used.

    python benchmarks/bench_memory_plans.py [--output benchmarks/results/memory_plans_<yyyymm>.md]
    python benchmarks/bench_memory_plans.py --problems 3

Llamas of 4 to 8 layers in two or three stages, micro-batches of any size. Cards have 0.15 to 1.2 times the memory that
the largest stage takes without any option, hosts up to 1.5 times it, so most models do not fit as they are. Compute
times are those of 40 to 150 TFLOP/s. For each: whether every stage of the planned configuration is within the memory of
its card and of its host by `stage_estimate`, which knows more than the planner does; and the predicted step against the
fastest of all orders, divisions, micro-batches, schedules, depths, and choices of recomputation and offload for each
stage.
"""

import argparse
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator

from exhaustive_plans import best_of_all
from harness import Table, main, say

from tahq.config.cluster import ClusterConfig
from tahq.config.stage_estimate import stage_estimate, with_memory_choices
from tahq.models.costs import counted_costs
from tahq.models.model_spec import ModelSpec
from tahq.plan.cluster_numbers import ClusterNumbers, HostNumbers, LayerTimes
from tahq.plan.planner import NothingFitsError, plan
from tahq.plan.prediction import step_time_s
from tahq.plan.problem import PlanProblem
from tahq.worker.assembly import resolved_spec
from tahq_launch.plan.command import planned_config
from tahq_launch.plan.problem import PlanChoices, problem_of

TOLERANCE = 1.005
"""By which the planner's estimate, in which all blocks are alike, may be below a stage's own."""


def drawn(seed: int) -> tuple[ClusterConfig, ModelSpec, PlanProblem]:
    """A model on some GPUs."""
    draw = random.Random(seed)
    hidden, stages = draw.choice([1024, 2048, 4096]), draw.choice([2, 2, 3])
    layers, batch = draw.randint(2 * stages, 8), draw.choice([2, 4])
    config = ClusterConfig.model_validate(
        {
            "run": {"name": "drawn", "device": "cuda"},
            "model": {
                "family": "llama", "num_layers": layers, "hidden_size": hidden, "num_heads": hidden // 128,
                "intermediate_size": hidden * 8 // 3 // 16 * 16, "vocab_size": 32_000,
            },
            "data": {"text": "stdlib", "seq_len": draw.choice([1024, 2048])},
            "training": {
                "steps": 1, "global_batch": batch, "micro_batch": 1,
                "optimizer": draw.choice(["adamw", "adamw_bf16", "adamw8bit"]),
            },
            "memory": {"gradients": "fp32"},
            "pipeline": {"stages": stages, "balance": "counted"},
        }
    )  # fmt: skip
    spec = resolved_spec(config, None)
    problem = problem_of(config, spec, _hosts(draw, config, spec, stages), PlanChoices(num_stages=stages))
    return config, spec, problem


def _hosts(draw: random.Random, config: ClusterConfig, spec: ModelSpec, count: int) -> ClusterNumbers:
    costs, hosts = counted_costs(spec, config.data.seq_len), []
    plain = with_memory_choices(config, spec)
    most = max(stage_estimate(plain, spec, stage, device="cuda").total for stage in range(count))
    for index in range(count):
        multiplied_s = config.data.seq_len / (draw.choice([40e12, 80e12, 150e12]) / 2)
        block, head = multiplied_s * costs.blocks[0], multiplied_s * costs.head
        times = LayerTimes(
            micro_batch=1, block_forward=block, block_backward=2 * block, last_forward=head, last_backward=2 * head
        )
        rate = draw.choice([100e6, 300e6, 1e9])
        hosts.append(
            HostNumbers(
                name=f"host{index}", memory=int(draw.uniform(0.15, 1.2) * most),
                host_memory=int(draw.uniform(0.3, 1.5) * most),
                host_link=8 * draw.choice([6e9, 12e9, 25e9]), up=rate, down=rate, compute=[times],
            )
        )  # fmt: skip
    return ClusterNumbers(hosts=hosts, round_trip=draw.choice([0.001, 0.03]))


def tables(options: argparse.Namespace) -> Iterator[Table | str]:
    slower, planner_s, refused, fullest, chosen = list[float](), list[float](), 0, 0.0, Counter[str]()
    for seed in range(options.problems):
        config, spec, problem = drawn(seed)
        begun_s = time.process_time()
        try:
            planned = plan(problem)
        except NothingFitsError:
            refused += 1
            continue
        planner_s.append(time.process_time() - begun_s)
        done, _ = planned_config(config, planned.table, planned.best.plan)
        for stage, host in enumerate(planned.best.plan.hosts):
            memory, numbers = stage_estimate(done, spec, stage, device="cuda"), problem.cluster.hosts[host]
            assert numbers.memory is not None
            assert numbers.host_memory is not None
            share = max(memory.total / numbers.memory, memory.host_total / numbers.host_memory)
            if share > TOLERANCE:
                raise AssertionError(f"problem {seed}: stage {stage} needs {share:.3f} of its memory")
            fullest = max(fullest, share)
        for each in planned.best.options:
            chosen[f"recompute {each.recompute}, offload {', '.join(each.offload) or 'nothing'}"] += 1
        _, best_s, _ = best_of_all(problem, options=True)
        slower.append(step_time_s(planned.table, planned.best.plan) / best_s - 1)
        say(f"problem {seed}: {slower[-1]:.2%} slower than the best of all; planned in {planner_s[-1]:.1f} s")
    columns = (
        "problems",
        "nothing fits",
        "slower than the best of all: median",
        "most",
        "fullest memory",
        "planner, s",
    )
    row = (
        options.problems, refused, f"{statistics.median(slower):.2%}", f"{max(slower):.2%}", f"{fullest:.3f}",
        f"{statistics.median(planner_s):.1f}",
    )  # fmt: skip
    yield Table(columns, [row], "Nothing fits: no plan, by the planner; of these no plan was sought otherwise.")
    yield Table(("chosen", "stages"), chosen.most_common())


if __name__ == "__main__":
    main(__doc__, tables, {"--problems": {"type": int, "default": 200}})
