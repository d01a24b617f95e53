"""Peak memory of a stage of 7B-shaped layers with AGoQ's parts, by sequence length, and the longest sequence that fits.

    python benchmarks/bench_agoq_memory.py [--output benchmarks/results/agoq_memory_<hardware>_<yyyymm>.md]
    python benchmarks/bench_agoq_memory.py --layers 2 --lengths 1024 --hidden 256       # on a CPU: no figures

AGoQ Tables 8 and 14. Layers in the middle of a model (no embedding, no head), bf16 autocast with fp32 weights, as tahq
trains: a step's two micro-batches of one sample, forward and backward, and its update, after a step that made the
optimizer's states. From the second micro-batch on gradients are there beside the activations. `O`:
`optimizer: adamw8bit`; `G`: `memory.gradients: fp8`; `A`: `memory.activations: agoq` with 4 bits. A peak is the
allocator's, in GiB of 2³⁰ bytes; the share is that of what the forward leaves allocated.
"""

import argparse
import gc
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from harness import Table, main

from tahq.memory.agoq.stored_inputs import store_inputs
from tahq.memory.config import AgoqConfig
from tahq.memory.stored_slice import build_slice
from tahq.models.config import ModelConfig
from tahq.models.deferred_gradients import sharing_weight_copies
from tahq.models.keyed_dropout import RandomContext
from tahq.models.model_spec import load_spec
from tahq.models.partition import BlockRange
from tahq.pipeline.config import TrainingConfig
from tahq.pipeline.update import StageUpdate

GIB = 2**30
STEP = 1024
"""Sequence lengths that are tried are multiples of this."""
PARTS = {"nothing": "", "O": "O", "O + G": "OG", "A + O + G": "AOG"}


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes allocated at most, and what the forward pass left of that."""

    peak: int
    kept: int

    def __str__(self) -> str:
        return f"{self.peak / GIB:.1f} ({self.kept / self.peak:.0%})"


class Layers:
    """Layers with some of AGoQ's parts, which take steps on sequences of any length."""

    def __init__(self, options: argparse.Namespace, parts: str) -> None:
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        hidden, layers = options.hidden, options.layers
        sizes = {"hidden_size": hidden, "num_heads": max(1, hidden // 128), "intermediate_size": hidden * 43 // 16}
        spec = load_spec(ModelConfig(family="llama", num_layers=layers + 2, **sizes), vocab_size=100, seq_len=2**20)
        blocks, random = BlockRange(1, layers + 1, layers + 2), RandomContext(0)
        self._module = build_slice(spec, blocks, seed=0, device=self._device, random=random, weights=False).train()
        with torch.no_grad():
            for parameter in self._module.parameters():
                parameter.fill_(1.0) if parameter.ndim == 1 else parameter.normal_(0.0, 0.02)
        if "A" in parts:
            store_inputs(self._module, AgoqConfig(), 4)
        training = TrainingConfig(optimizer="adamw8bit" if "O" in parts else "adamw")
        parameters = self._module.canonical_parameters()
        is_decayed, gradients = self._module.is_decayed, "fp8" if "G" in parts else "fp32"
        self._update = StageUpdate(training, parameters, is_decayed, 100, gradients=gradients)
        self._hidden, self._step = hidden, 0

    def take_step(self, length: int) -> Peak:
        x = torch.randn(1, length, self._hidden, device=self._device).requires_grad_()
        for _ in range(2):
            before = self._allocated()
            with sharing_weight_copies():
                with torch.autocast(self._device.type, torch.bfloat16):
                    y = self._module(x)
                kept = self._allocated() - before
                y.backward(torch.ones_like(y))
                del y
        self._update.apply(self._step, 1.0)
        self._step += 1
        return Peak(torch.cuda.max_memory_allocated() if self._device.type == "cuda" else 1, kept)

    def peak(self, length: int) -> Peak | None:
        """Of a step at this length; None: it does not fit."""
        try:
            if self._device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            return self.take_step(length)
        except torch.OutOfMemoryError:
            self._update.discard()
            return None
        finally:
            gc.collect()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated() if self._device.type == "cuda" else 0


def rows(options: argparse.Namespace) -> Iterator[list[str]]:
    for name, parts in PARTS.items():
        layers = Layers(options, parts)
        layers.take_step(STEP)
        peaks = {length: layers.peak(length) for length in options.lengths}
        fits = max((length for length, peak in peaks.items() if peak), default=0)
        low, high = fits // STEP, next((n // STEP for n, peak in peaks.items() if not peak), 0)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if layers.peak(middle * STEP) else (low, middle)
        longest = f"{low * STEP:,}" if high else f"{low * STEP:,} or more"
        yield [name, *(str(peak or "") for peak in peaks.values()), longest]
        del layers
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def tables(options: argparse.Namespace) -> Iterator[Table]:
    caption = "Empty: it does not fit. The longest sequence is found to a multiple of 1,024."
    columns = ("", *(f"{length:,}" for length in options.lengths), "longest that fits")
    yield Table(
        columns, rows(options), caption, f"{options.layers} layers, hidden size {options.hidden}: GiB (activations)"
    )


if __name__ == "__main__":
    lengths = [2**power for power in range(11, 17)]
    main(
        __doc__,
        tables,
        {
            "--layers": {"type": int, "default": 16},
            "--hidden": {"type": int, "default": 4096},
            "--lengths": {"type": int, "nargs": "+", "default": lengths},
        },
    )
