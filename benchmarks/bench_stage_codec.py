"""What the codecs take of a real stage's step: 12 blocks of GPT2-XL, micro-batches of 2 × 1,024 tokens, from the trace.

    python benchmarks/bench_stage_codec.py            (needs a CUDA device)

A middle stage's whole work on one micro-batch: decode the activation, forward, encode the activation, decode the
gradient, backward, encode the gradient; bf16 autocast, random weights, the boundary tensors those of this model on
random tokens. torch.profiler's trace says which kernels ran in which part; a part's device time is theirs. What runs
outside every other part is backward's: autograd launches it from a thread of its own.

Prediction, written before the run: 45 ms a micro-batch; 0.1 ms for `tah` and `fixed` together with their reading and
writing, 0.3 ms for `wf` and `eden`: 0.3 % and 0.7 %.
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import machine
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from tahq.models.config import ModelConfig
from tahq.models.keyed_dropout import RandomContext
from tahq.models.model_spec import load_spec
from tahq.models.slice import ModelSlice, Parts, build_parts, fill_weights
from tahq.quant import get_codec
from tahq.quant.codec import Codec

RESULTS = Path(__file__).parent / "results"
SHAPE = (2, 1024, 1600)
WIRES = {"paper": ("tah", "fixed:bits=8"), "ours": ("wf", "eden"), "tah both ways": ("tah", "tah")}
PARTS = ("decode activation", "forward", "encode activation", "decode gradient", "backward", "encode gradient")
CODEC_PARTS = tuple(part for part in PARTS if "code" in part)
REPEATS = 20


@dataclass(frozen=True, slots=True)
class Share:
    """Milliseconds a micro-batch: of the device by part, and by the clock with and without codecs."""

    device_ms: dict[str, float]
    wall_ms: float
    bare_wall_ms: float

    @property
    def codec_ms(self) -> float:
        """Device time of the four codec parts."""
        return sum(self.device_ms[part] for part in CODEC_PARTS)

    @property
    def share(self) -> float:
        """Of the codecs in the stage's device time."""
        return self.codec_ms / sum(self.device_ms.values())


def build_stage(device: torch.device) -> ModelSlice:
    """Blocks 12 to 23 of GPT2-XL, weights at random."""
    config = ModelConfig(family="gpt2", num_layers=48, hidden_size=1600, num_heads=25)
    spec = load_spec(config, vocab_size=50257, seq_len=SHAPE[1])
    stage = build_parts(spec, Parts(range(12, 24)), device=device, random=RandomContext(0))
    fill_weights(spec, {name: parameter.data for name, parameter in stage.named_parameters()}, 0)
    return stage


class Step:
    """One micro-batch of a stage, with codecs or without."""

    def __init__(self, stage: ModelSlice, activations: Codec, gradients: Codec, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)
        self._stage, self._activations, self._gradients = stage, activations, gradients
        x = torch.randn(SHAPE, generator=generator, device=device)
        gradient = torch.randn(SHAPE, generator=generator, device=device) * 1e-6
        self._x, self._gradient = x, gradient
        self._packed_x = activations.encode(x, key=1)
        self._packed_gradient = gradients.encode(gradient, key=2)

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


def measure(step: Step, trace: Path | None) -> Share:
    """Warm up, time by the clock, then trace."""
    for _ in range(5):
        step.with_codecs()
        step.bare()
    wall_ms, bare_ms = _wall_ms(step.with_codecs), _wall_ms(step.bare)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(REPEATS):
            step.with_codecs()
        torch.cuda.synchronize()
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
    return Share(_device_ms_by_part(profiler), wall_ms, bare_ms)


def _wall_ms(work: Callable[[], None]) -> float:
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times)


def _device_ms_by_part(profiler: profile) -> dict[str, float]:
    """Kernels (and copies) by the part in whose range on the device's own timeline they lie."""
    device = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    ranges = sorted((e.time_range.start, e.time_range.end, e.name) for e in device if e.name in PARTS)
    kernels = [e for e in device if e.name not in PARTS]
    total: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        middle = (kernel.time_range.start + kernel.time_range.end) / 2
        inside = [name for start, end, name in ranges if start <= middle <= end]
        total[inside[0] if inside else "backward"] += kernel.time_range.elapsed_us() / 1e3 / REPEATS
    return {part: total[part] for part in PARTS}


def report(shares: dict[str, Share]) -> str:
    """The result file, as Markdown."""
    lines = [
        f"# Codec time in a stage's step\n\n{machine.describe()}\n",
        f"benchmarks/bench_stage_codec.py: 12 blocks of GPT2-XL, micro-batch {SHAPE[0]} × {SHAPE[1]}, bf16 autocast; "
        f"device milliseconds a micro-batch from the trace of {REPEATS}, and medians by the clock (synchronised).\n",
        f"| wire | {' | '.join(PARTS)} | codecs | share | clock | clock without codecs |",
        "|---" * (len(PARTS) + 5) + "|",
    ]
    for name, share in shares.items():
        parts = " | ".join(f"{share.device_ms[part]:.3f}" for part in PARTS)
        lines.append(
            f"| {name}: {', '.join(f'`{spec}`' for spec in WIRES[name])} | {parts} | {share.codec_ms:.3f} "
            f"| {share.share:.2%} | {share.wall_ms:.2f} | {share.bare_wall_ms:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "stage_codec_h200_202611.md")
    parser.add_argument("--trace", type=Path, help="write the Chrome trace of the last wire here")
    arguments = parser.parse_args()
    machine.need_gpu()
    device = torch.device("cuda")
    stage = build_stage(device)
    shares = {}
    for name, (activations, gradients) in WIRES.items():
        shares[name] = measure(Step(stage, get_codec(activations), get_codec(gradients), device), arguments.trace)
    text = report(shares)
    arguments.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
