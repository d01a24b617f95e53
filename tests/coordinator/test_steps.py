"""PREPAREs in, one COMMIT out, whatever the order; the record of a step; traced steps put together on one clock."""

import math
from dataclasses import asdict, replace
from fractions import Fraction

import pytest
from coordinator.conftest import make_prepare
from hypothesis import given
from hypothesis import strategies as st

from tahq.comm.control.messages import Commit, Traced
from tahq.comm.control.server import ClockOffset
from tahq.comm.topology import Grid
from tahq.coordinator import steps
from tahq.coordinator.observer import StageSplit
from tahq.coordinator.steps import (
    KEPT_STEPS,
    MAX_PART,
    MAX_PARTS,
    TraceCollector,
    check_prepare,
    clip_factor,
    global_norm,
    is_repeated,
    stage_split,
    step_record,
)
from tahq.errors import DataError, NonFiniteError, RemoteProtocolError
from tahq.pipeline.config import TrainingConfig

NAMES = ("stage 0 (a, pid 1)", "stage 1 (b, pid 2)", "stage 2 (c, pid 3)")

# -- the decision ----------------------------------------------------------------------------------


def decide(prepares, **training):
    return steps.decide(TrainingConfig(epochs=1, **training), prepares, NAMES, num_steps=100)


@given(st.lists(st.floats(0, 1e300), max_size=20), st.tuples(st.integers(0, 20), st.integers(0, 20)))
def test_norm_is_the_exact_sum_rounded_once_however_parameters_are_divided_into_stages(numbers, cuts):
    low, high = sorted(cuts)
    divided = [numbers[:low], numbers[low:high], numbers[high:]]
    norm = steps.norm_of([make_prepare(0, stage, norm2=divided[stage]) for stage in range(3)], 3)
    assert norm == global_norm(numbers) == math.sqrt(float(sum(map(Fraction, numbers), Fraction(0))))


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
    ("stage", "change"),
    [
        *((stage, {"finite": False}) for stage in range(3)),
        *((1, {"norm2": norm2}) for norm2 in ([math.nan], [math.inf], [1e308, 1e308])),
        (2, {"loss_sum": math.nan}),
    ],
)
def test_non_finite_anywhere_skips_the_step_everywhere(stage, change):
    prepares = [make_prepare(0, each, **(change if each == stage else {})) for each in range(3)]
    decision = decide(prepares, clip_norm=1.0)
    assert (decision.apply, decision.clip_factor) == (False, 1.0)


def overflowed(loss_scale, *, skipped_in_a_row=100, loss_sum=32.0, **training):
    """The decision about a step under a loss scale, in whose middle stage a gradient is infinite."""
    prepares = [make_prepare(0, 0), make_prepare(0, 1, norm2=[math.inf]), make_prepare(0, 2, loss_sum=loss_sum)]
    config = TrainingConfig(epochs=1, **training)
    return steps.decide(
        *(config, prepares, NAMES), num_steps=100, loss_scale=loss_scale, skipped_in_a_row=skipped_in_a_row
    )


@pytest.mark.parametrize("non_finite", ["skip", "halt"])
def test_overflow_under_a_loss_scale_is_skipped_however_often(non_finite):
    assert not overflowed(2.0, non_finite=non_finite).apply


def test_overflow_at_the_lowest_loss_scale_and_a_loss_of_nan_that_is_to_halt_end_the_run():
    with pytest.raises(NonFiniteError, match=r"stage 1 \(b, pid 2\) at the lowest loss scale, 1"):
        overflowed(1.0)
    with pytest.raises(NonFiniteError, match="non_finite is halt"):
        overflowed(2.0, loss_sum=math.nan, non_finite="halt")
    assert not overflowed(2.0, loss_sum=math.nan).apply


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm2": [2.5]}, "different summed gradients at step 1"),
        ({"weights_digest": "b"}, "different weights at step 1"),
    ],
)
def test_replicas_that_differ_end_the_run(changes, message):
    """Stages 0 and 1 are one replica, 2 and 3 the other."""
    prepares = [make_prepare(0, stage, 4, norm2=[1.0 + stage % 2], weights_digest="a") for stage in range(4)]
    names = [f"stage {stage}" for stage in range(4)]
    training = TrainingConfig(epochs=1, clip_norm=1.0)
    decision = steps.decide(training, prepares, names, num_steps=9, num_stages=2)
    assert decision.clip_factor == 1.0 / math.sqrt(3.0)
    prepares[3] = replace(prepares[3], **changes)
    with pytest.raises(DataError, match=f"stage 1 and stage 3, replicas of one stage, have {message}"):
        steps.decide(training, prepares, names, num_steps=9, num_stages=2)


