"""The table behind `wire: auto` says what its result files say, and the floor follows its rule."""

import re
from dataclasses import astuple, replace
from pathlib import Path

import pytest

from tahq.quant import get_codec
from tahq.quant.config import WireConfig
from tahq.quant.quality import FEWEST_STEPS, FLOOR, LARGEST_GAP, MEASURED, expected_gap, floor

ROOT = Path(__file__).parents[2]
ROWS = (  # of the two kinds of result files
    re.compile(r"\| `([^`]+)` \| `([^`]+)` \| ([\d.]+) \| [\d.]+ \| \S+ \| \S+ \| (\S+) \| \S+ \| (\d+) \|"),
    re.compile(r"\| `([^`]+)` \| `([^`]+)` \| [\d.]+ \| ([\d.]+) \| \S+ \| \S+ \| (\S+) (?:\| \S+ ){6}\| (\d+) \|"),
)


@pytest.mark.parametrize("path", sorted({row.result for row in MEASURED}))
def test_table_and_result_file_agree(path):
    text = (ROOT / path).read_text(encoding="utf-8")
    (steps,) = {int(number) for number in re.findall(r"runs of (?:\w+, )?(\d+) steps", text)}
    filed = set()
    for part in text.split("\n## "):
        model = "Llama" if part.startswith("llama") else "GPT-2 small"
        for a, g, bits, gap, seeds in (row for each in ROWS for row in each.findall(part)):
            filed.add((model, a, g, float(bits), float(gap), steps, int(seeds)))
    assert {(r.model, *astuple(r)[:6]) for r in MEASURED if r.result == path} == filed


def test_bits_are_those_of_the_codecs():
    for row in MEASURED:
        nbytes = sum(get_codec(spec).encoded_nbytes((16, 512, 768)) for spec in (row.activations, row.gradients))
        assert 8 * nbytes / (16 * 512 * 768) == pytest.approx(row.bits, abs=0.006)


def test_floor_has_the_fewest_bits_that_cost_little():
    most = {(row.model, row.activations, row.gradients): row for row in sorted(MEASURED, key=lambda row: row.steps)}
    bad = {(row.activations, row.gradients) for row in most.values() if row.gap > LARGEST_GAP}
    good = [r for r in most.values() if (r.activations, r.gradients) not in bad and r.steps >= FEWEST_STEPS]
    assert min(row.bits for row in good) == FLOOR.bits
    assert FLOOR in good
    assert (WireConfig().activations, WireConfig().gradients) == (FLOOR.activations, FLOOR.gradients)


def test_without_a_good_pair_the_best_is_taken_and_short_runs_do_not_count():
    of = {"bad": (0.05, 8.0), "worse": (0.2, 4.0), "short": (0.0, 2.0)}
    bad, worse, short = (replace(FLOOR, activations=name, gap=gap, bits=bits) for name, (gap, bits) in of.items())
    assert floor((worse, bad)) == bad == floor((bad, replace(short, steps=FEWEST_STEPS - 1)))
    assert floor((replace(short, gap=0.04, steps=9000), short, bad)).steps == 9000
    assert floor((replace(worse, gap=0.0), bad, replace(worse, model="another"))) == bad


def test_gap_is_told_where_it_is_known():
    assert f"{FLOOR.gap:+.3f} ({FLOOR.model}, {FLOOR.steps:,} steps" in expected_gap(FLOOR.activations, FLOOR.gradients)
    assert expected_gap("raw", "raw") == ""
