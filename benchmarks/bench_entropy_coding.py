"""Does entropy coding of the codes pay for its time? What it saves, what it takes, and on which links that is worth it.

    python benchmarks/bench_entropy_coding.py [--data FILE-OR-FOLDER] [--repeats 30] [--output FILE.md]

`entropy_coders` has the coders: interleaved rANS and canonical Huffman, tables by width and by tensor. They get the
codes that our codecs send of the three activations, or gradients, of the fixture as one tensor [6, 512, 768]. Times
are the fastest of many repetitions that take turns, one thread, the `cpu` backend, and stand beside those of the
codecs themselves and of `tah`'s encoder. Times are of the thread, not of the clock, so that whatever else runs on the
machine counts less. Coding would replace the writing of bit planes, so that is timed too.

What was predicted is `PREDICTIONS`, written when the coders worked and had been tuned on Gaussian codes, before they
saw the fixture; entropies were known from bench_frontier. How far off still counts as held was settled after a first
run on a busy machine, with times by the clock. The result says what held.
"""

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from boundary_tensors import add_data_option, load_cuts
from entropy_coders import Array, Coded, huffman_decode, huffman_encode, rans_decode, rans_encode
from machine import describe
from numba import njit
from stream_codes import Codes, codes_of
from uniform_entropy import UniformSteps

from tahq.quant import get_codec
from tahq.quant.codec import Codec
from tahq.quant.cpu.planes import read_planes, write_planes

RESULT = Path(__file__).parent / "results" / "entropy_coding_epyc2_202611.md"
CASES = (
    ("activations", "tah"),
    ("activations", "wf:bits=3.5"),
    ("activations", "wf:bits=2.5"),
    ("gradients", "tah"),
    ("gradients", "fixed:bits=8"),
    ("gradients", "eden:bits=2"),
    ("gradients", "eden:bits=3"),
)
CODERS = {"rANS": (rans_encode, rans_decode), "Huffman": (huffman_encode, huffman_decode)}
RATES_MBIT = (10, 30, 100, 300, 1000)
UNIFORM_GROUP = 128
UNIFORM_BITS = ("2", "2.5", "3", "3.5", "4", "5")
KEY = 1


@dataclass(frozen=True, slots=True)
class Timed:
    """Nanoseconds an element, fastest of all repetitions."""

    encode_ns: float
    decode_ns: float


@dataclass(frozen=True, slots=True)
class CoderResult:
    """A coder on the codes of a case; bits an element."""

    bits: float
    time: Timed


@dataclass(frozen=True, slots=True)
class CaseResult:
    """One codec on one direction; bits an element, codes alone unless it says stream."""

    direction: str
    spec: str
    stream_bits: float
    code_bits: float
    entropy: float
    codec: Timed
    planes: Timed
    coders: dict[str, CoderResult]

    def saved(self, coder: str) -> float:
        """Bits an element."""
        return self.code_bits - self.coders[coder].bits

    def extra_ns(self, coder: str) -> float:
        """An element, both ends together: what the coder takes, less what the planes that it replaces do."""
        timed = self.coders[coder].time
        return timed.encode_ns + timed.decode_ns - self.planes.encode_ns - self.planes.decode_ns


@dataclass(frozen=True, slots=True)
class UniformResult:
    """wf at some bits, and uniform steps with an ideal coder at its error; bits an element of all that is sent."""

    spec: str
    sent_bits: float
    error: float
    uniform_bits: float
    saved_by_coding_wf: float


# -- predictions ------------------------------------------------------------------------------------


def _case(results: Sequence[CaseResult], direction: str, spec: str) -> CaseResult:
    return next(each for each in results if (each.direction, each.spec) == (direction, spec))


def _excess(results: Sequence[CaseResult], coder: str) -> float:
    return max(each.coders[coder].bits - each.entropy for each in results)


def _takes(results: Sequence[CaseResult], coder: str, least: float, most: float) -> bool:
    """Whether encoding and decoding, of all cases, take this much relative to tah's encoder."""
    unit_ns = _case(results, "activations", "tah").codec.encode_ns
    times = [each.coders[coder].time for each in results]
    return all(least <= ns / unit_ns <= most for timed in times for ns in (timed.encode_ns, timed.decode_ns))


