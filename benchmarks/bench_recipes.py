"""Recipes on a few cards: memory per stage, bytes per step and tokens per second as `tahq-launch --dry-run` plans them

    python benchmarks/bench_recipes.py [--output benchmarks/results/recipes_<yyyymm>.md]

No GPU is needed: each recipe is planned as before its first step, with calculated instead of measured figures. A card
computes `USED` of the dense bf16 rate that its maker publishes (NVIDIA's whitepapers of GA102 and of the Ada
architecture: twice the rate of fp32), a backward takes twice the time of a forward, or with adapters as long as a
forward, since frozen weights have no gradients. Coding and decoding take no time, that of 4 bits neither. One GiB of
each card is left for CUDA's context and fragments, and a plan takes 90 % of the rest. Shapes are those of the models'
config.json.
"""

import argparse
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from bench_stage_memory import KEYS, MODELS
from harness import Table, main

from tahq.config.cluster import ClusterConfig
from tahq.config.file import load_config
from tahq.config.stage_estimate import block_ranges, stage_estimate
from tahq.errors import UserError
from tahq.models.costs import counted_costs
from tahq.models.model_spec import ModelSpec
from tahq.models.slice import slice_parameters
from tahq.pipeline.gradient_sum import BUCKET, sum_codec
from tahq.plan.cluster_numbers import ClusterNumbers, HostNumbers, LayerTimes
from tahq.quant import CodecSpec
from tahq.units import format_size
from tahq.worker.assembly import resolved_spec
from tahq_launch.plan.first_plan import first_plan
from tahq_launch.plan.measure import write_numbers
from tahq_launch.plan.step_traffic import host_traffic, step_flows
from tahq_launch.start.prepared_run import StartRequest
from tahq_launch.start.resolution import resolve_for_run

RECIPES = Path(__file__).parents[1] / "launch/examples/recipes"
SHAPES = MODELS | {
    "Qwen2.5-7B": ("qwen2", 28, 3584, 28, 4, 18944, 152064),
    "Qwen3-30B-A3B": ("qwen3_moe", 48, 2048, 32, 4, 6144, 151936),
}
OVERRIDES: Mapping[str, Mapping[str, object]] = {
    "Qwen3-30B-A3B": {
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    }
}
ON_CARDS: Mapping[str, tuple[tuple[int, int], ...]] = {
    "full": ((4, 16), (3, 24)),
    "lora": ((4, 8), (3, 12), (4, 24)),
    "packed_chat": ((4, 12), (3, 16), (4, 24)),
    "qlora": ((4, 8), (3, 12)),
    "dpo": ((4, 12), (3, 16)),
    "experts": ((4, 24),),
}
"""Number of cards, and GB of each."""
TFLOPS = {8: ("RTX 4060", 30.2), 12: ("RTX 3060", 25.5), 16: ("RTX 4060 Ti", 44.1), 24: ("RTX 3090", 71.2)}
USED = 0.35
MBITS = (50, 100, 300)
ROUND_TRIP = 0.04
GIB = 2**30


def cards_config(recipe: Path, count: int, mbits: float, folder: Path) -> tuple[Path, ClusterConfig]:
    """The recipe for so many listed hosts, with the model's shape instead of its name."""
    values: dict[str, Any] = yaml.safe_load(recipe.read_text())
    name = values["model"].partition("/")[2].removesuffix("-Instruct")
    shape = dict(zip(KEYS, SHAPES[name], strict=True))
    values["model"] = {**shape, "max_seq_len": 32768, "overrides": OVERRIDES.get(name, {})}
    values["data"] |= {"tokenizer": "bytes"}
    values["hosts"] = [{"address": f"192.0.2.{n}", "ssh": f"host{n}", "device": "cuda"} for n in range(1, count + 1)]
    values["links"] = {"measured": str(folder / "numbers.yaml")}
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(values))
    return path, load_config(path)


