"""The table behind `wire: auto` says what its result files say, and the floor follows its rule."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tahq.quant import get_codec
from tahq.quant.config import WireConfig
from tahq.quant.quality import FEWEST_STEPS, FLOOR, LARGEST_GAP, MEASURED, expected_gap, floor

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"\| `([^`]+)` \| `([^`]+)` \| ([\d.]+) \| [\d.]+ \| \S+ \| \S+ \| (\S+) \| \S+ \| (\d+) \|")


@pytest.mark.parametrize("path", sorted({row.result for row in MEASURED}))
def test_table_and_result_file_agree(path):
    text = (ROOT / path).read_text(encoding="utf-8")
    (steps,) = {int(number) for number in re.findall(r"runs of \w+, (\d+) steps", text)}
    filed = {(a, g, float(bits), float(gap), steps, int(seeds)) for a, g, bits, gap, seeds in ROW.findall(text)}
    tabled = {(r.activations, r.gradients, r.bits, r.gap, r.steps, r.seeds) for r in MEASURED if r.result == path}
    assert tabled == filed


def test_bits_are_those_of_the_codecs():
    shape = (16, 512, 768)
    for row in MEASURED:
        nbytes = sum(get_codec(spec).encoded_nbytes(shape) for spec in (row.activations, row.gradients))
        assert 8 * nbytes / (16 * 512 * 768) == pytest.approx(row.bits, abs=0.006)


def test_floor_has_the_fewest_bits_that_cost_little():
    good = [row for row in MEASURED if row.gap <= LARGEST_GAP and row.steps >= FEWEST_STEPS]
    assert min(row.bits for row in good) == FLOOR.bits
    assert FLOOR in good
    assert (WireConfig().activations, WireConfig().gradients) == (FLOOR.activations, FLOOR.gradients)


def test_without_a_good_pair_the_best_is_taken_and_short_runs_do_not_count():
    bad, worse = (replace(FLOOR, gap=gap, bits=bits) for gap, bits in ((0.05, 8.0), (0.2, 4.0)))
    assert floor((worse, bad)) == bad
    assert floor((bad, replace(FLOOR, gap=0.0, bits=2.0, steps=FEWEST_STEPS - 1))) == bad


def test_gap_is_told_where_it_is_known():
    assert f"{FLOOR.gap:+.3f} nats" in expected_gap(FLOOR.activations, FLOOR.gradients)
    assert expected_gap("raw", "raw") == ""
