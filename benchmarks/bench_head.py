"""Head and loss of one micro-batch in chunks: peak memory and time.

    python benchmarks/bench_head.py [--output benchmarks/results/head_<hardware>_<yyyymm>.md]
    python benchmarks/bench_head.py --device cuda --dtype bf16 --hidden 4096 --tokens 2048 8192 32768

Forward and backward of `ModelSlice.loss` from the output of the final norm, with a vocabulary of 128k, whole and in
the chunks of a run that sets none (one where logits are small), or in chunks of `--chunk` tokens. *Peak*: bytes above
those of weight, its gradient and hidden states; on a CPU of the process (VmHWM), on a GPU the allocator's. Repetitions
of all in turn; times are medians. On a GPU also Liger's kernel, if `liger_kernel` is installed; it chooses its own
chunks.
"""

import argparse
import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from harness import Table, main, medians_in_turn, need_gpu
from torch.nn import Parameter
from torch.nn import functional as F

from tahq.config.stage_estimate import open_loss_chunks
from tahq.models.loss import chunked_cross_entropy, cross_entropy

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Loss = Callable[[torch.Tensor, Parameter, torch.Tensor], torch.Tensor]


def whole(hidden: torch.Tensor, weight: Parameter, labels: torch.Tensor) -> torch.Tensor:
    """All logits at once."""
    return cross_entropy(F.linear(hidden, weight), labels)[0]


def in_chunks(tokens: int | None) -> Loss:
    """So many tokens at a time; None: as many as in a run."""

    def loss(hidden: torch.Tensor, weight: Parameter, labels: torch.Tensor) -> torch.Tensor:
        number = -(-labels.numel() // tokens) if tokens else open_loss_chunks(labels.numel(), len(weight))
        return chunked_cross_entropy(hidden, weight, labels, number)[0] if number > 1 else whole(hidden, weight, labels)

    return loss


def liger(hidden: torch.Tensor, weight: Parameter, labels: torch.Tensor) -> torch.Tensor:
    """Liger's fused linear layer and cross-entropy (its v0.8.5)."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    rows = hidden.reshape(-1, hidden.shape[-1])
    loss: torch.Tensor = liger_fused_linear_cross_entropy(rows, weight, labels.reshape(-1), reduction="sum")
    return loss


def has_liger(device: torch.device) -> bool:
    """Whether it can be compared with."""
    return device.type == "cuda" and importlib.util.find_spec("liger_kernel") is not None


def peak_nbytes(work: Callable[[], object], device: torch.device) -> int:
    """What it takes above what is there before."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return int(torch.cuda.max_memory_allocated() - before)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = _status_nbytes("VmRSS")
    work()
    return _status_nbytes("VmHWM") - before


def _status_nbytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def rows(options: argparse.Namespace) -> Iterator[list[str]]:
    """One row per number of tokens."""
    device, dtype = torch.device(options.device), DTYPES[options.dtype]
    draw = torch.Generator(device).manual_seed(0)
    weight = Parameter(torch.randn(options.vocab, options.hidden, generator=draw, device=device) / 64)
    weight.grad = torch.zeros_like(weight)
    losses: dict[str, Loss] = {"whole": whole, "chunks": in_chunks(options.chunk)}
    losses |= {"liger": liger} if has_liger(device) else {}
    for tokens in options.tokens:
        hidden = torch.randn(1, tokens, options.hidden, generator=draw, device=device).requires_grad_()
        labels = torch.randint(options.vocab, (1, tokens), generator=draw, device=device)

        def work(loss: Loss, hidden: torch.Tensor = hidden, labels: torch.Tensor = labels) -> None:
            hidden.grad = None
            with torch.autocast(device.type, dtype, enabled=dtype is torch.bfloat16):
                y = loss(hidden, weight, labels)
            y.backward()

        works = {name: partial(work, loss) for name, loss in losses.items()}
        peaks = {name: peak_nbytes(each, device) for name, each in works.items()}
        times_ms = medians_in_turn(works, device, options.repeats)
        cells = [f"{tokens:,}"]
        for name, ms in times_ms.items():
            cells += [f"{peaks[name] / 2**20:,.0f}", f"{ms:,.1f}", f"{times_ms['whole'] / ms:.2f}"]
        yield cells


def tables(options: argparse.Namespace) -> Iterator[Table]:
    need_gpu(options.device)
    names = ["whole", f"chunks of {options.chunk or 'a run'}"] + ["Liger"] * has_liger(torch.device(options.device))
    columns = [column for name in names for column in (f"{name}: peak MiB", "ms", "speed")]
    heading = f"Hidden size {options.hidden:,}, vocabulary {options.vocab:,}, {options.dtype}"
    yield Table(("tokens", *columns), rows(options), heading=heading)


if __name__ == "__main__":
    main(
        __doc__,
        tables,
        {
            "--device": {"default": "cpu", "help": "cpu or cuda"},
            "--dtype": {"choices": sorted(DTYPES), "default": "fp32", "help": "of the products"},
            "--hidden": {"type": int, "default": 512, "help": "channels"},
            "--vocab": {"type": int, "default": 128 * 1024, "help": "rows of the head"},
            "--tokens": {"type": int, "nargs": "+", "default": [512, 1024, 2048, 4096], "help": "of a micro-batch"},
            "--chunk": {"type": int, "help": "tokens of a chunk (default: as in a run)"},
        },
        repeats=3,
    )
