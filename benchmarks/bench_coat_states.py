"""What storing AdamW's moments in eight bits does to m/√v: COAT's Tables 1 and 9, on moments of a real training.

    python benchmarks/bench_coat_states.py [--models gpt2 llama] [--steps 100 300] [--output FILE.md]

A GPT-2 and a Llama of some 2 million weights train on the standard library's source with torch's AdamW in fp32; at the
steps given their moments are stored and read again by `tahq.memory.coat.fp8_groups`, as `fp8_adamw` keeps them, scales
and powers included. The figure of a pair of formats is the mean of (m'/(√v' + ε) − m/(√v + ε))² over all weights, where
m' and v' are what is read. COAT divides by √(v + ε); ε = 10⁻⁸ is here where AdamW has it, or it would hide the
smaller half of all v.

Where a format reads a v that is not 0 as 0, m/ε takes the place of m/√v, and a handful of weights outweigh all others
by orders of magnitude. So the tables are over the weights whose v none of the formats loses, which all but some in ten
thousand are; how many are lost, and what the error over all weights is, stands beside it.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from adam_states import BATCH, EPSILON, MODELS, SEQ_LEN, Moments, states_of_training
from harness import describe
from stored_otherwise import STORINGS, Storing

from tahq.memory.coat.fp8_groups import (
    DE8,
    DE8_UNSIGNED,
    E4M3,
    E5M2,
    EightBitFormat,
    MomentFormat,
    as_groups,
    decode,
    encode,
    make_tables,
)

RESULT = Path(__file__).parent / "results" / "coat_states_epyc2_202611.md"
FORMATS: Mapping[str, tuple[EightBitFormat, EightBitFormat]] = {
    "E4M3": (E4M3, E4M3),
    "E5M2": (E5M2, E5M2),
    "DE8": (DE8, DE8_UNSIGNED),
}
"""For m and for v."""
WAYS = [f"{name}{expanded}" for name in FORMATS for expanded in ("", " + expand")]
PAPER = {
    ("E4M3", "E4M3"): 20.10, ("E4M3", "E4M3 + expand"): 18.08,
    ("E4M3", "E5M2"): 25.65, ("E4M3", "E5M2 + expand"): 18.16,
    ("E4M3 + expand", "E4M3"): 15.13, ("E4M3 + expand", "E4M3 + expand"): 12.31,
    ("E4M3 + expand", "E5M2"): 21.96, ("E4M3 + expand", "E5M2 + expand"): 12.43,
    ("E5M2", "E4M3"): 37.02, ("E5M2", "E4M3 + expand"): 35.96,
    ("E5M2", "E5M2"): 40.30, ("E5M2", "E5M2 + expand"): 36.00,
    ("E5M2 + expand", "E4M3"): 17.79, ("E5M2 + expand", "E4M3 + expand"): 15.48,
    ("E5M2 + expand", "E5M2"): 23.84, ("E5M2 + expand", "E5M2 + expand"): 15.57,
    ("E4M3 + expand", "DE8"): 14.01, ("E4M3 + expand", "DE8 + expand"): 18.84,
    ("DE8", "E4M3"): 12.11, ("DE8", "E4M3 + expand"): 8.27, ("DE8", "E5M2"): 20.02, ("DE8", "E5M2 + expand"): 8.43,
    ("DE8", "DE8"): 10.54, ("DE8", "DE8 + expand"): 16.25,
    ("DE8 + expand", "E4M3"): 11.57, ("DE8 + expand", "E4M3 + expand"): 7.47, ("DE8 + expand", "E5M2"): 19.69,
    ("DE8 + expand", "E5M2 + expand"): 7.65, ("DE8 + expand", "DE8"): 9.91, ("DE8 + expand", "DE8 + expand"): 15.81,
}  # fmt: skip
"""COAT's Tables 1 and 9, (first, second) to its MSE, whose unit it does not say."""
RoundTrip = Callable[[torch.Tensor], torch.Tensor]
PLAIN, EXPANDED = ("E4M3", "E4M3"), ("E4M3 + expand", "E4M3 + expand")
WANTED_RATIO = 1.63


