"""Moments of AdamW in eight bits: the error of m/√v (COAT, Tables 1 and 9), on moments of a real training.

    python benchmarks/bench_coat_states.py [--models gpt2 llama] [--steps 100 300] [--output FILE.md]

A GPT-2 and a Llama of some 2 million weights train on the standard library's source with torch's AdamW in fp32; at the
given steps their moments are stored and read again by `tahq.memory.coat.fp8_groups`, as `fp8_adamw` keeps them. The
figure of a pair of formats is the mean of (m'/(√v' + ε) − m/(√v + ε))² over the weights, where m' and v' are the values
read back. COAT divides by √(v + ε); here ε = 10⁻⁸ is where AdamW has it, since it would hide the smaller half of all v.

Where a format reads a v that is not 0 as 0, m/ε replaces m/√v, and a few such weights outweigh all others by orders of
magnitude. So the tables are over the weights whose v no format loses, all but some in ten thousand; the share of lost
weights and the error over all weights stand beside.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from harness import Table, main, say
from torch.nn import functional

from tahq.data.batches import BatchSource
from tahq.data.config import DataConfig
from tahq.data.dataset import load_dataset
from tahq.data.tokenizer import load_tokenizer
from tahq.memory.coat.fp8_groups import (
    LARGEST_SCALE,
    NUM_POWERS,
    STEPS_PER_OCTAVE,
    as_groups,
    decode,
    encode,
    moment_format,
)
from tahq.memory.stored_slice import build_slice
from tahq.models.config import ModelConfig
from tahq.models.keyed_dropout import RandomContext
from tahq.models.model_spec import load_spec
from tahq.models.partition import BlockRange

BATCH, SEQ_LEN = 16, 128
RATE, BETAS, EPSILON, WEIGHT_DECAY, CLIP_NORM, WARM_UP = 1e-3, (0.9, 0.95), 1e-8, 0.1, 1.0, 20
MODELS = {
    "gpt2": ModelConfig(family="gpt2", num_layers=4, hidden_size=192, num_heads=6),
    "llama": ModelConfig(family="llama", num_layers=4, hidden_size=192, num_heads=6, intermediate_size=512),
}
FORMATS = ("E4M3", "E5M2", "DE8")
KINDS = [f"{name}{expanded}" for name in FORMATS for expanded in ("", " + expand")]
PLAIN, EXPANDED = ("E4M3", "E4M3"), ("E4M3 + expand", "E4M3 + expand")
PAPER_RATIO = 1.63
Moments = list[tuple[torch.Tensor, torch.Tensor]]
"""m and v of every parameter, fp32."""
Errors = dict[tuple[str, str], float]
"""By the formats of m and v."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The errors at one step of one training.

    `errors`: over weights whose v no format loses. `all_errors`: over all weights. `mean_square`: of m/(√v + ε)
    itself. `lost`: share of v > 0 that is read as 0. `ranges`: median of max/min in a group, of m and of v.
    """

    name: str
    step: int
    loss: float
    mean_square: float
    errors: Errors
    all_errors: Errors
    lost: dict[str, float]
    ranges: tuple[float, float]


def states_of_training(model: str, at_steps: Sequence[int]) -> Iterator[tuple[int, float, Moments]]:
    """Train on the standard library's source, byte by byte: step, its loss in nats per token, all moments."""
    data = DataConfig(text="stdlib", seq_len=SEQ_LEN)
    tokenizer = load_tokenizer(data)
    spec = load_spec(MODELS[model], vocab_size=tokenizer.vocab_size, seq_len=SEQ_LEN)
    blocks = BlockRange(0, spec.num_layers, spec.num_layers)
    module = build_slice(spec, blocks, seed=1, device="cpu", random=RandomContext(1))
    batches = BatchSource(load_dataset(data, tokenizer), seed=1, global_batch=BATCH, micro_batch=BATCH)
    named = module.canonical_parameters()
    decayed = [p for name, p in named.items() if module.is_decayed(name, p)]
    others = [p for name, p in named.items() if not module.is_decayed(name, p)]
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=BETAS, eps=EPSILON, foreach=False)
    for step in range(1, max(at_steps) + 1):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(step / WARM_UP, 1.0)
        tokens, labels = batches.train(step - 1).micro_batch(0)
        loss = functional.cross_entropy(module(tokens).flatten(0, 1), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        if step in at_steps:
            states = [optimizer.state[p] for p in named.values()]
            yield step, loss.item(), [(state["exp_avg"].clone(), state["exp_avg_sq"].clone()) for state in states]


def measure(model: str, step: int, loss: float, moments: Moments) -> Measured:
    first, second = (torch.cat([each[place].reshape(-1) for each in moments]).double() for place in (0, 1))
    exact = _quotient(first, second)
    firsts, seconds = ({kind: _read_back(moments, place, kind) for kind in KINDS} for place in (0, 1))
    kept = torch.stack([(read > 0) | (second == 0) for read in seconds.values()]).all(0)
    errors, all_errors = (
        {
            (one, two): _mean_square((_quotient(firsts[one], seconds[two]) - exact)[where])
            for one in KINDS
            for two in KINDS
        }
        for where in (kept, torch.ones_like(kept))
    )
    lost = {kind: ((seconds[kind] == 0) & (second > 0)).double().mean().item() for kind in KINDS}
    ranges = (_median_range(moments, 0), _median_range(moments, 1))
    return Measured(model, step, loss, _mean_square(exact), errors, all_errors, lost, ranges)


def _read_back(moments: Moments, place: int, kind: str) -> torch.Tensor:
    """All values of m or v once stored, parameter by parameter, and read again."""
    format, expand = kind.removesuffix(" + expand").lower(), kind.endswith("expand")
    read = []
    for x in (each[place].reshape(-1) for each in moments):
        groups = as_groups(x)
        if format == "de8":
            values = _through_de8(groups, expand, is_signed=place == 0)
        else:
            by = moment_format(format, expand)
            values = decode(*encode(groups, by), by)
        read.append(values.view(-1)[: x.numel()])
    return torch.cat(read).double()


def _through_de8(groups: torch.Tensor, expand: bool, is_signed: bool) -> torch.Tensor:
    """Groups [P, 128] rounded to DE8, the dynamic exponent of 8-bit Adam (Dettmers et al. 2021), in fp64.

    Seven decades, 10⁻⁷ … 1, each cut into equal parts, twice as many as the decade below (and twice as many in all
    without a sign), whose middles are the magnitudes; the last is 1, so that the largest of a group is exact.
    """
    first = 1 if is_signed else 2
    cuts = [(10.0 ** (decade - 6), first << decade) for decade in range(7)]
    middles = [top * (0.1 + 0.9 * (part + 0.5) / parts) for top, parts in cuts for part in range(parts)]
    table = torch.tensor([0.0, *middles[:-1], 1.0], dtype=torch.float64)
    sizes = groups.double().abs()
    scales = groups.abs().amax(1).clamp(max=LARGEST_SCALE).to(torch.bfloat16).double()[:, None]
    ratios = torch.where(scales > 0, sizes / scales, 0.0)
    k = torch.ones(len(groups), 1, dtype=torch.float64)
    if expand:
        smallest = torch.where(ratios > 0, ratios, torch.inf).amin(1)
        exponents = 2 ** (torch.arange(NUM_POWERS, dtype=torch.float64) / STEPS_PER_OCTAVE - 4)
        wanted = table[1].log() / smallest.clamp(max=1).log()  # ∞ at ratio 1
        usable = (torch.searchsorted(exponents, wanted, right=True) - 1).clamp(min=0)
        k = torch.where(smallest < ratios.amax(1), exponents[usable], 1.0)[:, None]
    codes = torch.bucketize(ratios**k, (table[1:] + table[:-1]) / 2)
    return (table[codes] ** (1 / k) * scales * groups.sign()).float()


def _quotient(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return first / (second.sqrt() + EPSILON)


def _mean_square(x: torch.Tensor) -> float:
    return x.square().mean().item()


def _median_range(moments: Moments, place: int) -> float:
    groups = torch.cat([as_groups(each[place].reshape(-1).abs()) for each in moments])
    smallest = torch.where(groups > 0, groups, torch.inf).amin(1)
    largest = groups.amax(1)
    return (largest / smallest)[largest > 0].median().item()


def summary(each: Measured) -> list[object]:
    ratio = each.errors[PLAIN] / each.errors[EXPANDED]
    return [
        each.name,
        each.step,
        f"{each.loss:.2f}",
        f"{each.ranges[0]:.0f}, {each.ranges[1]:.0f}",
        *map(_micro, (each.mean_square, each.errors[PLAIN], each.errors[EXPANDED])),
        f"{ratio:.2f}",
        "yes" if ratio >= PAPER_RATIO else "**no**",
        *map(_micro, (each.all_errors[PLAIN], each.all_errors[EXPANDED])),
    ]


def _micro(value: float) -> str:
    return f"{1e6 * value:.4g}"


def tables(options: argparse.Namespace) -> Iterator[Table]:
    results = []
    for model in options.models:
        for state in states_of_training(model, options.steps):
            results.append(measure(model, *state))
            say(f"{model}, step {results[-1].step}: loss {results[-1].loss:.3f}")
    columns = ("model", "step", "loss", "range of m, v", "(m/√v)²", "E4M3", "E4M3 + expand", "ratio")
    yield Table(
        (*columns, f"at least {PAPER_RATIO}", "all weights: E4M3", "E4M3 + expand"),
        map(summary, results),
        f"4 blocks of 192 channels, {BATCH} × {SEQ_LEN} bytes per step, torch's AdamW in fp32 (lr 10⁻³, β 0.9 and "
        "0.95, ε 10⁻⁸). Errors in 10⁻⁶, of groups of 128: scale in bf16, k in a byte. DE8 of v has no sign bit, as in "
        f"8-bit Adam. The paper's ratio is {PAPER_RATIO}. *Range*: median of max/min over the groups.",
        heading="Expansion of both against neither, E4M3",
    )
    for each in results:
        rows = [[one, *(_micro(each.errors[one, two]) for two in KINDS)] for one in KINDS]
        rows.append(["share of v > 0 read as 0", *(f"{each.lost[kind]:.2g}" for kind in KINDS)])
        yield Table((r"m \ v", *KINDS), rows, heading=f"{each.name}, step {each.step}")


if __name__ == "__main__":
    main(
        __doc__,
        tables,
        {
            "--models": {"nargs": "+", "choices": list(MODELS), "default": list(MODELS)},
            "--steps": {"nargs": "+", "type": int, "default": [100, 300], "help": "steps whose moments are taken"},
        },
    )