def test_replicas_that_share_updates_have_norms_of_their_own_and_the_same_weights():
    own = {"weights_digest": "a", "links": []}
    prepares = [make_prepare(0, stage, 4, norm2=[1.0 + stage], **own) for stage in range(4)]
    given = TrainingConfig(epochs=1, clip_norm=1.0), prepares, [f"stage {stage}" for stage in range(4)]
    decision = steps.decide(*given, num_steps=9, num_stages=2, num_norms=4)
    assert decision.clip_factor == 1.0 / math.sqrt(10.0)
    record = step_record(decision, prepares, 2.0, Grid(2, 2), num_norms=4)
    assert record.grad_norm == math.sqrt(10.0)
    prepares[3] = replace(prepares[3], weights_digest="b")
    with pytest.raises(DataError, match="stage 1 and stage 3, replicas of one stage, have different weights"):
        steps.decide(*given, num_steps=9, num_stages=2, num_norms=4)


@pytest.mark.parametrize(
    ("stage", "is_second", "changes", "reason"),
    [
        (1, True, {"norm2": [9.0]}, r"stage 1 \(b, pid 2\) prepared step 0 twice"),
        (1, False, {"norm2": [-1.0]}, r"stage 1 .* negative"),
        (2, False, {"loss_sum": None}, r"stage 2 .* without a loss"),
        (1, False, {"abandoned": True}, r"stage 1 \(b, pid 2\) abandoned step 0, and this run abandons none"),
        (1, False, {"step": -1}, r"stage 1 \(b, pid 2\) prepared step -1 while step 0 is due"),
    ],
)
def test_impossible_prepares_name_the_peer(stage, is_second, changes, reason):
    before = make_prepare(0, stage)
    with pytest.raises(RemoteProtocolError, match=reason):
        check_prepare(replace(before, **changes), 0, before if is_second else None, NAMES[stage], has_loss=stage == 2)


def test_the_same_prepare_is_a_repetition_also_with_nan():
    before, again = (make_prepare(0, 1, norm2=[float("nan")]) for _ in range(2))
    assert is_repeated(again, before)
    assert not any(is_repeated(make_prepare(step, 1, norm2=[0.5]), before) for step in (0, 1))


# -- the record ------------------------------------------------------------------------------------


def record(num_stages=3, **changes_by_stage):
    """The record of a step of 2 s; `stage1={...}` changes that stage's PREPARE."""
    stages = range(num_stages)
    prepares = [make_prepare(4, stage, num_stages, **changes_by_stage.get(f"stage{stage}", {})) for stage in stages]
    return step_record(Commit(4, True, 1.0, False, False, False), prepares, 2.0, Grid(num_stages, tie_link=True))


def test_links_have_sender_receiver_rates_and_the_measured_error_of_their_codec():
    links = record(stage1={"codec_errors": [[1.0, 0.0, 0.25], [0.0, 1.0, math.inf]]}).links
    assert [(link.link, link.sender, link.receiver, link.direction, link.relative_error) for link in links] == [
        (0, 0, 1, "activations", None),
        (1, 1, 2, "activations", 0.25),
        (0, 1, 0, "gradients", math.inf),
        (1, 2, 1, "gradients", None),
    ]
    assert [(links[i].bits_per_element, links[i].goodput_bits_per_s) for i in (0, 2)] == [(4.0, 16e3), (8.0, 32e3)]
    assert (links[0].busy_s, links[0].sending_s, links[0].wire_s) == (0.5, 0.4, 0.25)
    assert (links[0].queued_s, links[0].idle_s) == (pytest.approx(0.1), 1.5)
    assert record(1).links == ()