@dataclass(frozen=True, slots=True)
class Measured:
    """What was seen at one step of one training.

    `errors`: by first and second way, over weights whose v no way loses. `all_errors`: over all of them.
    `mean_square`: of m/(√v + ε) itself. `lost`: share of v that is read as 0 and is not, by way. `stored`: as
    `errors`, by storing, of both moments in E4M3. `ranges`: median of max/min in a group, of m and of v.
    """

    model: str
    step: int
    loss: float
    mean_square: float
    errors: dict[str, dict[str, float]]
    all_errors: dict[str, dict[str, float]]
    lost: dict[str, float]
    stored: dict[str, float]
    ranges: tuple[float, float]

    @property
    def ratio(self) -> float:
        """How many times expansion of both lowers the error of E4M3."""
        return _pair(self.errors, PLAIN) / _pair(self.errors, EXPANDED)


def measure(model: str, step: int, loss: float, moments: Moments) -> Measured:
    first, second = (_flat(moments, place) for place in (0, 1))
    exact = _quotient(first, second)
    firsts = {way: _flat_of(moments, 0, _way(way, 0)) for way in WAYS}
    seconds = {way: _flat_of(moments, 1, _way(way, 1)) for way in WAYS}
    kept = torch.stack([(read > 0) | (second == 0) for read in seconds.values()]).all(0)
    every = torch.ones_like(kept)
    errors, all_errors = (
        {
            one: {two: _mean_square((_quotient(firsts[one], seconds[two]) - exact)[where]) for two in WAYS}
            for one in WAYS
        }
        for where in (kept, every)
    )
    lost = {way: ((seconds[way] == 0) & (second > 0)).double().mean().item() for way in WAYS}
    stored = {name: _error_stored(moments, storing, exact, kept) for name, storing in STORINGS.items()}
    ranges = (_median_range(moments, 0), _median_range(moments, 1))
    return Measured(model, step, loss, _mean_square(exact), errors, all_errors, lost, stored, ranges)


def _error_stored(moments: Moments, storing: Storing, exact: torch.Tensor, kept: torch.Tensor) -> float:
    first, second = (_flat_of(moments, place, storing.round_trip) for place in (0, 1))
    return _mean_square((_quotient(first, second) - exact)[kept])


def _way(way: str, place: int) -> RoundTrip:
    """x to what is read of it, once stored; moments are stored parameter by parameter."""
    format = FORMATS[way.removesuffix(" + expand")][place]
    by = MomentFormat(format, way.endswith("expand"), make_tables(format))

    def round_trip(x: torch.Tensor) -> torch.Tensor:
        return decode(*encode(as_groups(x.reshape(-1)), by), by).view(-1)[: x.numel()]

    return round_trip


def _flat_of(moments: Moments, place: int, round_trip: RoundTrip) -> torch.Tensor:
    return torch.cat([round_trip(moment[place]).reshape(-1) for moment in moments.values()]).double()


def _flat(moments: Moments, place: int) -> torch.Tensor:
    return _flat_of(moments, place, lambda x: x)


