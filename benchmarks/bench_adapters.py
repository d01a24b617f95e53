"""LoRA and QLoRA beside peft, over transformers and bitsandbytes: losses, memory and time of a whole model

    python benchmarks/bench_adapters.py --size 1.5b [--output benchmarks/results/adapters_<hardware>_<yyyymm>.md]
    python benchmarks/bench_adapters.py --small --device cpu      # in seconds: that it works, no figures

A model of Qwen2.5's shape with random weights in a bf16 folder, which every row loads: `tahq-…` as the only stage of a
run, as a worker builds and computes it; `peft-…` as transformers' model with peft's adapters on all linear layers, for
`qlora` over bitsandbytes' Linear4bit (NF4, double quantisation), in a plain loop with autocast, fused AdamW and
clipping. Adapters begin alike, and all see the same tokens, of which 64 different ones occur, so that losses fall.

*Recompute*: `block` is `memory.recompute`, and transformers' gradient checkpointing. *Apart*: the largest difference
from peft's loss of the same step, with the same weights and recompute, nats per token; with `--precision fp32` rounding
alone makes it. *Peak*: most that torch's allocator had allocated in training. *Estimated* is the dry run's figure.
Where peft or bitsandbytes is missing, the row says so. Each row is a process of its own.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from bench_models import SIZES, WARM_STEPS, RandomBatches, Step, Work, in_a_process, loop_step, timed
from harness import Table, main, need_gpu
from option_training import only_stage, train_step
from torch.nn import functional
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from tahq.config.cluster import ClusterConfig
from tahq.config.stage_estimate import stage_estimate, with_memory_choices
from tahq.models.adapters.lora import initial_values
from tahq.models.keyed_dropout import RandomContext
from tahq.worker.assembly import chunk_module, resolved_spec, use_repeatable_kernels

VARIANTS = ("peft-lora", "tahq-lora", "peft-qlora", "tahq-qlora")
NUM_TOKENS = 64
LR, RANK = 1e-3, 16
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Training(Work):
    """What a process measures, beside the fields of `Work`."""

    folder: str = ""
    recompute: str = "none"
    precision: str = "bf16"

    def adapted(self) -> ClusterConfig:
        """A cluster.yaml of one stage with the folder's model and adapters."""
        sections = self.sections({"memory.recompute": self.recompute}, precision=self.precision, lr=LR)
        sections |= {"model": {"path": self.folder}, "adapter": {"kind": self.variant[5:], "rank": RANK}}
        sections["data"]["tokenizer"] = "bytes"
        config = ClusterConfig.model_validate(sections)
        return with_memory_choices(config, resolved_spec(config, None))


def tahq_step(work: Training, device: torch.device) -> Step:
    """A step of the only stage, and the decision about it; returns the mean loss."""
    config = work.adapted()
    module = chunk_module(config, resolved_spec(config, None), 0, device=device, random=RandomContext(0))
    return partial(train_step, only_stage(config, module, RandomBatches(work, NUM_TOKENS), device))  # type: ignore[arg-type]


def peft_step(work: Training, device: torch.device) -> Step:
    """The step of a plain loop over peft's model."""
    import peft

    config, keys = work.adapted(), dict[str, Any]()
    dtype = torch.float32 if work.precision == "fp32" else torch.bfloat16
    if work.variant[5:] == "qlora":
        names = ("load_in_4bit", "bnb_4bit_use_double_quant")
        types = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": dtype}
        keys["quantization_config"] = BitsAndBytesConfig(**dict.fromkeys(names, True), **types)
    base = AutoModelForCausalLM.from_pretrained(
        work.folder, dtype=dtype, attn_implementation="sdpa", device_map={"": device}, **keys
    )
    lora = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    model: Any = peft.get_peft_model(base, lora).train()
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    with torch.no_grad():
        for name, parameter in trained.items():
            name = name.removeprefix("base_model.model.").replace(".default", "")
            parameter.copy_(initial_values(name, parameter.shape, config.run.seed))
    if work.recompute == "block":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    training = config.training
    optimizer = torch.optim.AdamW(
        trained.values(), LR, training.betas, training.epsilon, training.weight_decay, fused=device.type == "cuda"
    )

    def loss_of(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype != torch.float32):
            logits = model(input_ids=tokens, use_cache=False).logits
        return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

    return partial(loop_step, work, RandomBatches(work, NUM_TOKENS), device, loss_of, optimizer)


