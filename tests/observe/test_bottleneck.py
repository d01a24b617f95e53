"""What limits a step, in one sentence."""

import pytest

from tahq.coordinator.observer import LinkRecord, StageRecord, StageSplit
from tahq.observe.bottleneck import diagnose, limit_and_advice, resources_of

MICRO_BATCHES = 8


def stages(*computes_s, commit_s=0.01, **changes):
    """A third of the compute is forward."""
    return tuple(
        StageRecord(n, {}, 0, StageSplit(forward_s=s / 3, backward_s=2 * s / 3, commit_s=commit_s, **changes))
        for n, s in enumerate(computes_s)
    )


def link(sender, receiver, traffic, wire_s, **changes):
    times = {"busy_s": 1.1 * wire_s, "sending_s": 1.05 * wire_s, "wire_s": wire_s} | changes
    sizes = (MICRO_BATCHES, 1_000_000, 1_001_000, 4_194_304)
    return LinkRecord(min(sender, receiver), sender, receiver, traffic, *sizes, **times)


@pytest.fixture
def step(record):
    return lambda seconds, stages, *links: record(1, step_time_s=seconds, stages=stages, links=links)


LIMITS = [
    (
        stages(2.2, 2.8, 2.2),
        [(1, 2, "activations", 0.8), (2, 1, "gradients", 7.1)],
        "link 2→1, gradients is the bottleneck: 71 % of the step",
    ),
    (
        stages(2.0, 2.0, 2.0),
        [(1, 2, "activations", 4.0), (1, 0, "gradients", 5.0), (0, 1, "activations", 4.0)],
        "stage 1's uplink (56 % gradients to stage 0, 44 % activations to stage 2) is the bottleneck: 90 % of the step",
    ),
    (
        stages(3.0, 9.0, 3.0),
        [(0, 1, "activations", 4.0), (1, 0, "gradients", 3.0)],
        "stage 1's compute is the bottleneck: 90 % of the step",
    ),
    (stages(9.5), [], "stage 0's compute is the bottleneck: 95 % of the step"),
    # replicas of one stage, whose pipelines need not be filled
    (stages(7.2, 7.2, 7.2), [], "stage 0's compute is the bottleneck: 72 % of the step"),
    (stages(1.0, 1.0, commit_s=8.5), [], "the round trip to the coordinator is the bottleneck: 85 % of the step"),
    (
        stages(2.0, 2.0, beside_s={"encode": 9.0, "decode": 1.0}),
        [(0, 1, "activations", 1.0)],
        "stage 1's encoding and decoding is the bottleneck: 90 % of the step",
    ),
    # half the step is compute, and nearly half the optimizer, which runs once
    (
        stages(5.0, 5.0, optimizer_s=4.0),
        [(0, 1, "activations", 0.1)],
        "stage 1's compute is the bottleneck: 50 % of the step",
    ),
    # room is waited for behind the busy link
    (
        stages(1.0, 1.0, wait_memory_s=6.0),
        [(0, 1, "activations", 8.5)],
        "link 0→1, activations is the bottleneck: 85 % of the step",
    ),
    (
        stages(3.0, 3.1, wait_memory_s=0.5),
        [(0, 1, "activations", 2.0), (1, 0, "gradients", 1.0)],
        "no resource is saturated: stage 1's compute, the busiest, is busy for 31 % of the step, and for the rest "
        "micro-batches or the commit are in transit",
    ),
]


@pytest.mark.parametrize(("parts", "links", "sentence"), LIMITS)
def test_sentence_names_the_limit_of_ten_seconds(step, parts, links, sentence):
    assert diagnose(step(10.0, parts, *(link(*each) for each in links))).sentence == sentence