def _pays_below(each: CaseResult, coder: str) -> float:
    """Mbit/s at which coding takes as long as it saves, one after the other."""
    extra_ns = each.extra_ns(coder)
    return each.saved(coder) / extra_ns * 1e3 if extra_ns > 0 else math.inf


Check = Callable[[Sequence[CaseResult], Sequence[UniformResult]], bool]
PREDICTIONS: tuple[tuple[str, Check], ...] = (
    (
        "rANS comes within 0.01 bits of the ideal, Huffman within 0.06.",
        lambda results, _: _excess(results, "rANS") < 0.01 and _excess(results, "Huffman") < 0.06,
    ),
    (
        "rANS takes 1 to 2 times as long as all of tah's encoder, both ways.",
        lambda results, _: _takes(results, "rANS", 1, 2),
    ),
    (
        "Huffman takes 0.5 to 1 times as long, both ways.",
        lambda results, _: _takes(results, "Huffman", 0.5, 1),
    ),
    (
        "One after the other, coding tah's codes is worth its time below 50 Mbit/s with rANS and 80 with Huffman, "
        "give or take a third.",
        lambda results, _: all(
            rate / 1.5 < _pays_below(_case(results, "activations", "tah"), coder) < rate * 1.5
            for coder, rate in (("rANS", 50), ("Huffman", 80))
        ),
    ),
    (
        "For wf it is worth it below half of that, and for none at 300 Mbit/s.",
        lambda results, _: (
            _pays_below(_case(results, "activations", "wf:bits=3.5"), "rANS") < 25
            and _pays_below(_case(results, "activations", "wf:bits=3.5"), "Huffman") < 40
            and all(_pays_below(each, coder) < 300 for each in results for coder in CODERS)
        ),
    ),
    (
        "Overlapped, it gains 7 % at most with tah and 5 % with wf and eden.",
        lambda results, _: all(
            each.saved(coder) / each.stream_bits < (0.07 if each.spec in ("tah", "fixed:bits=8") else 0.05)
            for each in results
            for coder in CODERS
        ),
    ),
    (
        "A codec made for entropy coding needs 0.25 to 0.35 bits less than wf at equal error, at 3 bits.",
        lambda _, uniform: any(
            each.spec.startswith("wf:bits=3,") and 0.25 < each.sent_bits - each.uniform_bits < 0.35 for each in uniform
        ),
    ),
)


# -- measuring --------------------------------------------------------------------------------------


@njit(cache=True, nogil=True)
def _write_all_planes(codes: Array, width: Array, planes: Array) -> int:
    at, words = 0, codes.view(np.uint64)
    for tile in range(codes.shape[0]):
        write_planes(words[tile], 0, np.int64(width[tile]), planes, at)
        at += width[tile] * words.shape[1]
    return at


@njit(cache=True, nogil=True)
def _read_all_planes(planes: Array, width: Array, codes: Array) -> None:
    at, words = 0, codes.view(np.uint64)
    for tile in range(codes.shape[0]):
        words[tile, :] = np.uint64(0)
        read_planes(planes, at, 0, np.int64(width[tile]), words[tile])
        at += width[tile] * words.shape[1]


def measure(direction: str, spec: str, x: torch.Tensor, repeats: int) -> CaseResult:
    """All times of one case; what is timed takes turns, so that a slow moment of the machine hits all alike."""
    codec = get_codec(spec, backend="cpu")
    buf = codec.encode(x, key=KEY)
    sent = _codes(codec, buf, x.shape)
    codes, width = sent.codes.to(torch.uint8).numpy(), sent.width.to(torch.uint8).numpy()
    coded = {name: encode(codes, width) for name, (encode, _) in CODERS.items()}
    _check_lossless(coded, codes, width)
    planes, back = np.empty(codes.size, np.uint8), np.empty_like(codes)
    actions: dict[str, Callable[[], object]] = {
        "codec encode": lambda: codec.encode(x, key=KEY),
        "codec decode": lambda: codec.decode(buf, x.shape, x.dtype, key=KEY),
        "planes encode": lambda: _write_all_planes(codes, width, planes),
        "planes decode": lambda: _read_all_planes(planes, width, back),
    }
    for name, (encode, decode) in CODERS.items():
        actions[f"{name} encode"] = lambda encode=encode: encode(codes, width)  # type: ignore[misc]
        actions[f"{name} decode"] = lambda decode=decode, name=name: decode(coded[name], width, codes.shape[1])  # type: ignore[misc]
    fastest = _fastest_s(actions, repeats)
    timed = {what: _timed(fastest, what, x.numel()) for what in ("codec", "planes", *CODERS)}
    return CaseResult(
        direction=direction,
        spec=spec,
        stream_bits=8 * buf.numel() / x.numel(),
        code_bits=sent.num_bits / x.numel(),
        entropy=sent.entropy_bits / x.numel(),
        codec=timed["codec"],
        planes=timed["planes"],
        coders={name: CoderResult(8 * coded[name].nbytes / x.numel(), timed[name]) for name in CODERS},
    )


