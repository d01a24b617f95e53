"""Whole models on one GPU: tokens per second and share of the peak, beside transformers under torch.compile.

    python benchmarks/bench_models.py --size 7b [--output benchmarks/results/models_<hardware>_<yyyymm>.md]
    python benchmarks/bench_models.py --size 0.5b --variants plain tahq-bf16 tahq-launch
    python benchmarks/bench_models.py --small --device cpu      # in seconds: that it works, no figures

Shapes are those of Qwen2.5 with separate embedding and head, weights and tokens random, sequences of 1,024 as in LLMQ's
own benchmarks. Variants, each in a process of its own, `--rounds` times in turn; a figure is of the median step:

- `plain`: transformers' model under torch.compile, fp32 weights, bf16 autocast, torch's fused AdamW, clipping;
- `tahq-bf16`, `tahq-fp8`: the only stage of a run, as a worker builds and runs it, without the coordinator's messages;
- `tahq-launch`: the command itself in bf16 with text as data; measures and writes a checkpoint too, so not by default.

All have the same micro-batch and the same tokens per step. What does not fit into memory is changed as little as
possible, and listed: `plain` recomputes layers; tahq takes the first of `LADDER` that fits under both precisions by its
own estimate, a later one if it ran out of memory. Keys given by `--set` replace the ladder.

Percentages are LLMQ's: per token 6·P FLOPs for P weights in the matrices of blocks, in FP8 or bf16; 6·V·C for the head
and 6·L·S·H·D for attention (S²/2 pairs; a backward is twice a forward), both in bf16. Each is divided by the dense peak
of H100 and H200 SXM, 1,979 or 989 TFLOP/s, and the sum of these times by the time taken. What is computed again does
not count. 7B in fp32 takes 114 GiB without activations: `plain` did not fit on an H200, even with layers recomputed.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import yaml
from harness import Table, launch, main, need_gpu, say
from option_training import only_stage, train_step

from tahq.config.cluster import ClusterConfig
from tahq.config.stage_estimate import stage_estimate, with_memory_choices
from tahq.data.batches import StepBatch
from tahq.memory.offload.host_part import copy_for_products, filled_weight
from tahq.memory.saved_tensors import MicroBatchShape, saved_by_slice
from tahq.models.families import head_dim
from tahq.models.keyed_dropout import RandomContext
from tahq.models.model_spec import ModelSpec
from tahq.models.partition import BlockRange
from tahq.worker.assembly import chunk_module, resolved_spec, use_repeatable_kernels

PEAK = {"bf16": 989.4e12, "fp8": 1978.9e12}
ROOM = 0.93  # Of a card's memory; the rest is for the context, libraries and fragments
WARM_STEPS = 2


@dataclass(frozen=True, slots=True)
class Size:
    """Of a model, and the samples of a micro-batch."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    micro_batch: int
    vocab: int = 151_936


SIZES = {
    "0.5b": Size(896, 4864, 24, 14, 2, 32),
    "1.5b": Size(1536, 8960, 28, 12, 2, 16),
    "3b": Size(2048, 11008, 36, 16, 2, 8),
    "7b": Size(3584, 18944, 28, 28, 4, 8, vocab=152_064),
    "14b": Size(5120, 13824, 48, 40, 8, 8, vocab=152_064),
    "32b-stage": Size(5120, 27648, 16, 40, 8, 4, vocab=152_064),  # a quarter of its blocks, with both ends
    "small": Size(64, 192, 2, 4, 2, 2, vocab=320),
}
ADAMW_BF16 = {"training.optimizer": "adamw_bf16"}
LADDER: list[dict[str, Any]] = [
    {},
    {"memory.recompute": "norm"},
    ADAMW_BF16,
    {**ADAMW_BF16, "memory.recompute": "norm"},
    {**ADAMW_BF16, "memory.recompute": "block"},
    {"training.optimizer": "adamw8bit", "memory.recompute": "block", "memory.gradients": "fp8"},
]
"""Keys that are changed for memory, from the default to what changes most."""
VARIANTS = ("plain", "tahq-bf16", "tahq-fp8", "tahq-launch")