def _quotient(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return first / (second.sqrt() + EPSILON)


def _mean_square(x: torch.Tensor) -> float:
    return x.square().mean().item()


def _median_range(moments: Moments, place: int) -> float:
    groups = torch.cat([as_groups(moment[place].reshape(-1).abs()) for moment in moments.values()])
    smallest = torch.where(groups > 0, groups, torch.inf).amin(1)
    largest = groups.amax(1)
    return (largest / smallest)[largest > 0].median().item()


# -- report -----------------------------------------------------------------------------------------


def report(results: list[Measured], seconds: float) -> str:
    parts = [_head(results, seconds), _summary(results)]
    parts += [_pairs(each) for each in results]
    return "\n".join([*parts, _storing(results), _paper(results)])


def _head(results: list[Measured], seconds: float) -> str:
    models = " and ".join(dict.fromkeys(each.model for each in results))
    return f"""# Moments of AdamW in eight bits: the error of m/√v

{describe()}. `python benchmarks/bench_coat_states.py`, {seconds:.0f} s.

COAT's Tables 1 and 9 on moments of our own trainings: {models}, 4 blocks of 192 channels, {BATCH} × {SEQ_LEN} bytes of
the standard library's source a step, torch's AdamW in fp32 (lr 10⁻³, β 0.9 and 0.95, ε 10⁻⁸).
Figures are the mean of (m'/(√v' + ε) − m/(√v + ε))² in 10⁻⁶; m' and v' are read from groups of 128 as `fp8_adamw`
stores them: scale in bf16, k in a byte. DE8 of v has no sign bit, as in 8-bit Adam. The mean is over the weights whose
v no format reads as 0 where it is not: such a weight's error is of the size of m/ε, and a few of them outweigh
everything else. *All weights* has them too.
"""


def _summary(results: list[Measured]) -> str:
    rows = [
        f"| {each.model} | {each.step} | {each.loss:.2f} "
        f"| {each.ranges[0]:.0f}, {each.ranges[1]:.0f} | {_micro(each.mean_square)} "
        f"| {_micro(_pair(each.errors, PLAIN))} | {_micro(_pair(each.errors, EXPANDED))} | {each.ratio:.2f} "
        f"| {_verdict(each)} | {_micro(_pair(each.all_errors, PLAIN))} | {_micro(_pair(each.all_errors, EXPANDED))} |"
        for each in results
    ]
    head = "| model | step | loss | range of m, v | (m/√v)² | E4M3 | E4M3 + expand | ratio | reached "
    return (
        f"""## Expansion of both against neither, E4M3

Asked is a ratio of at least {WANTED_RATIO}, the paper's. *Range*: median of max/min over the groups.

{head}| all weights: E4M3 | E4M3 + expand |
|---|---|---|---|---|---|---|---|---|---|---|
"""
        + "\n".join(rows)
        + "\n"
    )


def _verdict(each: Measured) -> str:
    return "yes" if each.ratio >= WANTED_RATIO else "**no**"


def _pairs(each: Measured) -> str:
    rows = [f"| {one} | " + " | ".join(_micro(each.errors[one][two]) for two in WAYS) + " |" for one in WAYS]
    lost = " | ".join(f"{each.lost[way]:.2g}" for way in WAYS)
    return f"""## {each.model}, step {each.step}

| m \\\\ v | {" | ".join(WAYS)} |
|---|{"---|" * len(WAYS)}
{chr(10).join(rows)}
| share of v > 0 read as 0 | {lost} |
""".replace("\\\\", "\\")


def _storing(results: list[Measured]) -> str:
    head = " | ".join(f"{each.model}, {each.step}" for each in results)
    rows = [
        f"| {name} | {storing.bits:.3f} | " + " | ".join(_micro(each.stored[name]) for each in results) + " |"
        for name, storing in STORINGS.items()
    ]
    return (
        f"""## How scale and k are stored

Both moments in E4M3; *bits* a number, its share of scale and k included. Simulated in fp64 (`stored_otherwise.py`).

| scale and k | bits | {head} |
|---|---|{"---|" * len(results)}
"""
        + "\n".join(rows)
        + "\n"
    )


def _paper(results: list[Measured]) -> str:
    last = results[-1]
    rows = [
        f"| {one} | {two} | {PAPER[one, two]:.2f} | {PAPER[one, two] / PAPER[EXPANDED]:.2f} "
        f"| {last.errors[one][two] / _pair(last.errors, EXPANDED):.2f} |"
        for one in WAYS
        for two in WAYS
        if (one, two) in PAPER
    ]
    return (
        f"""## Beside the paper's

Each over that of E4M3 + expand for both; *here* is {last.model} at step {last.step}.

| m | v | paper | paper, relative | here, relative |
|---|---|---|---|---|
"""
        + "\n".join(rows)
        + "\n"
    )


def _pair(errors: dict[str, dict[str, float]], pair: tuple[str, str]) -> float:
    return errors[pair[0]][pair[1]]


def _micro(value: float) -> str:
    return f"{1e6 * value:.4g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--steps", nargs="+", type=int, default=[100, 300], help="steps whose moments are taken")
    parser.add_argument("--output", type=Path, default=RESULT)
    chosen = parser.parse_args()
    begin_s, results = time.perf_counter(), []
    for model in chosen.models:
        for step, loss, moments in states_of_training(model, chosen.steps):
            results.append(measure(model, step, loss, moments))
            print(f"{model}, step {step}: loss {loss:.3f}, ratio {results[-1].ratio:.3f}", file=sys.stderr, flush=True)
    text = report(results, time.perf_counter() - begin_s)
    print(text)
    chosen.output.write_text(text)
    rows = [asdict(each) | {"ratio": each.ratio} for each in results]
    chosen.output.with_suffix(".json").write_text(json.dumps({"machine": describe(), "results": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
