"""TAH-Quant's Tables 3, 5 and 6 done again: GPT2-XL over slow links, tokens a second, beside what the paper has.

    python benchmarks/bench_paper_throughput.py --limit 500          # again and again, until nothing is left
    python benchmarks/bench_paper_throughput.py --report             # the tables, of what there is
    python benchmarks/bench_paper_throughput.py --model tiny --device cpu --out /tmp/try    # shows that it works

1.5 billion random weights, 1,024 tokens a sample, 32 samples a step, 4 and 8 stages, each in a network namespace of its
own with the rate up and the rate down; all stages on one GPU, or spread over several. Needs root. A point is a line of
the results' file, and is not measured again. Points that differ in the rate alone share one start of the workers, which
takes longer than most of them. In AQ-SGD's rows every sample is known: its epoch is one step here, and the first goes
by before anything is timed; its cache is in the host's memory and is read and written in every step.

Where minutes on the GPUs are few, several calls may measure at once, each with `--lane` for a results' file and
networks of its own, and `--at-a-time` to say so in the results. That is for points whose bytes take many times as long
as their compute (`--parts fp32 torch-1f1b torch-gpipe`): they share nothing but the GPUs, and leave these mostly idle.

The paper: A100s, their code, one stage a GPU; the GPUs' number and kind are not ours, so compare ratios. On one GPU
the stages take turns: compute is P times as long, and a ratio is smaller than on P of them.
"""

import argparse
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import need_gpu

from tahq_netem.machine import one_line
from tahq_netem.result_rows import Row, done, series_of
from tahq_netem.sweep_command import run_sweep
from tahq_netem.sweep_results import DONE, read_results
from tahq_netem.sweep_spec import SweepConfig, split_wire

RESULTS = Path(__file__).parent / "results"
MODELS: Mapping[str, dict[str, Any]] = {
    "gpt2-xl": {
        "model": {"family": "gpt2", "num_layers": 48, "hidden_size": 1600, "num_heads": 25, "vocab_size": 50257},
        "seq_len": 1024,
    },
    "tiny": {
        "model": {"family": "gpt2", "num_layers": 8, "hidden_size": 64, "num_heads": 2, "vocab_size": 512},
        "seq_len": 32,
    },
}
FP32 = "raw:dtype=fp32"
AQSGD = "aqsgd:bits=4 / fixed:bits=8"
TAH6 = "tah / fixed:bits=6"
TAH8 = "tah / fixed:bits=8"
MICRO_BATCHES = (2, 4, 8)
"""Of Tables 5 and 6, beside the 1 of Table 3."""

# tokens/s as printed: by Mbit/s (FP32, AQ-SGD fw4 bw8, TAH-Quant fw~4 bw6), and by micro-batch (without, with)
TABLE_3 = {1000: (2600, 4749, 5650), 500: (2482, 4311, 5749), 300: (1761, 4369, 5120), 100: (751, 3310, 4045)}
TABLE_5_AND_6 = {
    500: {1: (2406, 4289), 2: (1710, 4016), 4: (1317, 3023), 8: (981, 2099)},
    1000: {1: (3449, 5177), 2: (2576, 4655), 4: (2003, 3475), 8: (1485, 2436)},
}


PARTS: Mapping[str, dict[str, Any]] = {
    "tah": {"wires": [TAH6]},
    "aqsgd": {"wires": [AQSGD]},
    "tah-8": {"wires": [TAH8]},
    "fp32": {"wires": [FP32]},
    "torch-1f1b": {"name": "torch", "schedules": ["1f1b"]},
    "torch-gpipe": {"name": "torch", "schedules": ["gpipe"]},
    "micro-packed": {"wires": [TAH6]},
    "micro-fp32": {"wires": [FP32]},
    "packed-gpipe": {"schedules": ["gpipe"], "wires": [TAH6]},
    "fp32-gpipe": {"schedules": ["gpipe"], "wires": [FP32]},
}
"""The most telling first. What begins with micro is Tables 5 and 6, the rest is Table 3."""