@dataclass(frozen=True, slots=True)
class Work:
    """What a process measures; `changes`: keys of cluster.yaml, None: of the ladder."""

    variant: str
    size: str
    device: str
    seq_len: int
    micro_batch: int
    micro_batches: int
    steps: int
    changes: dict[str, Any] | None
    profile: bool

    @property
    def tokens(self) -> int:
        """Per step."""
        return self.micro_batch * self.micro_batches * self.seq_len

    def sections(self, changes: dict[str, Any], **training: Any) -> dict[str, dict[str, Any]]:
        """A cluster.yaml of one stage, of which all that is not listed here has its default."""
        size, global_batch = SIZES[self.size], self.micro_batch * self.micro_batches
        sections: dict[str, dict[str, Any]] = {
            "run": {"name": "bench", "device": self.device},
            "model": {
                "family": "qwen2", "num_layers": size.layers, "hidden_size": size.hidden, "num_heads": size.heads,
                "num_kv_heads": size.kv_heads, "intermediate_size": size.inner, "vocab_size": size.vocab,
            },
            "data": {"text": "stdlib", "seq_len": self.seq_len},
            "training": {
                "steps": WARM_STEPS + self.steps, "global_batch": global_batch, "micro_batch": self.micro_batch,
                "lr": 1e-5, **training,
            },
            "pipeline": {"stages": 1},
            "memory": {},
        }  # fmt: skip
        for key, value in changes.items():
            section, _, name = key.partition(".")
            sections.setdefault(section, {})[name] = value
        return sections

    def config(self, changes: dict[str, Any], precision: str) -> ClusterConfig:
        """That configuration, with what is open under `memory` chosen as at a run's start."""
        config = ClusterConfig.model_validate(self.sections(changes, precision=precision))
        return with_memory_choices(config, resolved_spec(config, None))


def peak_share(spec: ModelSpec, seq_len: int, tokens: int, precision: str, step_s: float) -> float:
    """Of the time that the peak allows for so many tokens, by LLMQ's count."""
    blocks = 6 * spec.num_layers * spec.layout.block_weights(spec.hf_config)
    width = int(spec.hf_config.num_attention_heads) * head_dim(spec.hf_config)
    others = 6 * spec.vocab_size * spec.hidden_size + 6 * spec.num_layers * seq_len * width
    return tokens * (blocks / PEAK[precision] + others / PEAK["bf16"]) / step_s


class RandomBatches:
    """A source of batches whose tokens are random; `num_tokens`: different ones, by default the vocabulary's."""

    def __init__(self, work: Work, num_tokens: int | None = None) -> None:
        self._work, self._num_tokens = work, num_tokens or SIZES[work.size].vocab

    def train(self, step: int) -> StepBatch:
        """The batch of a step."""
        work = self._work
        count, generator = work.micro_batch * work.micro_batches, torch.Generator().manual_seed(step)
        tokens = torch.randint(self._num_tokens, (count, work.seq_len + 1), generator=generator)
        ids = torch.arange(count)
        labels = tokens[:, 1:].contiguous()
        return StepBatch(tokens[:, :-1].contiguous(), labels, ids, labels.numel(), "", work.micro_batch)


# -- variants, in a process of their own -----------------------------------------------------------

Step = Callable[[int], float]


def tahq_step(work: Work, config: ClusterConfig, device: torch.device) -> Step:
    """A step of the only stage, and the decision about it; returns the mean loss."""
    spec = resolved_spec(config, None)
    module = chunk_module(config, spec, 0, device=device, random=RandomContext(0), weights=False)
    with torch.no_grad():
        for parameter in module.parameters():
            drawn = torch.empty(parameter.shape, device=device)
            filled_weight(parameter).copy_(drawn.fill_(1.0) if parameter.ndim == 1 else drawn.normal_(0.0, 0.02))
    copy_for_products(module.parameters())
    return partial(train_step, only_stage(config, module, RandomBatches(work), device))  # type: ignore[arg-type]