def test_diagnosis_has_kind_share_and_a_brief_form(step):
    slow = step(10.0, stages(2.2, 2.8, 2.2), link(1, 2, "activations", 0.8), link(2, 1, "gradients", 7.1))
    diagnosis = diagnose(slow)
    assert (diagnosis.kind, diagnosis.share, diagnosis.brief) == (
        *("link", pytest.approx(0.71), "link 2→1 gradients 71 %"),
    )
    assert limit_and_advice(slow, None) == diagnosis.sentence
    assert limit_and_advice(slow, lambda step: f"{step.step} would help") == f"{diagnosis.sentence}; 1 would help"


def test_resource_that_is_busier_but_hidden_is_not_the_limit(step):
    """8 micro-batches: one passes the three stages before the last in 6/8 s, so that bounds the step by 4.45 s and the
    busier one before it by 4.0 + 2/8.
    """
    slow = step(4.6, stages(1.0, 1.0, 4.0, 3.7), *(link(n, n + 1, "activations", 0.01) for n in range(3)))
    assert diagnose(slow).sentence.startswith("stage 3's compute is the bottleneck: 80 % of the step")


def test_filling_and_draining_is_mentioned_where_it_takes_much(step):
    """Two micro-batches in four stages of 1 s each, a third of it forward: 2 + 3·1 s for 2 s of work."""
    ends = [(s, s + 1, "activations") for s in range(3)] + [(s + 1, s, "gradients") for s in range(3)]
    links = [LinkRecord(min(a, b), a, b, t, 2, 100, 200, 100, 1e-3, 1e-3, 1e-3) for a, b, t in ends]
    diagnosis = diagnose(step(5.0, stages(2.0, 2.0, 2.0, 2.0, commit_s=0.0), *links))
    assert (diagnosis.kind, diagnosis.share) == ("compute", pytest.approx(0.4))
    assert diagnosis.sentence.endswith("; filling and draining the pipeline takes 60 %")


@pytest.mark.parametrize(("wire_s", "kind"), [(2.0, "latency"), (9.0, "link")])
def test_long_path_is_not_taken_for_a_busy_link(step, wire_s, kind):
    """Bytes are unacknowledged all the time; what counts is how long they take on the wire."""
    far = link(0, 1, "activations", wire_s, busy_s=9.9, sending_s=9.9)
    assert diagnose(step(10.0, stages(3.0, 3.0), far)).kind == kind


def test_stage_without_room_is_named_when_no_stage_is_busy(step):
    held_up = (
        StageRecord(0, {}, 0, StageSplit(forward_s=1.0, backward_s=2.0, wait_memory_s=4.0)),
        StageRecord(1, {}, 0, StageSplit(forward_s=1.0, backward_s=2.0, wait_s={0: 4.0})),
    )
    diagnosis = diagnose(step(10.0, held_up, link(0, 1, "activations", 1.0)))
    assert (diagnosis.kind, diagnosis.brief) == ("memory", "room on stage 0 40 %")
    assert diagnosis.sentence.endswith("as many micro-batches as it may hold are in flight")


def test_step_without_measurements_has_no_diagnosis(record, step):
    assert diagnose(record(1)) is None
    assert diagnose(step(0.0, stages(1.0))) is None
    assert limit_and_advice(record(1), None) == ""


def test_no_resource_needs_more_than_a_step_that_it_was_measured_in(step):
    """1F1B by hand, two stages, m micro-batches of f = 1, b = 2, x = y = 0.5: 1 + 0.5 + 3m + 0.5 + 2 is stage 1's."""
    m = MICRO_BATCHES
    seconds = 1 + 0.5 + 3 * m + 0.5 + 2
    links = link(0, 1, "activations", 0.5 * m), link(1, 0, "gradients", 0.5 * m)
    exact = step(seconds, stages(3.0 * m, 3.0 * m, commit_s=0.0), *links)
    leasts = {resource.name: resource.least_s for resource in resources_of(exact)}
    assert max(leasts.values()) == pytest.approx(seconds)
    assert leasts["stage 1's compute"] == pytest.approx(seconds)