def measure_uniform(x: torch.Tensor) -> list[UniformResult]:
    """What uniform steps and an ideal coder need for the error of wf, at several bits."""
    uniform = UniformSteps(x, UNIFORM_GROUP)
    specs = [f"wf:bits={bits},group={UNIFORM_GROUP}" for bits in UNIFORM_BITS]
    return [_measure_uniform(x, uniform, spec) for spec in specs]


def _measure_uniform(x: torch.Tensor, uniform: UniformSteps, spec: str) -> UniformResult:
    codec = get_codec(spec)
    buf = codec.encode(x)
    error = float((codec.decode(buf, x.shape) - x.float()).norm() / x.float().norm())
    codes = _codes(codec, buf, x.shape)
    saved = (codes.num_bits - codes.entropy_bits) / x.numel()
    return UniformResult(spec, 8 * buf.numel() / x.numel(), error, uniform.bits(uniform.step_of(error)), saved)


def _codes(codec: Codec, buf: torch.Tensor, shape: torch.Size) -> Codes:
    codes = codes_of(codec.spec, buf, shape)
    if codes is None:
        raise ValueError(f"{codec.spec} sends no codes")
    return codes


def _check_lossless(coded: dict[str, Coded], codes: Array, width: Array) -> None:
    for name, (_, decode) in CODERS.items():
        if not np.array_equal(decode(coded[name], width, codes.shape[1]), codes):
            raise AssertionError(f"{name} does not give back what it was given")


