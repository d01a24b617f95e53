"""Codec time in a stage's step: 12 blocks of GPT2-XL, micro-batches of 2 × 1,024 tokens, from the trace.

    python benchmarks/bench_stage_codec.py [--output benchmarks/results/stage_codec_<hardware>_<yyyymm>.md]

A middle stage's whole work on one micro-batch: decode the activation, forward, encode the activation, decode the
gradient, backward, encode the gradient; bf16 autocast, random weights. torch.profiler's trace says which kernels ran
in which part; a part's device time is theirs. Kernels outside every other part belong to the backward, since autograd
launches them from a thread of its own. Needs a CUDA device.
"""

import argparse
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator

import torch
from harness import Table, main, milliseconds, need_gpu
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from tahq.memory.stored_slice import build_slice
from tahq.models.config import ModelConfig
from tahq.models.keyed_dropout import RandomContext
from tahq.models.model_spec import load_spec
from tahq.models.slice import ModelSlice, Parts
from tahq.quant import get_codec
from tahq.quant.codec import Codec

SHAPE = (2, 1024, 1600)
WIRES = {"paper": ("tah", "fixed:bits=8"), "ours": ("wf", "eden"), "tah both ways": ("tah", "tah")}
PARTS = ("decode activation", "forward", "encode activation", "decode gradient", "backward", "encode gradient")


def build_stage(device: torch.device) -> ModelSlice:
    """Blocks 12 to 23 of GPT2-XL, with random weights."""
    config = ModelConfig(family="gpt2", num_layers=48, hidden_size=1600, num_heads=25)
    spec = load_spec(config, vocab_size=50257, seq_len=SHAPE[1])
    return build_slice(spec, Parts(range(12, 24)), seed=0, device=device, random=RandomContext(0))


class Step:
    """One micro-batch of a stage, with codecs or without."""

    def __init__(self, stage: ModelSlice, activations: Codec, gradients: Codec, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)
        self._stage, self._activations, self._gradients = stage, activations, gradients
        self._x = torch.randn(SHAPE, generator=generator, device=device)
        self._gradient = torch.randn(SHAPE, generator=generator, device=device) * 1e-6
        self._packed_x = activations.encode(self._x, key=1)
        self._packed_gradient = gradients.encode(self._gradient, key=2)

    def with_codecs(self) -> None:
        """All six parts, each under its name in the trace."""
        x = self._part("decode activation", lambda: self._activations.decode(self._packed_x, SHAPE, key=1))
        x.requires_grad_()
        y = self._part("forward", lambda: self._forward(x))
        self._part("encode activation", lambda: self._activations.encode(y, key=3))
        gradient = self._part("decode gradient", lambda: self._gradients.decode(self._packed_gradient, SHAPE, key=2))
        self._part("backward", lambda: y.backward(gradient))
        self._part("encode gradient", lambda: self._gradients.encode(x.grad, key=4))

    def bare(self) -> None:
        """Forward and backward alone."""
        x = self._x.detach().requires_grad_()
        self._forward(x).backward(self._gradient)

    def _forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return self._stage(x).float()

    @staticmethod
    def _part(name: str, work: Callable[[], torch.Tensor]) -> torch.Tensor:
        with record_function(name):
            return work()


def device_ms(step: Step, repeats: int) -> dict[str, float]:
    """Device milliseconds by part: kernels and copies by the part in whose range on the device they lie."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(repeats):
            step.with_codecs()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    ranges = sorted((e.time_range.start, e.time_range.end, e.name) for e in events if e.name in PARTS)
    total: dict[str, float] = defaultdict(float)
    for kernel in (e for e in events if e.name not in PARTS):
        middle = (kernel.time_range.start + kernel.time_range.end) / 2
        inside = [name for start, end, name in ranges if start <= middle <= end]
        total[inside[0] if inside else "backward"] += kernel.time_range.elapsed_us() / 1e3 / repeats
    return {part: total[part] for part in PARTS}


def rows(options: argparse.Namespace) -> Iterator[list[str]]:
    device = torch.device("cuda")
    stage = build_stage(device)
    for name, (activations, gradients) in WIRES.items():
        step = Step(stage, get_codec(activations), get_codec(gradients), device)
        for _ in range(5):
            step.with_codecs()
            step.bare()
        wall_ms, bare_ms = (
            statistics.median(milliseconds(work, device) for _ in range(options.repeats))
            for work in (step.with_codecs, step.bare)
        )
        parts = device_ms(step, options.repeats)
        codecs = sum(ms for part, ms in parts.items() if "code" in part)
        yield [
            f"{name}: `{activations}`, `{gradients}`",
            *(f"{ms:.3f}" for ms in parts.values()),
            f"{codecs:.3f}",
            f"{codecs / sum(parts.values()):.2%}",
            f"{wall_ms:.2f}",
            f"{bare_ms:.2f}",
        ]


def tables(options: argparse.Namespace) -> Iterator[Table]:
    need_gpu()
    columns = ("wire", *PARTS, "codecs", "share", "clock", "clock without codecs")
    caption = (
        f"12 blocks of GPT2-XL, micro-batch {SHAPE[0]} × {SHAPE[1]}, bf16 autocast; device milliseconds per "
        f"micro-batch from a trace of {options.repeats}, and median times from one idle device to the next."
    )
    yield Table(columns, rows(options), caption)


if __name__ == "__main__":
    main(__doc__, tables, repeats=20)
