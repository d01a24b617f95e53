"""PREPAREs in, one COMMIT out, whatever the order."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tahq.coordinator.commit import CommitLedger, CommitRules, clip_factor, global_norm, is_due
from tahq.errors import DataError, NonFiniteError, RemoteProtocolError

NAMES = ("stage 0 (a, pid 1)", "stage 1 (b, pid 2)", "stage 2 (c, pid 3)")


def ledger(total_steps=100, first_step=0, **rules):
    return CommitLedger(CommitRules(first_step, total_steps, **rules), NAMES, 0.0)


def decide(ledger, prepares, now_s=1.0, **options):
    decisions = [ledger.take(prepare, now_s, **options) for prepare in prepares]
    (decision,) = [decision for decision in decisions if decision is not None]
    return decision


def all_prepares(prepare, step=0, **changes):
    return [prepare(step, stage, **changes) for stage in range(3)]


def test_commit_waits_for_the_last_stage(prepare):
    books = ledger()
    assert books.take(prepare(0, 2), 0.5) is None
    assert books.take(prepare(0, 0), 0.6) is None
    assert books.waiting_for == (1,)
    commit, record = books.take(prepare(0, 1), 2.0)
    assert (commit.step, commit.apply, commit.clip_factor) == (0, True, 1.0)
    assert (record.step, record.loss, record.tokens, record.step_time_s) == (1, 2.0, 16, 2.0)
    assert record.tokens_per_s == 8.0
    assert record.grad_norm == math.sqrt(0.25 * 3 + 0.5 + 1.0 + 1.5)
    assert books.step == 1


squares = st.lists(st.floats(0, 1e300), max_size=6)
orders = st.permutations([0, 0, 1, 1, 2, 2])


@given(norm2=st.tuples(squares, squares, squares), order=orders, clip=st.floats(1e-3, 1e3))
def test_any_order_and_duplicates_give_the_same_bits(prepare, norm2, order, clip):
    prepares = [prepare(0, stage, norm2=norm2[stage]) for stage in range(3)]
    expected = decide(ledger(clip_norm=clip), prepares)
    assert decide(ledger(clip_norm=clip), [prepares[stage] for stage in order]) == expected


@given(numbers=st.lists(st.floats(0, 1e300), max_size=20), cuts=st.tuples(st.integers(0, 20), st.integers(0, 20)))
def test_norm_does_not_depend_on_how_parameters_are_divided_into_stages(prepare, numbers, cuts):
    low, high = sorted(cuts)
    divided = [numbers[:low], numbers[low:high], numbers[high:]]
    _, record = decide(ledger(), [prepare(0, stage, norm2=divided[stage]) for stage in range(3)])
    assert record.grad_norm == global_norm(numbers)


@given(st.lists(st.floats(0, 1e300), max_size=20))
def test_norm_is_the_exact_sum_rounded_once(numbers):
    assert global_norm(numbers) == math.sqrt(float(sum(map(Fraction, numbers), Fraction(0))))


@pytest.mark.parametrize(
    ("numbers", "norm"), [([], 0.0), ([9.0, 16.0], 5.0), ([1e308] * 3, math.inf), ([math.inf, 1.0], math.inf)]
)
def test_norm_of_nothing_and_of_too_much(numbers, norm):
    assert global_norm(numbers) == norm


def test_norm_of_nan_is_nan():
    assert math.isnan(global_norm([1.0, math.nan]))


@pytest.mark.parametrize(
    ("norm", "clip_norm", "factor"),
    [(5.0, 1.0, 0.2), (1.0, 1.0, 1.0), (0.5, 1.0, 1.0), (0.0, 1.0, 1.0), (5.0, None, 1.0), (math.inf, 1.0, 0.0)],
)
def test_clip_factor_is_the_plain_quotient_never_above_one(norm, clip_norm, factor):
    assert clip_factor(norm, clip_norm) == factor


def test_gradients_are_clipped_by_the_norm_over_all_stages(prepare):
    commit, record = decide(ledger(clip_norm=1.0), [prepare(0, stage, norm2=[3.0, 1.0]) for stage in range(3)])
    assert record.grad_norm == math.sqrt(12.0)
    assert commit.clip_factor == 1.0 / math.sqrt(12.0)


@pytest.mark.parametrize(
    "change",
    [{"finite": False}, {"norm2": [math.nan]}, {"norm2": [math.inf]}, {"norm2": [1e308, 1e308]}],
)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_non_finite_anywhere_skips_the_step_everywhere(prepare, change, stage):
    prepares = all_prepares(prepare)
    prepares[stage] = prepare(0, stage, **change)
    commit, record = decide(ledger(clip_norm=1.0), prepares)
    assert not commit.apply
    assert commit.clip_factor == 1.0
    assert record.skipped


def test_non_finite_loss_skips_the_step(prepare):
    commit, _ = decide(ledger(), [*all_prepares(prepare)[:2], prepare(0, 2, loss_sum=math.nan)])
    assert not commit.apply


def test_only_skips_in_a_row_are_counted(prepare):
    books = ledger(max_skipped_in_a_row=2)
    for step, finite in enumerate([False, False, True, False, False]):
        decide(books, all_prepares(prepare, step, finite=finite))
    with pytest.raises(NonFiniteError, match=r"halted at step 5.*3 steps in a row"):
        decide(books, all_prepares(prepare, 5, finite=False))


def test_halt_names_the_stages_with_nan(prepare):
    prepares = [prepare(0, 0), prepare(0, 1, finite=False), prepare(0, 2, norm2=[math.nan])]
    with pytest.raises(NonFiniteError, match=r"stage 1 \(b, pid 2\), stage 2 \(c, pid 3\) .training.non_finite"):
        decide(ledger(non_finite="halt"), prepares)


@pytest.mark.parametrize("step", [-1, 0, 2, 99])
def test_wrong_step_names_the_peer(prepare, step):
    books = ledger()
    decide(books, all_prepares(prepare, norm2=[1.0]))
    with pytest.raises(RemoteProtocolError, match=rf"stage 1 \(b, pid 2\) prepared step {step} while step 1 is due"):
        books.take(prepare(step, 1), 2.0)


def test_prepare_that_is_repeated_after_the_commit_changes_nothing(prepare):
    books = ledger()
    decide(books, all_prepares(prepare))
    assert books.take(prepare(0, 1), 2.0) is None
    assert books.waiting_for == (0, 1, 2)


def test_second_and_different_prepare_names_the_peer(prepare):
    books = ledger()
    books.take(prepare(0, 1), 0.0)
    with pytest.raises(RemoteProtocolError, match=r"stage 1 \(b, pid 2\) prepared step 0 twice"):
        books.take(prepare(0, 1, norm2=[9.0]), 0.0)


def test_repeated_prepare_with_nan_is_the_same_prepare(prepare):
    books = ledger()
    assert books.take(prepare(0, 1, norm2=[float("nan")]), 0.0) is None
    assert books.take(prepare(0, 1, norm2=[float("nan")]), 0.0) is None


def test_negative_squared_norm_names_the_peer(prepare):
    with pytest.raises(RemoteProtocolError, match=r"stage 1 .* negative"):
        ledger().take(prepare(0, 1, norm2=[-1.0]), 0.0)


def test_last_stage_must_give_a_loss(prepare):
    with pytest.raises(RemoteProtocolError, match=r"stage 2 .* without a loss"):
        ledger().take(prepare(0, 2, loss_sum=None), 0.0)


def test_different_batches_name_both_stages(prepare):
    prepares = [*all_prepares(prepare)[:2], prepare(0, 2, batch_digest="other")]
    with pytest.raises(DataError, match=r"stage 0 \(a, pid 1\) and stage 2 \(c, pid 3\) .* batch0 and other"):
        decide(ledger(), prepares)


def test_step_without_counted_tokens_has_no_loss(prepare):
    _, record = decide(ledger(), [*all_prepares(prepare)[:2], prepare(0, 2, loss_sum=0.0, tokens=0)])
    assert math.isnan(record.loss)


def test_stop_request_makes_this_step_the_last_with_a_snapshot(prepare):
    commit, _ = decide(ledger(eval_every=10), all_prepares(prepare), stop_requested=True)
    assert (commit.stop, commit.snapshot, commit.evaluate) == (True, True, False)


def test_flags_follow_the_schedules_and_the_last_step_has_all(prepare):
    books = ledger(total_steps=7, eval_every=2, snapshot_every=3)
    commits = [decide(books, all_prepares(prepare, step))[0] for step in range(7)]
    assert [c.step for c in commits if c.evaluate] == [1, 3, 5, 6]
    assert [c.step for c in commits if c.snapshot] == [2, 5, 6]
    assert [c.step for c in commits if c.stop] == [6]


def test_continued_run_keeps_the_schedules_of_the_whole(prepare):
    books = ledger(total_steps=8, first_step=5, snapshot_every=3)
    commits = [decide(books, all_prepares(prepare, step))[0] for step in range(5, 8)]
    assert [c.step for c in commits if c.snapshot] == [5, 7]


def test_evaluation_is_not_counted_into_the_step_after_it(prepare):
    books = ledger()
    decide(books, all_prepares(prepare), now_s=1.0)
    books.restart_clock(5.0)
    _, record = decide(books, all_prepares(prepare, 1), now_s=7.0)
    assert record.step_time_s == 2.0


@pytest.mark.parametrize(("steps_done", "every", "due"), [(4, 2, True), (5, 2, False), (5, None, False)])
def test_schedule(steps_done, every, due):
    assert is_due(steps_done, every) is due
