"""Time to loss over slow links (TAH-Quant, Figure 2, bottom): GPT-2 on real text, loss against wall-clock time.

    python benchmarks/bench_time_to_loss.py --tokenizer GPT2_FOLDER --text wikitext2-valid.txt --output FILE.md
    python benchmarks/bench_time_to_loss.py --model tiny --device cpu --steps 30     # shows that it works

GPT-2 small (124 million parameters), four stages, 32 × 1,024 tokens per step. Each codec pair trains once, with the
links open, since the network does not change what a step learns. Twice during that run, early in the first epoch and
after it, the links are shaped to each rate for a few steps, and these steps are timed. The time of a curve is the sum
of its steps: the mean of the first window for steps of the first epoch, of the second window for the others. The
difference matters only for AQ-SGD, which sends fp16 until it has seen a sample. Needs root. Runs are kept in
FILE.jsonl; call the script again to continue.
"""

import argparse
import math
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from harness import Table, append_row, main, need_gpu, read_rows, rows_path, say

from tahq.data.dataset import load_dataset
from tahq.data.tokenizer import load_tokenizer
from tahq_netem.backends.network import Network
from tahq_netem.network.description import plan_network, uniform
from tahq_netem.runtimes.session import RuntimeSession, RuntimeStep, SessionRequest
from tahq_netem.sweep.measurement import open_network
from tahq_netem.sweep.points import SessionKey
from tahq_netem.sweep.runner import RUNTIMES
from tahq_netem.sweep.spec import SweepConfig, split_wire
from tahq_netem.sweep.workload import session_config

MODELS: Mapping[str, dict[str, Any]] = {
    "gpt2": {"family": "gpt2", "num_layers": 12, "hidden_size": 768, "num_heads": 12},
    "tiny": {"family": "gpt2", "num_layers": 4, "hidden_size": 64, "num_heads": 2},
}
WIRES = ("tah / fixed:bits=6", "wf / eden", "aqsgd:bits=4 / fixed:bits=8", "raw:dtype=fp16")
STAGES, WINDOW_STEPS, WARM_UP_STEPS, TIMEOUT_S = 4, 2, 20, 240.0
SMOOTHED_STEPS = 5
"""A loss counts as reached when the mean of this many steps is below it."""

Row = Mapping[str, Any]
Curve = list[tuple[int, float, float]]
"""Step, seconds since the start, and the mean of the last losses."""


class Training:
    """The run of one codec pair: its losses, and the steps that were timed."""

    def __init__(self, session: RuntimeSession, network: Network, rates: Sequence[float]) -> None:
        self._session, self._network, self._rates = session, network, rates
        self.losses: list[float] = []
        self.windows: list[dict[str, Any]] = []

    def step(self) -> float:
        """Take a step; returns its seconds."""
        record = self._session.next_step(TIMEOUT_S)
        self._keep([record])
        return record.seconds

    def time_windows(self, *, is_first_epoch: bool) -> None:
        """Shape the links to each rate, the fastest first, let a step go by, and time the next ones."""
        for mbits in sorted(self._rates, reverse=True):
            self._shape(1e6 * mbits)
            self.step()
            seconds = [self.step() for _ in range(WINDOW_STEPS)]
            self.windows.append({"mbits": mbits, "is_first_epoch": is_first_epoch, "seconds": seconds})
        self._shape(None)

    def train_until(self, num_steps: int) -> None:
        while len(self.losses) < num_steps:
            self.step()
        say(f"  step {len(self.losses)}, loss {self.losses[-1]:.3f}")

    def _shape(self, rate: float | None) -> None:
        self._network.set_plan(plan_network(uniform(STAGES, rate=rate)))
        self._keep(self._session.take_finished())  # their losses count, their times mean nothing

    def _keep(self, records: Sequence[RuntimeStep]) -> None:
        self.losses += [math.inf if record.loss is None else record.loss for record in records]


def sweep_config(options: argparse.Namespace) -> SweepConfig:
    return SweepConfig.model_validate(
        {
            "name": "time-to-loss",
            "model": MODELS[options.model],
            "data": {
                "text": options.text,
                "tokenizer": options.tokenizer,
                "seq_len": options.seq_len,
                "validation": 0.0,
            },
            "global_batch": options.batch,
            "micro_batches": [2],
            "stages": [STAGES],
            "runtimes": [{"name": "tahq", "wires": options.wires}],
            "device": options.device,
            "threads": 1,
            "backend": options.backend,
        }
    )


def train(sweep: SweepConfig, wire: str, network: Network, epoch_steps: int, options: argparse.Namespace) -> Row:
    """Train with one codec pair from the first step to the last."""
    key = SessionKey("tahq", "1f1b", *split_wire(wire), STAGES, 2, "real")
    say(f"training with {wire}")
    with tempfile.TemporaryDirectory(prefix="tahq-time-to-loss-") as name:
        config = session_config(sweep, key, Path(name), None)
        training = config.training.model_copy(update={"lr": options.lr, "warmup_steps": WARM_UP_STEPS})
        config = config.model_copy(update={"training": training})
        network.set_plan(plan_network(uniform(STAGES)))
        request = SessionRequest(config, key.schedule, network, tuple(network.plan.hosts), Path(name))
        with RUNTIMES["tahq"](request) as session:
            run = Training(session, network, options.rates)
            run.step()
            run.time_windows(is_first_epoch=True)
            run.train_until(min(options.steps, epoch_steps + 1))
            if len(run.losses) > epoch_steps:
                run.time_windows(is_first_epoch=False)
            run.train_until(options.steps)
    return {"wire": wire, "losses": run.losses, "windows": run.windows, "epoch_steps": epoch_steps}