def card_numbers(config: ClusterConfig, spec: ModelSpec, gigabytes: int, mbits: float) -> ClusterNumbers:
    """What measurements of these hosts would say, calculated."""
    costs = counted_costs(spec, config.data.seq_len)
    _, tflops = TFLOPS[gigabytes]
    sample_s = config.data.seq_len / (USED * tflops * 1e12 / 2)
    block_s, head_s = sample_s * sum(costs.blocks) / len(costs.blocks), sample_s * costs.head
    rows, forward = config.training.rows_per_sample, config.training.num_forwards
    backward = 2 if spec.adapter is None else 1
    block_s, head_s = rows * block_s, rows * head_s
    compute = [
        LayerTimes(
            micro_batch=size,
            block_forward=size * forward * block_s,
            block_backward=size * backward * block_s,
            last_forward=size * forward * head_s,
            last_backward=size * backward * head_s,
        )
        for size in (1, 2, 4)
    ]
    assert isinstance(config.hosts, list)
    rate, memory = mbits * 1e6, (gigabytes - 1) * GIB
    hosts = [
        HostNumbers(name=host.address, memory=memory, up=rate, down=rate, compute=compute) for host in config.hosts
    ]
    return ClusterNumbers(hosts=hosts, round_trip=ROUND_TRIP)


def planned(recipe: Path, count: int, gigabytes: int, mbits: float) -> dict[str, Any] | None:
    """What is chosen, and what it takes; None: it does not fit."""
    with tempfile.TemporaryDirectory(prefix="tahq-bench-") as name:
        path, given = cards_config(recipe, count, mbits, Path(name))
        unmeasured = resolve_for_run(load_config(path, ["links.measured=null"]))
        spec = resolved_spec(unmeasured, None)
        write_numbers(card_numbers(unmeasured, spec, gigabytes, mbits), Path(name) / "numbers.yaml", is_complete=True)
        try:
            found = first_plan(given, StartRequest(path), measures=False)
        except UserError:
            return None
    assert found is not None, "layers are open"
    config, line = found.config, found.lines[0]
    memory = [stage_estimate(config, spec, stage, device="cuda").total for stage in range(config.pipeline.stages)]
    return {
        "shape": f"{config.pipeline.replicas} × {config.pipeline.stages}",
        "memory": memory,
        "sent": max(sent_nbytes(config, spec)),
        "tokens_per_s": int(re.search(r"planned for ([\d,]+)", line)[1].replace(",", "")),  # type: ignore[index]
        "codecs": " + ".join(CodecSpec.parse(each).brief() for each in config.wire.specs().values())
        if config.pipeline.stages > 1
        else "",
    }


def sent_nbytes(config: ClusterConfig, spec: ModelSpec) -> Iterator[float]:
    """Bytes that the host of each stage sends in a step: over its cuts, and to the other replicas of the stage."""
    flows, replicas = step_flows(config, spec), config.pipeline.replicas
    nbytes = sum_codec(config.wire.all_reduce, config.wire).encoded_nbytes((BUCKET,)) / BUCKET
    for stage, blocks in enumerate(block_ranges(config, spec)):
        shapes = slice_parameters(spec, blocks)
        trained = sum(shape.numel() for name, shape in shapes.items() if spec.is_trained(name))
        yield host_traffic(flows, stage)[0] + 2 * (replicas - 1) / replicas * nbytes * trained


def rows(options: argparse.Namespace) -> Iterator[list[str]]:
    for name in options.recipes or ON_CARDS:
        recipe = RECIPES / f"{name}.yaml"
        for count, gigabytes in ON_CARDS[name]:
            card = f"{count} × {gigabytes} GB"
            for mbits in MBITS:
                found = planned(recipe, count, gigabytes, mbits)
                if found is None:
                    yield [name, card, str(mbits), "does not fit", "", "", "", ""]
                    continue
                memory = " ".join(f"{nbytes / GIB:.1f}" for nbytes in found["memory"])
                yield [
                    *(name, card, str(mbits), found["shape"], memory, format_size(found["sent"])),
                    *(f"{found['tokens_per_s']:,}", found["codecs"]),
                ]


def tables(options: argparse.Namespace) -> Iterator[Table | str]:
    cards = ", ".join(f"{gb} GB: {name}, {rate:g} TFLOP/s" for gb, (name, rate) in TFLOPS.items())
    yield (
        f"Calculated, nothing was run. Cards: {cards} (dense, bf16 with fp32 sums), of which {USED:.0%} are taken "
        f"to be reached. Each host sends and receives at the rate named, with round trips of {1e3 * ROUND_TRIP:g} ms."
    )
    columns = (
        *("recipe", "cards", "Mbit/s", "replicas × stages", "GiB by stage", "sent per step by the busiest host"),
        *("tokens/s", "codecs on the cuts"),
    )
    yield Table(columns, rows(options))


if __name__ == "__main__":
    main(__doc__, tables, {"--recipes": {"nargs": "+", "choices": list(ON_CARDS), "help": "default: all"}})
