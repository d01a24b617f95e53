"""One stage on several GPUs: tokens per second with gradients, states and weights divided, beside torch's FSDP2.

    python benchmarks/bench_several_gpus.py --size 1b [--output benchmarks/results/several_gpus_<hardware>_<yyyymm>.md]
    python benchmarks/bench_several_gpus.py --size small --device cpu    # over gloo: that it works, no figures

Replicas of the only stage, started by `tahq-launch` over NCCL with `memory.shard`, each on a GPU; on one GPU without.
FSDP2 (`torch.distributed.fsdp.fully_shard`) shards transformers' model block by block, compiled, with bf16 products,
fp32 sums of gradients, and torch's fused AdamW; `resharded` drops a block's weights after its forward, like
`weights`. All have the same tokens per step in the same micro-batches, clip the norm, and keep fp32 weights. A figure
is the median of `--steps` steps after two; tahq reads text, FSDP2 random tokens. *Scaling* is against the same runtime
on one GPU, divided by the number of GPUs.

`--kill` ends a replica's process within a step and reports how long that step takes: NCCL and gloo keep no frames, so
all replicas go back to the last checkpoint, here the start.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from bench_models import SIZES, WARM_STEPS, RandomBatches, Size, Work, peak_share
from harness import Table, launch, main, need_gpu, say
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tahq.worker.assembly import resolved_spec

SHAPES = {"1b": Size(2048, 8192, 16, 16, 8, 8, vocab=50_304), "7b": SIZES["7b"], "small": SIZES["small"]}
SHARDS: dict[str, tuple[str, ...]] = {
    "replicas": (),
    "optimizer": ("optimizer",),
    "optimizer, gradients": ("optimizer", "gradients"),
    "optimizer, gradients, weights": ("optimizer", "gradients", "weights"),
}
KILLED_STEP = 4  # counted from 0, as faults are


@dataclass(frozen=True, slots=True)
class Case(Work):
    """One replica's part of a step; `reshards`: whether FSDP2 drops a block's weights after its forward."""

    reshards: bool = False


Found = tuple[list[float], float]
"""Seconds of the steps that count, and the most that torch had reserved on a GPU, in GiB."""


# -- FSDP2, in a process per GPU -------------------------------------------------------------------


def fsdp_steps(case: Case) -> dict[str, Any]:
    """Seconds of every step, the same on all ranks but for noise, and what torch has reserved here."""
    is_cuda = case.device == "cuda"
    dist.init_process_group("nccl" if is_cuda else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", rank) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(device)
    spec = resolved_spec(case.config({}, "bf16"), None)
    spec.hf_config._attn_implementation = "sdpa"
    with device:
        model = getattr(spec.layout.modeling(), spec.layout.causal_lm)(spec.hf_config).train()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.model.layers:
        block.compile(backend="inductor" if is_cuda else "aot_eager")
        fully_shard(block, mp_policy=policy, reshard_after_forward=case.reshards)
    fully_shard(model, mp_policy=policy, reshard_after_forward=case.reshards)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1, fused=is_cuda)
    batches, step_s = RandomBatches(case), list[float]()
    options = {"use_cache": False, "attention_mask": {"full_attention": None}}
    for number in range(WARM_STEPS + case.steps):
        begin_s = time.perf_counter()
        batch = batches.train(number * dist.get_world_size() + rank)
        for index in range(case.micro_batches):
            model.set_requires_gradient_sync(index == case.micro_batches - 1)
            tokens = batch.micro_batch(index)[0].to(device, non_blocking=True)
            loss = model(input_ids=tokens, labels=tokens, **options).loss / case.micro_batches
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if is_cuda:
            torch.cuda.synchronize()
        step_s.append(time.perf_counter() - begin_s)
    peak_gib = torch.cuda.max_memory_reserved() / 2**30 if is_cuda else 0.0
    dist.destroy_process_group()
    return {"step_s": step_s, "peak_gib": peak_gib}


def fsdp(case: Case, num_gpus: int) -> Found | str:
    """What FSDP2 takes, or why it took nothing."""
    program = [__file__, "--fsdp", json.dumps(asdict(case))]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_gpus}", *program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        say(done.stderr[-3000:])
        return "out of memory" if "OutOfMemoryError" in done.stderr else f"ended with status {done.returncode}"
    ranks = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return ranks[0]["step_s"][WARM_STEPS:], max(rank["peak_gib"] for rank in ranks)


# -- tahq ------------------------------------------------------------------------------------------


def sections(case: Case, num_gpus: int, shard: tuple[str, ...]) -> dict[str, Any]:
    """The cluster.yaml of a run; its batch is that of all replicas."""
    found = case.sections({}, precision="bf16")
    found["training"]["global_batch"] *= num_gpus
    found["pipeline"] = {"stages": 1, "replicas": num_gpus}
    if num_gpus > 1:
        found["run"]["device"] = "auto"  # the GPUs in turn
        inside = "nccl" if case.device == "cuda" else "gloo"
        found |= {"hosts": "local", "links": {"inside": inside}, "wire": {"all_reduce": "raw:dtype=fp32"}}
    found["memory"] = {"shard": list(shard)} if shard else {}
    found["run"]["checkpoint_every"] = "never"
    return found


def tahq(case: Case, num_gpus: int, shard: tuple[str, ...]) -> Found | str:
    """What `tahq-launch` takes, or why it took nothing."""
    try:
        run = launch(sections(case, num_gpus, shard), stop_after=WARM_STEPS + case.steps)
    except SystemExit as error:
        say(str(error))
        return "failed"
    peak_nbytes = max(stage["peak_bytes"] or 0 for step in run.steps for stage in step["stages"])
    return run.step_times_s(WARM_STEPS), peak_nbytes / 2**30


def recovery(case: Case, num_gpus: int) -> str:
    """How long the step takes in which the last replica's process is killed, beside the median step."""
    fault = f"kill@backward:stage={num_gpus - 1}:step={KILLED_STEP}"
    with tempfile.TemporaryDirectory() as folder:
        once = {"TAHQ_FAULTS": fault, "TAHQ_FAULTS_FOLDER": folder}
        run = launch(sections(case, num_gpus, SHARDS["optimizer"]), once, stop_after=WARM_STEPS + case.steps)
    took_s, usual_s = run.steps[KILLED_STEP]["step_time_s"], statistics.median(run.step_times_s(WARM_STEPS))
    return f"Replica killed in step {KILLED_STEP + 1}: that step took {took_s:.1f} s, the median one {usual_s:.2f} s."


