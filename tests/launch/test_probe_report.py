"""Sentences and plain values of a probe's report, from measurements made up for it."""

import math

import pytest

from tahq.pipeline.probe.cut_model import Wire
from tahq.pipeline.probe.result import ErrorSums, StepErrors, WireResult
from tahq_launch.analysis.probe_report import ProbeFacts, as_json, error_rows, head, notes, sentence

WIRE = Wire("tah:group=32", "fixed:bits=6,group=64,round=nearest")


def facts(**changes) -> ProbeFacts:
    known = {
        "title": "demo",
        "num_parameters": 1234,
        "num_cuts": 3,
        "weights": "random",
        "trained": False,
        "boundary": (2, 8, 64),
        "global_batch": 16,
        "first_step": 5,
        "num_batches": 2,
        "losses": (5.5, 5.25),
    }
    return ProbeFacts(**{**known, **changes})


def result(*errors: float, mean: float | None = None) -> WireResult:
    batches = tuple({"stage 0": ErrorSums(1.0, error, 0.0)} for error in errors)
    total = None if mean is None else {"stage 0": ErrorSums(4.0, 4.0 * mean, 0.0)}
    return WireResult(WIRE, (StepErrors(5, batches, total),))


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        (
            result(0.1, 0.2, mean=0.05),
            "holds with δ = 0.8; below the paper's 0.4 a step (0.2 at most) and below its 0.1",
        ),
        (result(0.1, 0.5, mean=0.2), "δ = 0.5; NOT below the paper's 0.4 a step (0.5 at most) and NOT below its 0.1"),
        (result(0.1), "holds with δ = 0.9; below the paper's 0.4 a step (0.1 at most)."),
        (result(0.3, 1.5, mean=0.2), "does not hold: an error of 1.5 is as large as the gradient itself"),
        (result(0.3, 0.2, mean=1.25), "does not hold: an error of 1.25 is"),
        (result(0.3, math.nan), "does not hold: with these codecs a gradient is NaN or infinite"),
    ],
)
def test_sentence_says_what_holds(measured, expected):
    assert sentence(measured).startswith("tah:group=32 / fixed:bits=6: Assumption 4.4 ")
    assert expected in sentence(measured)


def test_delta_is_rounded_down():
    assert "δ = 0.899;" in sentence(result(0.1004))


def test_head_says_what_was_probed():
    first, second = head(facts())
    assert first == "demo: 1,234 parameters in 4 stages, [2, 8, 64] crosses each cut; weights: random"
    assert second.startswith("steps 5 to 6, M = 2 of the batches of 16 samples at each; loss")
    assert "5.500, 5.250 nats" in second
    assert head(facts(losses=(5.5,)))[1].startswith("step 5, ")


def test_row_has_bits_and_errors():
    """688 and 816 bytes for 1,024 elements; for M → ∞ (4 · 0.1 − 0.1 − 0.2) / 2 over (4 − 2) / 2; cosine 1/√1.2."""
    (row,) = error_rows(facts(), [result(0.1, 0.2, mean=0.1)])
    assert row == ["1", "tah:group=32", "5.38", "fixed:bits=6", "6.38", "0.15", "0.2", "0.1", "0.05", "0.9129"]


def test_notes_are_about_what_was_measured():
    assert notes(facts(trained=True, num_batches=1), [result(0.1)]) == []
    said = notes(facts(), [result(0.1), result(0.1, 0.5, mean=0.2)])
    assert [part in line for part, line in zip(("random", "more bits", "1/2 is"), said, strict=True)] == [True] * 3


def test_json_has_null_for_what_is_not_finite():
    (wire,) = as_json(facts(), [result(0.1, math.nan)])["wires"]
    assert wire["step_errors"] == [0.1, None]
    assert wire["groups"] == {"stage 0": None}
    assert wire["delta"] is None
    assert wire["below_step_limit"] is False
    assert wire["below_expectation_limit"] is None