def plain_step(work: Work, device: torch.device, *, recomputes: bool) -> Step:
    """The step of a textbook loop."""
    spec = resolved_spec(work.config({}, "bf16"), None)
    spec.hf_config._attn_implementation = "sdpa"
    with device:
        model = getattr(spec.layout.modeling(), spec.layout.causal_lm)(spec.hf_config).train()
    if recomputes:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    compiled = torch.compile(model, backend="inductor" if device.type == "cuda" else "aot_eager")
    # no mask at all, as without compiling: attention masks by itself, and groups heads
    options = {"use_cache": False, "attention_mask": {"full_attention": None}}

    def loss_of(tokens: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = compiled(input_ids=tokens, labels=tokens, **options).loss
        return loss

    return partial(loop_step, work, RandomBatches(work), device, loss_of, optimizer)


def loop_step(
    work: Work,
    batches: RandomBatches,
    device: torch.device,
    loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    number: int,
) -> float:
    """A step of a textbook loop under autocast; the mean of `loss_of` tokens and labels."""
    batch, total = batches.train(number), torch.zeros((), device=device)
    for index in range(work.micro_batches):
        tokens, labels = (each.to(device, non_blocking=True) for each in batch.micro_batch(index))
        with torch.autocast(device.type, torch.bfloat16):
            loss = loss_of(tokens, labels) / work.micro_batches
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(total)


def timed(step: Step, work: Work, device: torch.device) -> dict[str, Any]:
    """Seconds of the steps, the first ones included, losses, and the allocator's peak."""
    is_cuda, step_s, losses = device.type == "cuda", list[float](), list[float]()
    for number in range(WARM_STEPS + work.steps):
        begin_s = time.perf_counter()
        losses.append(step(number))
        if is_cuda:
            torch.cuda.synchronize()
        step_s.append(time.perf_counter() - begin_s)
        say(f"{work.variant}: step {number + 1} took {step_s[-1]:.3f} s, loss {losses[-1]:.3f}")
    if work.profile and is_cuda:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step(len(step_s))
        say(profile.key_averages().table(sort_by="self_cuda_time_total", row_limit=40, max_name_column_width=90))
    peak_gib = torch.cuda.max_memory_allocated() / 2**30 if is_cuda else 0.0
    return {"step_s": step_s, "losses": losses, "peak_gib": peak_gib}


def attempts(work: Work, device: torch.device) -> Iterator[tuple[str, Callable[[], Step]]]:
    """What to try, in order: what it changes, and what builds it."""
    is_cuda = device.type == "cuda"
    if is_cuda and work.variant != "plain":
        use_repeatable_kernels(device)
    room = ROOM * torch.cuda.get_device_properties(device).total_memory if is_cuda else float("inf")
    if work.variant == "plain":
        for recomputes in (False, True):
            if recomputes or plain_nbytes(work) < room:
                yield (
                    "layers recomputed" if recomputes else "",
                    partial(plain_step, work, device, recomputes=recomputes),
                )
        return
    ladder = LADDER if work.changes is None else [work.changes]
    for number, changes in enumerate(ladder, start=1):
        configs = {name: work.config(changes, name) for name in ("bf16", "fp8")}
        spec = resolved_spec(configs["bf16"], None)
        most = max(stage_estimate(config, spec, 0, device=device.type).total for config in configs.values())
        if most < room or number == len(ladder):
            config = configs[work.variant.removeprefix("tahq-")]
            label = ", ".join(f"{key.partition('.')[2]} {value}" for key, value in changes.items())
            yield label, partial(tahq_step, work, config, device)


def plain_nbytes(work: Work) -> int:
    """About what the plain loop takes: 16 bytes per weight, activations as tahq's kernels keep them, and logits."""
    spec = resolved_spec(work.config({}, "bf16"), None)
    weights = spec.num_layers * spec.layout.block_weights(spec.hf_config) + 2 * spec.vocab_size * spec.hidden_size
    shape = MicroBatchShape(work.micro_batch, work.seq_len, bf16=True, on_cuda=True)
    activations = saved_by_slice(spec, BlockRange(0, spec.num_layers, spec.num_layers), shape)
    return 16 * weights + activations + 8 * shape.num_tokens * spec.vocab_size


def measure(work: Work) -> dict[str, Any]:
    """A variant's result, or the error that every attempt ended with."""
    if work.variant == "tahq-launch":
        run = launch(work.sections(work.changes or {}))
        return {"step_s": run.step_times_s(), "losses": [], "peak_gib": 0.0, "settings": "all defaults"}
    device = torch.device(work.device)
    error = ""
    for settings, build in attempts(work, device):
        try:
            return timed(build(), work, device) | {"settings": settings}
        except torch.OutOfMemoryError as raised:
            error = f"out of memory ({settings or 'all in memory'})"
            say(f"{work.variant}: {error}: {str(raised)[:200]}")
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch._dynamo.reset()
    return {"error": error}


# -- the table -------------------------------------------------------------------------------------


def in_a_process(work: Work, script: str = __file__) -> dict[str, Any]:
    """The same in a process of its own, which reports on stderr; `script`: what is called with `--measure`."""
    command = [sys.executable, script, "--measure", json.dumps(asdict(work))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        return {"error": f"ended with status {done.returncode}"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def row(work: Work, rounds: list[dict[str, Any]], plain_rate: float | None) -> tuple[list[str], float | None]:
    """Cells, and tokens per second."""
    done = [each for each in rounds if "error" not in each]
    if not done:
        return [work.variant, rounds[-1]["error"], *[""] * 6], None
    step_s = statistics.median(second for each in done for second in each["step_s"][WARM_STEPS:])
    rate, precision = work.tokens / step_s, "fp8" if work.variant == "tahq-fp8" else "bf16"
    share = peak_share(resolved_spec(work.config({}, "bf16"), None), work.seq_len, work.tokens, precision, step_s)
    return [
        work.variant, done[-1]["settings"], f"{step_s:.3f}", f"{rate:,.0f}",
        f"{100 * share:.1f} %", "" if plain_rate is None else f"{rate / plain_rate:.3f}",
        f"{max(each['peak_gib'] for each in done):.1f}", f"{done[0]['step_s'][0]:.1f}",
    ], rate  # fmt: skip


def tables(options: argparse.Namespace) -> Iterator[Table | str]:
    need_gpu(options.device)
    name = "small" if options.small else options.size
    changes = dict(each.split("=", 1) for each in options.set)
    works = [
        Work(
            variant,
            name,
            options.device,
            32 if options.small else options.seq_len,
            options.micro_batch or SIZES[name].micro_batch,
            2 if options.small else options.micro_batches,
            2 if options.small else options.steps,
            {key: yaml.safe_load(value) for key, value in changes.items()} or None,
            options.profile,
        )
        for variant in options.variants
    ]
    found: dict[str, list[dict[str, Any]]] = {work.variant: [] for work in works}
    for _ in range(options.rounds):
        for work in works:
            found[work.variant].append(in_a_process(work))
    rows, rates = [], dict[str, float]()
    for work in works:
        cells, rate = row(work, found[work.variant], rates.get("plain"))
        rows.append(cells)
        rates |= {} if rate is None else {work.variant: rate}
    size, work = SIZES[name], works[0]
    caption = (
        f"Hidden {size.hidden}, inner {size.inner}, {size.layers} layers, {size.heads} heads, {size.kv_heads} of keys "
        f"and values, vocabulary {size.vocab:,}; {work.tokens:,} tokens per step in {work.micro_batches} micro-batches "
        f"of {work.micro_batch} · {work.seq_len:,}. Medians of {options.rounds} · {work.steps} steps."
    )
    columns = ("", "for memory", "step, s", "tokens/s", "of the peak", "against plain", "peak GiB", "first step, s")
    yield Table(columns, rows, caption, f"Qwen2.5 {name}")
    if {"tahq-bf16", "tahq-fp8"} <= rates.keys():
        yield f"FP8 against bf16: {rates['tahq-fp8'] / rates['tahq-bf16']:.3f}."


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(Work(**json.loads(sys.argv[2])))))
    else:
        main(
            __doc__,
            tables,
            {
                "--size": {"choices": [name for name in SIZES if name != "small"], "default": "7b"},
                "--variants": {"nargs": "+", "choices": VARIANTS, "default": VARIANTS[:3]},
                "--device": {"default": "cuda"},
                "--small": {"action": "store_true", "help": "a tiny model"},
                "--seq-len": {"type": int, "default": 1024},
                "--micro-batch": {"type": int, "help": "samples; default: by size"},
                "--micro-batches": {"type": int, "default": 4, "help": "per step (default 4)"},
                "--steps": {"type": int, "default": 6, "help": "measured per round (default 6)"},
                "--rounds": {"type": int, "default": 1, "help": "how often each variant is started (default 1)"},
                "--set": {
                    "nargs": "+",
                    "default": [],
                    "metavar": "KEY=VALUE",
                    "help": "of tahq, such as memory.loss_chunks=2",
                },
                "--profile": {"action": "store_true", "help": "also report the kernels of one step on stderr"},
            },
        )