# -- the table -------------------------------------------------------------------------------------


def cells(case: Case, name: str, num_gpus: int, found: Found | str, alone_s: float | None) -> list[str]:
    """A row; `alone_s`: a step of the same runtime on one GPU."""
    if isinstance(found, str):
        return [name, str(num_gpus), found, *[""] * 4]
    step_s = statistics.median(found[0])
    share = peak_share(resolved_spec(case.config({}, "bf16"), None), case.seq_len, case.tokens, "bf16", step_s)
    scaling = "" if alone_s is None else f"{alone_s / step_s:.3f}"
    rate = f"{num_gpus * case.tokens / step_s:,.0f}"
    return [name, str(num_gpus), f"{step_s:.3f}", rate, f"{100 * share:.1f} %", scaling, f"{found[1]:.1f}"]


def rows(case: Case, counts: list[int], shards: list[str]) -> Iterator[list[str]]:
    alone_s: dict[str, float] = {}
    for count in counts:
        names = shards if count > 1 else ["alone"]
        measured: list[tuple[str, Callable[[], Found | str]]] = [
            (f"tahq, {name}", partial(tahq, case, count, SHARDS.get(name, ()))) for name in names
        ]
        measured.append(("FSDP2", partial(fsdp, case, count)))
        if count > 1:
            measured.append(("FSDP2, resharded", partial(fsdp, replace(case, reshards=True), count)))
        for name, measure in measured:
            found, runtime = measure(), name.partition(",")[0]
            yield cells(case, name, count, found, alone_s.get(runtime))
            if count == 1 and not isinstance(found, str):
                alone_s[runtime] = statistics.median(found[0])


def tables(options: argparse.Namespace) -> Iterator[Table | str]:
    need_gpu(options.device)
    SIZES[options.size] = SHAPES[options.size]
    size, is_small = SHAPES[options.size], options.size == "small"
    case = Case(
        *("plain", options.size, options.device, 32 if is_small else 1024, options.micro_batch or size.micro_batch),
        *(options.micro_batches, options.steps, None, False),
    )
    caption = (
        f"Hidden {size.hidden}, {size.layers} layers, vocabulary {size.vocab:,}; each GPU {case.micro_batches} "
        f"micro-batches of {case.micro_batch} · {case.seq_len:,} tokens per step. Medians of {case.steps} steps."
    )
    columns = ("", "GPUs", "step, s", "tokens/s", "of the peak", "scaling", "reserved, GiB")
    if options.gpus:
        yield Table(columns, rows(case, options.gpus, options.shards), caption, f"{options.size}")
    if options.kill:
        yield recovery(case, max(options.gpus, default=2))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--fsdp"]:
        given = Case(**json.loads(sys.argv[2]))
        SIZES[given.size] = SHAPES[given.size]
        sys.stdout.write(f"{json.dumps(fsdp_steps(given))}\n")  # a whole line at once
    else:
        main(
            __doc__,
            tables,
            {
                "--size": {"choices": list(SHAPES), "default": "1b"},
                "--gpus": {"type": int, "nargs": "*", "default": [1, 2], "help": "numbers of GPUs (default 1 2)"},
                "--shards": {"nargs": "+", "choices": list(SHARDS), "default": list(SHARDS), "help": "rows of tahq"},
                "--device": {"default": "cuda"},
                "--micro-batch": {"type": int, "help": "samples; default: by size"},
                "--micro-batches": {"type": int, "default": 4, "help": "of each GPU in a step (default 4)"},
                "--steps": {"type": int, "default": 6, "help": "measured (default 6)"},
                "--kill": {"action": "store_true", "help": "also kill a replica, and report how long its step takes"},
            },
        )
