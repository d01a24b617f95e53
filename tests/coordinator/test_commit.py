"""PREPAREs in, one COMMIT out, whatever the order."""

import math
from fractions import Fraction

import pytest
from coordinator.conftest import make_prepare
from hypothesis import given
from hypothesis import strategies as st

from tahq.coordinator import steps
from tahq.coordinator.steps import check_prepare, clip_factor, global_norm, is_repeated
from tahq.errors import NonFiniteError, RemoteProtocolError
from tahq.pipeline.config import TrainingConfig

NAMES = ("stage 0 (a, pid 1)", "stage 1 (b, pid 2)", "stage 2 (c, pid 3)")


def decide(prepares, num_steps=100, skipped_in_a_row=0, snapshot_every=None, *, stop=False, **training):
    settings = {"num_steps": num_steps, "snapshot_every": snapshot_every, "skipped_in_a_row": skipped_in_a_row}
    return steps.decide(TrainingConfig(epochs=1, **training), prepares, NAMES, **settings, stop=stop)


def all_prepares(step=0, **changes):
    return [make_prepare(step, stage, **changes) for stage in range(3)]


@given(numbers=st.lists(st.floats(0, 1e300), max_size=20), cuts=st.tuples(st.integers(0, 20), st.integers(0, 20)))
def test_norm_does_not_depend_on_how_parameters_are_divided_into_stages(numbers, cuts):
    low, high = sorted(cuts)
    divided = [numbers[:low], numbers[low:high], numbers[high:]]
    assert steps.norm_of([make_prepare(0, stage, norm2=divided[stage]) for stage in range(3)]) == global_norm(numbers)


@given(st.lists(st.floats(0, 1e300), max_size=20))
def test_norm_is_the_exact_sum_rounded_once(numbers):
    assert global_norm(numbers) == math.sqrt(float(sum(map(Fraction, numbers), Fraction(0))))


@pytest.mark.parametrize(
    ("numbers", "norm"),
    [([], 0.0), ([9.0, 16.0], 5.0), ([1e308] * 3, math.inf), ([math.inf, 1.0], math.inf), ([1.0, math.nan], math.nan)],
)
def test_norm_of_nothing_of_too_much_and_of_nan(numbers, norm):
    assert global_norm(numbers) == pytest.approx(norm, nan_ok=True, rel=0)


@pytest.mark.parametrize(
    ("norm", "clip_norm", "factor"),
    [(5.0, 1.0, 0.2), (1.0, 1.0, 1.0), (0.5, 1.0, 1.0), (0.0, 1.0, 1.0), (5.0, None, 1.0), (math.inf, 1.0, 0.0)],
)
def test_clip_factor_is_the_plain_quotient_never_above_one(norm, clip_norm, factor):
    assert clip_factor(norm, clip_norm) == factor


def test_gradients_are_clipped_by_the_norm_over_all_stages():
    decision = decide([make_prepare(0, stage, norm2=[3.0, 1.0]) for stage in range(3)], clip_norm=1.0)
    assert (decision.apply, decision.clip_factor) == (True, 1.0 / math.sqrt(12.0))


@pytest.mark.parametrize(
    "change",
    [{"finite": False}, {"norm2": [math.nan]}, {"norm2": [math.inf]}, {"norm2": [1e308, 1e308]}],
)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_non_finite_anywhere_skips_the_step_everywhere(change, stage):
    prepares = all_prepares()
    prepares[stage] = make_prepare(0, stage, **change)
    decision = decide(prepares, clip_norm=1.0)
    assert (decision.apply, decision.clip_factor) == (False, 1.0)


def test_non_finite_loss_skips_the_step():
    assert not decide([*all_prepares()[:2], make_prepare(0, 2, loss_sum=math.nan)]).apply


def test_halt_names_the_stages_with_nan():
    prepares = [make_prepare(0, 0), make_prepare(0, 1, finite=False), make_prepare(0, 2, norm2=[math.nan])]
    with pytest.raises(NonFiniteError, match=r"stage 1 \(b, pid 2\), stage 2 \(c, pid 3\) .training.non_finite"):
        decide(prepares, non_finite="halt")


@pytest.mark.parametrize(
    ("stage", "before", "changes", "reason"),
    [
        (1, {}, {"norm2": [9.0]}, r"stage 1 \(b, pid 2\) prepared step 0 twice"),
        (1, None, {"norm2": [-1.0]}, r"stage 1 .* negative"),
        (2, None, {"loss_sum": None}, r"stage 2 .* without a loss"),
        (1, None, {"step": -1}, r"stage 1 \(b, pid 2\) prepared step -1 while step 0 is due"),
    ],
)
def test_impossible_prepares_name_the_peer(stage, before, changes, reason):
    earlier = None if before is None else make_prepare(0, stage)
    step = changes.pop("step", 0)
    with pytest.raises(RemoteProtocolError, match=reason):
        check_prepare(make_prepare(step, stage, **changes), 0, earlier, NAMES[stage], is_last=stage == 2)


def test_the_same_prepare_is_a_repetition_also_with_nan():
    before, again = (make_prepare(0, 1, norm2=[float("nan")]) for _ in range(2))
    assert is_repeated(again, before)
    assert not is_repeated(make_prepare(1, 1, norm2=[float("nan")]), before)
    assert not is_repeated(make_prepare(0, 1), before)
    assert not is_repeated(before, None)