def measure(options: argparse.Namespace) -> list[Row]:
    """Train the codec pairs that FILE.jsonl does not have yet."""
    need_gpu(options.device)
    path, sweep = rows_path(options), sweep_config(options)
    samples = load_dataset(sweep.data, load_tokenizer(sweep.data)).num_train_samples
    known = {row["wire"]: row for row in read_rows(path)}
    with open_network(uniform(STAGES, congestion_control=sweep.congestion_control), sweep) as network:
        for wire in options.wires:
            if wire not in known:
                known[wire] = train(sweep, wire, network, math.ceil(samples / options.batch), options)
                append_row(path, known[wire])
    return [known[wire] for wire in options.wires]


def window_s(row: Row, mbits: float, is_first_epoch: bool) -> list[float]:
    kinds = [each for each in row["windows"] if each["mbits"] == mbits and each["is_first_epoch"] is is_first_epoch]
    return [seconds for each in kinds for seconds in each["seconds"]]


def curve(row: Row, mbits: float) -> Curve:
    """Begins at the first step that has enough steps before it."""
    early_s = statistics.fmean(window_s(row, mbits, True))
    later_s = statistics.fmean(window_s(row, mbits, False) or [early_s])
    losses = row["losses"]
    seconds = list(accumulate(early_s if step < row["epoch_steps"] else later_s for step in range(len(losses))))
    count = min(SMOOTHED_STEPS, len(losses))
    return [
        (step, seconds[step - 1], statistics.fmean(losses[step - count : step]))
        for step in range(count, len(losses) + 1)
    ]


def step_rows(rows: Sequence[Row], mbits: float) -> Iterator[list[object]]:
    for row in rows:
        losses = [loss for *_, loss in curve(row, mbits)]
        windows = [window_s(row, mbits, is_first) for is_first in (True, False)]
        times = [f"{statistics.fmean(s):.2f} ± {(max(s) - min(s)) / 2:.2f}" if s else "–" for s in windows]
        count = len(row["losses"])
        epochs = f"{count / row['epoch_steps']:.1f}"
        yield [f"`{row['wire']}`", count, epochs, *times, f"{min(losses):.3f}", f"{losses[-1]:.3f}"]


def target_rows(rows: Sequence[Row], mbits: float) -> Iterator[list[object]]:
    """For the lowest smoothed loss that every pair reaches, and the lowest that all but one reach."""
    curves = {row["wire"]: curve(row, mbits) for row in rows}
    lowest = sorted({min(loss for *_, loss in points) for points in curves.values()}, reverse=True)
    for target in filter(math.isfinite, lowest[:2]):
        found = {
            wire: next(((step, s) for step, s, loss in points if loss <= target), None)
            for wire, points in curves.items()
        }
        slowest_s = max(reached[1] for reached in found.values() if reached is not None)
        for wire, reached in found.items():
            cells = (
                ["–"] * 3 if reached is None else [reached[0], f"{reached[1]:,.0f}", f"{slowest_s / reached[1]:.2f}"]
            )
            yield [f"{target:.3f}", f"`{wire}`", *cells]


def draw(rows: Sequence[Row], rates: Sequence[float], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * len(rates), 4.2), layout="constrained")
    for axes, mbits in zip(figure.subplots(1, len(rates), squeeze=False)[0], rates, strict=True):
        for row in rows:
            _, seconds, losses = zip(*curve(row, mbits), strict=True)
            axes.plot(seconds, losses, label=row["wire"])
        axes.set(title=f"{mbits:g} Mbit/s", xlabel="seconds", ylabel="training loss")
        axes.legend()
    figure.savefig(path, dpi=110)


def tables(options: argparse.Namespace) -> Iterator[Table | str]:
    rows = measure(options)
    names = ", ".join(Path(text).name for text in options.text)
    yield (
        f"{options.model}; text: {names}; learning rate {options.lr:g} after {WARM_UP_STEPS} steps of warm-up. "
        f"{options.batch} samples of {options.seq_len:,} tokens per step in micro-batches of 2, {STAGES} stages, 1F1B, "
        "no delay. ± is half of the range of the timed steps. Losses are training losses, means of "
        f"{SMOOTHED_STEPS} steps, nats per token. The first target is the lowest loss that every row reaches, the "
        "second the lowest that all but one reach; – is a target not reached."
    )
    if options.output:
        draw(rows, options.rates, options.output.with_suffix(".png"))
        yield f"![loss against time]({options.output.stem}.png)"
    for mbits in options.rates:
        columns = ("wire", "steps", "epochs", "s per step, first epoch", "later", "lowest loss", "last")
        yield Table(columns, step_rows(rows, mbits), heading=f"{mbits:g} Mbit/s")
        yield Table(
            ("target", "wire", "steps to it", "s to it", "times as fast as the slowest"), target_rows(rows, mbits)
        )


if __name__ == "__main__":
    main(
        __doc__,
        tables,
        {
            "--model": {"choices": list(MODELS), "default": "gpt2"},
            "--text": {"nargs": "+", "default": ["stdlib"], "help": "text files, folders, globs"},
            "--tokenizer": {"default": "bytes", "help": "folder of a Hugging Face tokenizer"},
            "--wires": {"nargs": "+", "default": list(WIRES), "help": "'activations / gradients'"},
            "--rates": {"type": float, "nargs": "+", "default": [500, 100], "help": "Mbit/s"},
            "--batch": {"type": int, "default": 32},
            "--seq-len": {"type": int, "default": 1024},
            "--steps": {"type": int, "default": 300},
            "--lr": {"type": float, "default": 6e-4},
            "--device": {"default": "auto", "help": "auto spreads the stages over the GPUs"},
            "--backend": {"default": "auto", "help": "network backend; see tahq-netem probe"},
        },
    )