def _fastest_s(actions: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    fastest = {}
    for repeat in range(repeats + 1):  # the first compiles and is not counted
        for name, action in actions.items():
            begin = time.thread_time()
            action()
            elapsed = time.thread_time() - begin
            if repeat:
                fastest[name] = min(elapsed, fastest.get(name, elapsed))
    return fastest


def _timed(fastest: dict[str, float], what: str, elements: int) -> Timed:
    return Timed(fastest[f"{what} encode"] / elements * 1e9, fastest[f"{what} decode"] / elements * 1e9)


# -- the result file --------------------------------------------------------------------------------


def report(results: Sequence[CaseResult], uniform: Sequence[UniformResult], repeats: int, seconds: float) -> str:
    tah = next(each for each in results if each.spec == "tah").codec
    lines = [
        "# Entropy coding of codes: what it saves, what it takes",
        "",
        f"{describe()}. `python benchmarks/bench_entropy_coding.py`, {seconds:.0f} s; times of one thread, fastest of "
        f"{repeats}.",
        "",
        "Codes of the fixture's three activations, or gradients, as one tensor [6, 512, 768]. *Ideal*: entropy given "
        "the frequencies by width. Frequencies come from every eighth tile and are sent; lengths include them. Decoded "
        "codes were compared with those coded.",
        "",
        "## Predictions, and whether they held",
        "",
        "| predicted before the first run (margins: see the script) | held |",
        "|---|---|",
        *(f"| {text} | {'yes' if holds(results, uniform) else '**no**'} |" for text, holds in PREDICTIONS),
        "",
        "## Bits and time",
        "",
        f"In brackets: relative to `tah`'s encoder in the same run, {tah.encode_ns:.2f} ns an element (its decoder: "
        f"{tah.decode_ns:.2f}). *Codec* is what the row's own codec takes in all, *planes* the part of it that a coder "
        "would replace.",
        "",
        "| direction | codec | code bits | ideal | coder | bits | saved | encode ns | decode ns | codec | planes |",
        "|---" * 11 + "|",
    ]
    for each in results:
        lines += [_time_row(each, name, coder, tah.encode_ns) for name, coder in each.coders.items()]
    lines += ["", "## At which rate of the link it pays", "", *_rate_table(results)]
    lines += ["", "## A codec made for entropy coding", "", *_uniform_table(uniform)]
    return "\n".join([*lines, ""])


def _time_row(each: CaseResult, name: str, coder: CoderResult, unit_ns: float) -> str:
    times = [f"{ns:.2f} ({ns / unit_ns:.2f})" for ns in (coder.time.encode_ns, coder.time.decode_ns)]
    pairs = [f"{timed.encode_ns:.2f} + {timed.decode_ns:.2f}" for timed in (each.codec, each.planes)]
    cells = [each.direction, f"`{each.spec}`", f"{each.code_bits:.3f}", f"{each.entropy:.3f}", name]
    cells += [f"{coder.bits:.3f}", f"{each.code_bits - coder.bits:.3f}", *times, *pairs]
    return f"| {' | '.join(cells)} |"


def _rate_table(results: Sequence[CaseResult]) -> list[str]:
    rates = " | ".join(f"{rate} Mbit/s" for rate in RATES_MBIT)
    lines = [
        "*One after the other*: encode, send, decode; coding is worth its time below the rate saved bits/(time to "
        "encode and decode − that of the planes). Per cent: change of the time on the wire and in the coder, relative "
        "to the wire without. *Overlapped*: coding goes on while the link sends, and only the link counts; this takes "
        "a core that has nothing else to do, for the given share of the time at 100 Mbit/s (the slower of both ends).",
        "",
        f"| direction | codec | coder | pays below | {rates} | overlapped | core at 100 Mbit/s |",
        "|---" * (6 + len(RATES_MBIT)) + "|",
    ]
    for each in results:
        lines += [_rate_row(each, name, coder) for name, coder in each.coders.items()]
    return lines


def _rate_row(each: CaseResult, name: str, coder: CoderResult) -> str:
    saved, extra_ns = each.saved(name), each.extra_ns(name)
    changes = [(extra_ns * 1e-3 * rate_mbit - saved) / each.stream_bits for rate_mbit in RATES_MBIT]
    wire_ns = (each.stream_bits - saved) / 100 * 1e3
    cells = [each.direction, f"`{each.spec}`", name, f"{_pays_below(each, name):.0f} Mbit/s"]
    cells += [f"{change:+.1%}" for change in changes]
    cells += [f"{-saved / each.stream_bits:+.1%}", f"{max(coder.time.encode_ns, coder.time.decode_ns) / wire_ns:.0%}"]
    return f"| {' | '.join(cells)} |"


def _uniform_table(uniform: Sequence[UniformResult]) -> list[str]:
    lines = [
        "`uniform_entropy`: wf's transform with one uniform step a token, codes at the ideal length given the level of "
        "their tile, at the step that has wf's error. No coder gets below; a real one adds about what the tables above "
        "say, and its tables.",
        "",
        "| wf | bits | error | uniform steps, ideal coder: bits | saved | of it, by coding wf's own codes (ideal) |",
        "|---|---|---|---|---|---|",
    ]
    for each in uniform:
        cells = [f"{each.sent_bits:.3f}", f"{each.error:.4f}", f"{each.uniform_bits:.3f}"]
        cells += [f"{each.sent_bits - each.uniform_bits:.3f}", f"{each.saved_by_coding_wf:.3f}"]
        lines.append(f"| `{each.spec}` | {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_data_option(parser)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    begin, cuts = time.perf_counter(), load_cuts(options.data)
    tensors = {name: torch.cat([cut.of(name) for cut in cuts]) for name in ("activations", "gradients")}
    results = [measure(direction, spec, tensors[direction], options.repeats) for direction, spec in CASES]
    uniform = measure_uniform(tensors["activations"])
    text = report(results, uniform, options.repeats, time.perf_counter() - begin)
    options.output.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