def measure(work: Training) -> dict[str, Any]:
    """A row's figures, or why there are none."""
    device, is_tahq = torch.device(work.device), work.variant.startswith("tahq")
    needed = () if is_tahq else ("peft", "bitsandbytes") if work.variant[5:] == "qlora" else ("peft",)
    if missing := [name for name in needed if find_spec(name) is None]:
        return {"error": f"{', '.join(missing)} is not installed"}
    if is_tahq and device.type == "cuda":
        use_repeatable_kernels(device)
    step = (tahq_step if is_tahq else peft_step)(work, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    return timed(step, work, device)


def row(work: Training, found: dict[str, Any], other: dict[str, Any]) -> list[object]:
    """Cells; `other`: what peft's row found."""
    if "error" in found:
        return [work.variant, work.recompute, found["error"], *[""] * 6]
    step_s, losses = statistics.median(found["step_s"][WARM_STEPS:]), found["losses"]
    estimate, apart = "", ""
    if work.variant.startswith("tahq"):
        config = work.adapted()
        nbytes = stage_estimate(config, resolved_spec(config, None), 0, device=torch.device(work.device).type).total
        estimate = f"{nbytes / GIB:.2f}"
        if "losses" in other:
            apart = f"{max(abs(a - b) for a, b in zip(losses, other['losses'], strict=True)):.1e}"
    return [
        *(work.variant, work.recompute, f"{step_s:.3f}", f"{work.tokens / step_s:,.0f}", f"{found['peak_gib']:.2f}"),
        *(estimate, f"{losses[0]:.4f}", f"{losses[-1]:.4f}", apart),
    ]


def save_model(work: Work, folder: str, device: torch.device) -> None:
    """A model with random weights, drawn on the device."""
    spec = resolved_spec(work.config({}, "bf16"), None)
    torch.manual_seed(0)
    with device:
        model = getattr(spec.layout.modeling(), spec.layout.causal_lm)(spec.hf_config)
    model.bfloat16().save_pretrained(folder)
    del model
    torch.cuda.empty_cache()


def rows(options: argparse.Namespace, folder: str) -> Iterator[list[object]]:
    """Each kind and level beside peft's."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for level in options.recompute:
        for variant in options.variants:
            work = Training(
                *(variant, options.size, options.device, options.seq_len, options.micro_batch, options.micro_batches),
                *(options.steps, None, False, folder, level, options.precision),
            )
            found[variant, level] = in_a_process(work, __file__)
            yield row(work, found[variant, level], found.get((variant.replace("tahq", "peft"), level), {}))


def tables(options: argparse.Namespace) -> Iterator[Table | str]:
    need_gpu(options.device)
    if options.small:
        options.size, options.seq_len, options.micro_batch, options.micro_batches = "small", 32, 2, 2
    work = Work("", options.size, options.device, options.seq_len, 1, 1, 1, None, profile=False)
    with tempfile.TemporaryDirectory(prefix="tahq-bench-") as name:
        folder = str(Path(name) / "model")
        save_model(work, folder, torch.device(options.device))
        columns = ("", "recompute", "step, s", "tokens/s", "peak, GiB", "estimated, GiB", "first loss", "last loss")
        caption = (
            f"Rank {RANK} on all linear layers, {options.precision}; {options.micro_batches} micro-batches of "
            f"{options.micro_batch} · {options.seq_len:,} tokens; {WARM_STEPS + options.steps} steps."
        )
        yield Table((*columns, "apart"), rows(options, folder), caption, f"Qwen2.5 {options.size}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(Training(**json.loads(sys.argv[2])))))
    else:
        main(
            __doc__,
            tables,
            {
                "--size": {"choices": [name for name in SIZES if name != "small"], "default": "1.5b"},
                "--variants": {"nargs": "+", "choices": VARIANTS, "default": VARIANTS},
                "--recompute": {"nargs": "+", "choices": ("none", "block"), "default": ("none", "block")},
                "--precision": {"choices": ("bf16", "fp32"), "default": "bf16"},
                "--device": {"default": "cuda"},
                "--small": {"action": "store_true", "help": "a tiny model"},
                "--seq-len": {"type": int, "default": 1024},
                "--micro-batch": {"type": int, "default": 4, "help": "samples (default 4)"},
                "--micro-batches": {"type": int, "default": 2, "help": "per step (default 2)"},
                "--steps": {"type": int, "default": 10, "help": "behind the first two (default 10)"},
            },
        )