@pytest.mark.parametrize("num_stages", [2, 3])
def test_link_of_tied_embeddings_joins_first_and_last_stage(num_stages):
    last = num_stages - 1
    changes = {f"stage{stage}": {"links": []} for stage in range(num_stages)}
    for stage, direction in ((0, 0.0), (last, 1.0)):
        changes[f"stage{stage}"] = {"links": [[float(last), direction, 1.0, 8.0, 8.0, 2.0, 1.0, 1.0, 0.5, 0.0]]}
    links = record(num_stages, **changes).links
    assert [(link.sender, link.receiver, link.direction) for link in links] == [
        (0, last, "gradients"),
        (last, 0, "gradients"),
    ]


@pytest.mark.parametrize(
    ("field", "row"),
    [
        *(("codec errors", row) for row in ([], [1.0, 0.0], [1.0, 0.0, -0.1], [1.0, 0.0, math.nan])),
        *(("traffic", row) for row in ([], [0.0] * 9, [5.0, 0.0, *[1.0] * 8], [-1.0, *[1.0] * 9])),
        *(("traffic", [0.0, direction, *[1.0] * 8]) for direction in (7.0, math.nan)),
        *(("traffic", [0.0, 0.0, number, *[1.0] * 7]) for number in (1e308, math.inf)),
        ("traffic", [0.0, 0.0, *[1.0] * 7, math.nan]),
    ],
)
def test_impossible_figures_of_links_name_the_stage(field, row):
    with pytest.raises(RemoteProtocolError, match=f"stage 1 reported impossible {field}"):
        record(stage1={"links" if field == "traffic" else "codec_errors": [row]})


ACTIVITIES = (
    "data", "forward", "backward", "input_gradient", "weight_gradient", "encode", "decode", "wait:0", "wait:12",
    "wait:codec", "wait:memory", "norms", "optimizer", "snapshot",
)  # fmt: skip
SECONDS = st.floats(0, 100)


@given(
    st.dictionaries(st.sampled_from(ACTIVITIES), SECONDS),
    st.dictionaries(st.sampled_from(["beside:encode", "beside:decode"]), SECONDS),
    SECONDS,
    SECONDS,
)
def test_parts_add_up_to_the_step(own, beside, unmeasured_s, commit_s):
    active_s = sum(own.values()) + unmeasured_s
    split = stage_split(own | beside, active_s, active_s + commit_s)
    parts = [part for part in asdict(split).values() if not isinstance(part, dict)]
    assert sum(parts) + split.frames_s == pytest.approx(active_s + commit_s)
    assert split.other_s == pytest.approx(unmeasured_s, abs=1e-9)


@pytest.mark.parametrize(
    ("timing", "active_s", "step_time_s", "expected"),
    [
        (
            {"input_gradient": 1.0, "weight_gradient": 2.0, "wait:3": 4.0, "wait:memory": 8.0, "wait:codec": 16.0},
            31.0,
            32.0,
            StageSplit(backward_s=3.0, wait_s={3: 4.0}, wait_memory_s=8.0, wait_codec_s=16.0, commit_s=1.0),
        ),
        (
            {"forward": 1.0, "beside:encode": 5.0, "encode": 0.5, "norms": 0.5},
            2.0,
            2.0,
            StageSplit(forward_s=1.0, encode_s=0.5, optimizer_s=0.5, beside_s={"encode": 5.0}),
        ),
        ({"forward": 3.0, "wait:1": 2.0}, 4.0, 3.5, StageSplit(forward_s=3.0, wait_s={1: 2.0})),
    ],
    ids=["both gradients, waits by sender", "work beside takes no time", "device that overlaps with the host"],
)
def test_stage_split(timing, active_s, step_time_s, expected):
    assert stage_split(timing, active_s, step_time_s) == expected


def test_records_have_each_stages_split_and_share_of_waiting():
    stages = record(
        stage0={"timing": {"forward": 0.5, "wait:1": 0.25, "norms": 0.125}, "active_s": 1.5},
        stage1={"timing": {"forward": 2.0, "wait": 1.0, "wait_commit": 1.0}},
        stage2={"timing": {}},
    ).stages
    assert stages[0].split == StageSplit(0.5, wait_s={1: 0.25}, optimizer_s=0.125, other_s=0.625, commit_s=0.5)
    assert [stage.waiting_share for stage in stages] == [pytest.approx(2 / 7), 0.5, 0.0]