def sweeps(options: argparse.Namespace) -> Iterator[SweepConfig]:
    """What to measure, in order."""
    common: dict[str, Any] = {
        **MODELS[options.model],
        "name": f"paper-throughput-{options.at_a_time}-at-a-time",
        "global_batch": 32,
        "compute": ["real"],
        "device": options.device,
        "threads": options.threads,
        "backend": options.backend,
        "calibrate": not options.no_calibration,
        "steps": {"settle": 1, "at_least": 1, "at_most": 4, "about": 9.0},
        "timeout": options.timeout,
    }
    for part in options.parts:
        is_micro = part.startswith("micro")
        common["rates"] = [1e6 * rate for rate in (TABLE_5_AND_6 if is_micro else options.rates)]
        common["micro_batches"] = list(MICRO_BATCHES) if is_micro else [1]
        for stages in options.stages:
            runtime = {"name": "tahq", **PARTS[part]}
            yield SweepConfig.model_validate({**common, "stages": [stages], "runtimes": [runtime]})


def measure(options: argparse.Namespace, results: Path) -> int:
    """Measure what is missing until time is up; returns how many points are left or have failed."""
    deadline_s = time.monotonic() + options.limit
    missing = 0
    for config in sweeps(options):
        outcome = run_sweep(config, results, max(0.0, deadline_s - time.monotonic()))
        missing += outcome.num_left + outcome.num_failed
    return missing


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens a second, NaN where it was not measured; the mark says on how many GPUs, if not on the most there were."""

    tokens_per_s: float = math.nan
    mark: str = ""

    @property
    def is_known(self) -> bool:
        return not math.isnan(self.tokens_per_s)

    def __str__(self) -> str:
        return f"{self.tokens_per_s:,.0f}{self.mark}" if self.is_known else "–"

    def ratio(self, base: "Rate") -> str:
        """Such as `5.84×`; – where one of both was not measured."""
        value = self.tokens_per_s / base.tokens_per_s
        return "–" if math.isnan(value) else f"{value:.2f}×"

    def beside(self, base: "Rate") -> str:
        """The number, and how many times the base it is."""
        return f"{self} ({self.ratio(base)})" if self.is_known else "–"


class Rates:
    """Tokens a second by what was measured; of a point measured on several machines, on that with the most GPUs."""

    def __init__(self, rows: Sequence[Row]) -> None:
        ordered = sorted(done(rows), key=lambda row: (num_gpus(row), row["when"]))
        most = max(map(num_gpus, ordered), default=0)
        self._rates = {
            _key(row): Rate(float(row["tokens_per_s"]), "" if num_gpus(row) == most else _raised(num_gpus(row)))
            for row in ordered
        }

    def find(self, stages: int, micro_batch: int, mbits: int, wire: str, runtime: str = "tahq 1f1b") -> Rate:
        return self._rates.get((stages, micro_batch, mbits, split_wire(wire), runtime), Rate())


def _raised(number: int) -> str:
    return str(number).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))


def num_gpus(row: Row) -> int:
    """Of the machine that a point was measured on."""
    return int(row["machine"].get("accelerators", "0").partition(" ")[0])


def _key(row: Row) -> tuple[Any, ...]:
    point = row["point"]
    wire = (point["activations"], point["gradients"])
    runtime = f"{point['runtime']} {point['schedule']}"
    return point["stages"], point["micro_batch"], round(point["rate_bits_per_s"] / 1e6), wire, runtime


def report(rows: Sequence[Row]) -> Iterator[str]:
    """The result file, as Markdown."""
    rates, measured = Rates(rows), done(rows)
    yield "# GPT2-XL over slow links: TAH-Quant's Tables 3, 5 and 6\n"
    for line in dict.fromkeys(one_line(row["machine"]) for row in rows):
        yield f"{line}.\n"
    yield (
        "benchmarks/bench_paper_throughput.py. Tokens a second; in brackets times FP32 in the same line. The rates\n"
        "are those of each host's uplink and of its downlink, in network namespaces without delay, each network\n"
        f"measured before its points: {_networks(measured)}. {_samples(measured)}\n"
        "In AQ-SGD's columns every sample is known: its first epoch, in fp16, went by before anything was timed.\n"
        "– was not measured, or has no FP32 beside it to be divided by.\n"
    )
    yield from _machines(measured)
    yield from _beside(measured)
    for stages in sorted({row["point"]["stages"] for row in rows}):
        yield f"## {stages} stages, {_a_gpu([row for row in rows if row['point']['stages'] == stages], stages)}\n"
        yield from _table_3(rates, stages)
        for number, mbits in ((5, 500), (6, 1000)):
            yield from _table_5_or_6(rates, stages, number, mbits)
    yield from _failures(rows)


def _networks(rows: Sequence[Row]) -> str:
    """Such as `backend kernel, TCP is cubic`; `not recorded` where no row says it."""
    found = [row["calibration"]["network"] for row in rows if row.get("calibration")]
    said = dict.fromkeys(f"backend {network['backend']}, TCP is {network['congestion_control']}" for network in found)
    return "; ".join(said) or "not recorded"


def _samples(rows: Sequence[Row]) -> str:
    said = dict.fromkeys((row["point"]["global_batch"], row["point"]["seq_len"]) for row in rows)
    return "; ".join(f"{batch} samples of {length:,} tokens a step" for batch, length in said) + "."


def _a_gpu(rows: Sequence[Row], stages: int) -> str:
    """How many stages share a GPU."""
    return " or ".join(_shared(stages, count) for count in sorted(set(map(num_gpus, rows)), reverse=True))


def _machines(rows: Sequence[Row]) -> Iterator[str]:
    """What a mark means, and how far the machines are apart where both have measured a point."""
    most = max(map(num_gpus, rows), default=0)
    best = {_key(row): float(row["tokens_per_s"]) for row in rows if num_gpus(row) == most}
    for count in sorted({num_gpus(row) for row in rows} - {most}, reverse=True):
        fewer = [row for row in rows if num_gpus(row) == count and _key(row) in best]
        yield f"{_raised(count)} measured on {count} GPUs and not on {most}.{' On both:' if fewer else ''}"
        for row in fewer:
            stages, micro_batch, mbits, _, _ = _key(row)
            where = f"{stages} stages, {mbits} Mbit/s, micro-batches of {micro_batch}"
            against = float(row["tokens_per_s"]) / best[_key(row)] - 1
            yield f"- {series_of(row).label}, {where}: {row['tokens_per_s']:,.0f}{_raised(count)}, {against:+.1%}"
        yield ""


def _shared(stages: int, num_gpus: int) -> str:
    if num_gpus == 0:
        return "on the CPU"
    least, most = stages // num_gpus, math.ceil(stages / num_gpus)
    return f"{most if least in (0, most) else f'{least} to {most}'} on each GPU"


def _beside(rows: Sequence[Row]) -> Iterator[str]:
    """Which points were not alone on the machine, and how far the steps of a point are apart."""
    for name in dict.fromkeys(row["sweep"] for row in rows):
        of_name = [row for row in rows if row["sweep"] == name]
        what = dict.fromkeys(f"{series_of(row).label} ({row['point']['stages']} stages)" for row in of_name)
        repeated = [row for row in of_name if len(row["steps"]) > 1]
        spread = max((row["step_s_spread"] / row["step_s"] for row in repeated), default=math.nan)
        count = name.removeprefix("paper-throughput-").removesuffix("-at-a-time")
        yield f"Measured {count} at a time: {'; '.join(what)}."
        single = f"{len(of_name) - len(repeated)} of these {len(of_name)} points are one step each"
        yield f"{single}; the steps of the others differ by {spread:.1%} at most.\n"


def _table_3(rates: Rates, stages: int) -> Iterator[str]:
    yield "Table 3, micro-batches of 1. 'paper' is as printed; the runtimes are tahq's 1F1B and torch's two.\n"
    yield (
        "| Mbit/s | paper FP32 | AQ-SGD 4/8 | TAH 4/6 | tahq FP32 | AQ-SGD 4/8 | TAH 4/6 | TAH 4/8 "
        "| torch 1F1B FP32 | torch GPipe FP32 | TAH 4/6 against AQ-SGD | paper's |\n" + "|---" * 12 + "|"
    )
    for mbits, printed in TABLE_3.items():
        paper = [Rate(tokens_per_s) for tokens_per_s in printed]
        fp32, *ours = (rates.find(stages, 1, mbits, wire) for wire in (FP32, AQSGD, TAH6, TAH8))
        torch = [rates.find(stages, 1, mbits, FP32, f"torch {schedule}") for schedule in ("1f1b", "gpipe")]
        cells = [
            *(str(mbits), str(paper[0]), *(rate.beside(paper[0]) for rate in paper[1:])),
            *(str(fp32), *(rate.beside(fp32) for rate in (*ours, *torch))),
            *(ours[1].ratio(ours[0]), paper[2].ratio(paper[1])),
        ]
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield from _gpipe(rates, stages)


def _gpipe(rates: Rates, stages: int) -> Iterator[str]:
    """GPipe has more micro-batches under way than 1F1B, so slow links wait less, and it takes the memory for it."""
    rows = {
        mbits: [
            rates.find(stages, 1, mbits, FP32, "torch gpipe"),
            *(rates.find(stages, 1, mbits, wire, "tahq gpipe") for wire in (FP32, TAH6)),
            rates.find(stages, 1, mbits, TAH6),
        ]
        for mbits in TABLE_3
    }
    if not any(ours.is_known for row in rows.values() for ours in row[1:3]):
        return
    yield "GPipe in both runtimes; in brackets times torch GPipe.\n"
    yield (
        "| Mbit/s | torch GPipe FP32 | tahq GPipe FP32 | tahq GPipe TAH 4/6 | tahq 1F1B TAH 4/6 |\n" + "|---" * 5 + "|"
    )
    for mbits, (torch, *ours) in rows.items():
        yield f"| {mbits} | {torch} | {' | '.join(rate.beside(torch) for rate in ours)} |"
    yield ""


def _table_5_or_6(rates: Rates, stages: int, number: int, mbits: int) -> Iterator[str]:
    yield f"Table {number}, {mbits} Mbit/s.\n"
    yield "| micro-batch | paper FP32 | TAH | speed-up | tahq FP32 | TAH 4/6 | speed-up |\n" + "|---" * 7 + "|"
    for micro_batch, printed in TABLE_5_AND_6[mbits].items():
        ours = [rates.find(stages, micro_batch, mbits, wire) for wire in (FP32, TAH6)]
        if not any(rate.is_known for rate in ours):
            continue
        pairs = [[Rate(tokens_per_s) for tokens_per_s in printed], ours]
        cells = [cell for plain, packed in pairs for cell in (str(plain), str(packed), packed.ratio(plain))]
        yield f"| {micro_batch} | {' | '.join(cells)} |"
    yield ""


def _failures(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        if row["status"] != DONE:
            yield f"Not measured: {_key(row)}: {row['error']}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="gpt2-xl")
    parser.add_argument("--device", default="auto", help="auto spreads the stages over the GPUs there are")
    parser.add_argument("--stages", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--rates", type=int, nargs="+", default=list(TABLE_3), help="Mbit/s, of Table 3")
    parser.add_argument("--threads", type=int, default=1, help="of a worker")
    parser.add_argument("--backend", default="auto", help="of the networks; see tahq-netem probe")
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds that a start may take")
    parser.add_argument("--no-calibration", action="store_true", help="do not measure the networks first")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds after which no point shall end")
    parser.add_argument("--lane", help="measure into a results' file of this name, beside other calls")
    parser.add_argument(
        "--at-a-time", type=int, default=1, help="how many calls measure beside each other, with this one"
    )
    parser.add_argument("--report", action="store_true", help="measure nothing, write the tables of all lanes")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--name", default="paper_throughput_h200_202611")
    options = parser.parse_args()
    missing = 0
    if not options.report:
        need_gpu(options.device)
        lane = f"-{options.lane}" if options.lane else ""
        missing = measure(options, options.out / f"{options.name}{lane}.jsonl")
        print(f"{missing} points are left or failed; run it again" if missing else "nothing is left")
    if options.lane is None:
        paths = sorted(options.out.glob(f"{options.name}*.jsonl"))
        text = "\n".join(report([row for path in paths for row in read_results(path).values()]))
        (options.out / f"{options.name}.md").write_text(text)
        print(text)


if __name__ == "__main__":
    main()