# -- traces ----------------------------------------------------------------------------------------

EXACT = [ClockOffset(0.0, 0.0)] * 2


def part(stage, *begins_s, step=4, number=0, num_parts=1):
    n = len(begins_s)
    ends_s = [begin_s + 0.5 for begin_s in begins_s]
    texts = (["compute"] * n, ["forward"] * n, [f"F{index}" for index in range(n)], [""] * n)
    return Traced(step, stage, number, num_parts, *texts, list(begins_s), ends_s, [0] * n, [0.0] * n)


@pytest.fixture
def collector():
    collector = TraceCollector(NAMES[:2])
    collector.committed(4, 10.0, 12.0)
    return collector


def test_step_is_whole_when_every_part_of_every_stage_is_there_on_the_coordinators_clock(collector):
    """Stage 0's clock is 1,000 s ahead, stage 1's was never compared."""
    offsets = [ClockOffset(1000.0, 0.01), None]
    assert collector.take(part(0, 1010.5, num_parts=2), offsets) is None
    assert collector.take(part(1, 10.7), offsets) is None
    trace = collector.take(part(0, 1010.25, number=1, num_parts=2), offsets)
    assert (trace.step, trace.begin_s, trace.end_s) == (5, 10.0, 12.0)
    assert [[span.begin_s for span in stage.spans] for stage in trace.stages] == [[10.25, 10.5], [10.7]]
    assert [stage.name for stage in trace.stages] == [*NAMES[:2]]
    assert [stage.clock_error_s for stage in trace.stages] == [0.01, pytest.approx(math.nan, nan_ok=True)]


MALFORMED = (
    *({"names": []}, {"part": -1}, {"part": 1}, {"num_parts": MAX_PARTS + 1}),
    *({"begins_s": [math.nan]}, {"ends_s": [math.inf]}, {"ends_s": [0.0]}),
)


@pytest.mark.parametrize(
    "malformed", [*(replace(part(0, 11.0), **changes) for changes in MALFORMED), part(0, *([11.0] * (MAX_PART + 1)))]
)
def test_malformed_trace_names_its_stage(collector, malformed):
    with pytest.raises(RemoteProtocolError, match=r"stage 0 \(a, pid 1\) sent a malformed trace of step 4"):
        collector.take(malformed, EXACT)


def test_repeated_part_and_uncommitted_step_are_refused_and_another_coordinators_step_is_ignored(collector):
    collector.take(part(0, 11.0), EXACT)
    with pytest.raises(RemoteProtocolError, match="part 0 of its trace of step 4 twice"):
        collector.take(part(0, 11.0), EXACT)
    with pytest.raises(RemoteProtocolError, match="step 9, which was not committed yet"):
        collector.take(part(0, 11.0, step=9), EXACT)
    assert collector.take(part(0, 11.0, step=3), EXACT) is None
    assert TraceCollector(["stage 0"]).take(part(0, 11.0), EXACT) is None
    assert collector.take(part(1, 11.0), EXACT).step == 5


def test_incomplete_traces_are_forgotten(collector):
    for step in range(4, 4 + 3 * KEPT_STEPS):
        collector.committed(step, step, step + 1.0)
        collector.take(part(0, 11.0, step=step), EXACT)
    assert len(collector._parts) == len(collector._times) == KEPT_STEPS


def test_coordinator_tells_its_observer_about_a_traced_step(scene):
    scene.server.offsets = {b"worker-0": ClockOffset(2.0, 0.25)}
    # A worker sends the trace of a step after its commit, and so before the next step's Prepare or with it.
    said = {n: [make_prepare(1, n), part(n, 5.0 + n, step=0)] for n in range(3)}
    scene.workers(**{f"stage{n}": {"say": {1: said[n]}} for n in range(3)})
    assert scene.run() == 0
    (trace,) = scene.observer.of("step_traced")
    assert trace.step == 1
    assert [stage.spans[0].begin_s for stage in trace.stages] == [3.0, 6.0, 7.0]
