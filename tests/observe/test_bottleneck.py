"""What limits a step, and what would change it, in one sentence."""

import re
from itertools import product

import pytest

from tahq.coordinator.observer import LinkRecord, StageRecord, StageSplit
from tahq.observe.bottleneck import (
    WireFacts,
    busiest_uplink_s,
    cheaper_codecs,
    diagnose,
    flows_of,
    resources_of,
    uplinks_s,
)
from tahq.quant import get_codec

SHAPE = (4, 256, 512)
FACTS = WireFacts("wf:bits=4", "eden:bits=8", SHAPE)
MICRO_BATCHES = 8


def stages(*computes_s, commit_s=0.01, **changes):
    """A third of the compute is forward."""
    return tuple(
        StageRecord(n, {}, 0, StageSplit(forward_s=s / 3, backward_s=2 * s / 3, commit_s=commit_s, **changes))
        for n, s in enumerate(computes_s)
    )


def link(sender, receiver, traffic, wire_s, codec="", **changes):
    times = {"busy_s": 1.1 * wire_s, "sending_s": 1.05 * wire_s, "wire_s": wire_s} | changes
    nbytes = MICRO_BATCHES * get_codec(codec or getattr(FACTS, traffic)).encoded_nbytes(SHAPE)
    sizes = (MICRO_BATCHES, nbytes, nbytes + 1000, 4_194_304)
    return LinkRecord(min(sender, receiver), sender, receiver, traffic, *sizes, **times, codec=codec)


@pytest.fixture
def step(record):
    return lambda seconds, stages, *links: record(1, step_time_s=seconds, stages=stages, links=links)


ADVICE = [
    # compute takes 28 %: 3 of 8 bits are few enough, and 4 are not
    (
        stages(2.2, 2.8, 2.2),
        [(1, 2, "activations", 0.8), (2, 1, "gradients", 7.1)],
        "^link 2→1, gradients is the bottleneck: 71 % of the step; `eden:bits=3` would make it compute-bound",
    ),
    # both gradients are too slow for 1.9 s of compute; after the slower one is faster, so is the other
    (
        stages(1.9, 1.9, 1.9),
        [(1, 0, "gradients", 7.0), (2, 1, "gradients", 6.9)],
        "`eden:bits=2` would make it compute-bound",
    ),
    # no codec of gradients makes activations faster, which take 4 s where compute takes 1 s
    (
        stages(1.0, 1.0, 1.0),
        [(2, 1, "gradients", 9.0), (0, 1, "activations", 4.0)],
        "`eden:bits=3` would bring it below link 0→1, activations, which is then busy for 40 %",
    ),
    # gradients are at 1 bit already; with fewer bits for activations their 3 s go below the 5 s of computing
    (
        stages(5.0, 5.0, 5.0),
        [(1, 0, "gradients", 4.0, "eden:bits=1"), (1, 2, "activations", 3.0)],
        r"; `wf:bits=\d` would make it compute-bound",
    ),
    # the step's codec counts, not the configuration's
    (
        stages(1.0, 1.0),
        [(1, 0, "gradients", 7.0, "eden:bits=1")],
        "no codec is cheaper than `eden:bits=1`, so only a higher rate would help",
    ),
    # every link alike: at 1 bit stage 1 still sends twice as long as the others, and 0.1 s is computed
    (
        stages(0.1, 0.1, 0.1),
        [(a, b, "activations", 4.0) for a, b in ((0, 1), (1, 2))]
        + [(b, a, "gradients", 4.0) for a, b in ((0, 1), (1, 2))],
        "even `wf:bits=1` with `eden:bits=1` would leave an uplink busy for 16 % of the present step",
    ),
    (
        stages(2.0, 2.0, 2.0),
        [(1, 2, "activations", 4.0), (1, 0, "gradients", 5.0), (0, 1, "activations", 4.0)],
        r"^stage 1's uplink \(gradients to 0 56 % of it, activations to 2 44 % of it\) is the bottleneck: 90 %",
    ),
    (
        stages(3.0, 9.0, 3.0),
        [(0, 1, "activations", 4.0), (1, 0, "gradients", 3.0)],
        "^stage 1's compute is the bottleneck: 90 % of the step; fewer layers there .* would help, until link 0→1, "
        "activations, busy for 40 %, is next",
    ),
    (stages(8.8, 9.0, 8.9), [], "all stages compute about as long"),
    (stages(9.5), [], "^stage 0's compute is the bottleneck: 95 % of the step; a faster machine, or more stages"),
    (stages(1.0, 1.0, commit_s=8.5), [], "^the round trip to the coordinator is the bottleneck: 85 % of the step"),
    (
        stages(2.0, 2.0, beside_s={"encode": 9.0, "decode": 1.0}),
        [(0, 1, "activations", 1.0)],
        "^stage 1's encoding and decoding is the bottleneck: 90 % of the step",
    ),
    # half the step is compute, and nearly half the optimizer, which runs once
    (stages(5.0, 5.0, optimizer_s=4.0), [(0, 1, "activations", 0.1)], "compute is the bottleneck: 50 %"),
    # room is waited for behind the busy link
    (stages(1.0, 1.0, wait_memory_s=6.0), [(0, 1, "activations", 8.5)], "^link 0→1, activations is the bottleneck"),
    (
        stages(3.0, 3.1),
        [(0, 1, "activations", 2.0), (1, 0, "gradients", 1.0)],
        "^no resource is saturated: stage 1's compute, the busiest, is busy for 31 % of the step.*; more micro-batches "
        "per step would fill it$",
    ),
    (
        stages(3.0, 3.1, wait_memory_s=0.5),
        [(0, 1, "activations", 2.0)],
        "a greater `pipeline.in_flight` or more micro-batches per step",
    ),
]


@pytest.mark.parametrize(("parts", "links", "sentence"), ADVICE)
def test_sentence_names_the_limit_of_ten_seconds_and_a_remedy(step, parts, links, sentence):
    assert re.search(sentence, diagnose(step(10.0, parts, *(link(*each) for each in links)), FACTS).sentence)


def test_diagnosis_has_kind_share_and_a_brief_form(step):
    slow = step(10.0, stages(2.2, 2.8, 2.2), link(1, 2, "activations", 0.8), link(2, 1, "gradients", 7.1))
    diagnosis = diagnose(slow, FACTS)
    assert (diagnosis.kind, diagnosis.share, diagnosis.brief) == (
        *("link", pytest.approx(0.71), "link 2→1 gradients 71 %"),
    )
    assert "fewer bits or a higher rate would help" in diagnose(slow).sentence


@pytest.mark.parametrize(
    ("facts", "traffic", "family"),
    [
        (FACTS, "gradients", "eden"),
        (FACTS, "activations", "wf"),
        (WireFacts("tah", "fixed:bits=8", SHAPE), "gradients", "fixed"),
        (WireFacts("raw:dtype=fp32", "raw:dtype=fp32", SHAPE), "gradients", "eden"),
    ],
)
def test_ladder_goes_down_in_bytes_and_stays_below_the_present_codec(facts, traffic, family):
    (flow,) = flows_of([link(0, 1, traffic, 1.0, codec=getattr(facts, traffic))])
    ladder = cheaper_codecs(facts, flow)
    ratios = [ratio for _, ratio in ladder]
    assert all(spec.startswith(family) for spec, _ in ladder)
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[0] < 1


def test_uplink_with_two_flows_is_judged_by_both(step):
    """Its gradients alone, at 1 bit in place of 8, leave 4 s of activations, and stage 2 sends for 3.5 s."""
    flows = link(1, 2, "activations", 4.0), link(1, 0, "gradients", 5.0), link(2, 1, "gradients", 3.5)
    slow = step(10.0, stages(2.5, 2.5, 2.5), *flows)
    sentence, flows = diagnose(slow, FACTS).sentence, flows_of(slow.links)
    ladders = {flow.traffic: cheaper_codecs(FACTS, flow) for flow in flows if flow.sender == 1}
    for ratios in ({traffic: ratio} for traffic, ladder in ladders.items() for _, ratio in ladder):
        after_s = uplinks_s(flows, ratios)
        assert after_s[1] > max(2.5, after_s[2])
    named = [
        {"activations": a, "gradients": g}
        for (one, a), (other, g) in product(ladders["activations"], ladders["gradients"])
        if f"`{one}` with `{other}`" in sentence or f"`{other}` with `{one}`" in sentence
    ]
    assert len(named) == 1
    assert busiest_uplink_s(flows, named[0]) <= 2.5
    assert sentence.partition(" would ")[2].startswith("make it compute-bound")


def test_resource_that_is_busier_but_hidden_is_not_said_to_be_next(step):
    """8 micro-batches: one passes the three stages before the last in 6/8 s, so that bounds the step by 4.45 s and the
    busier one before it by 4.0 + 2/8.
    """
    slow = step(4.6, stages(1.0, 1.0, 4.0, 3.7), *(link(n, n + 1, "activations", 0.01) for n in range(3)))
    sentence = diagnose(slow, FACTS).sentence
    assert sentence.startswith("stage 3's compute is the bottleneck: 80 % of the step; fewer layers there")
    assert "is next" not in sentence


def test_filling_and_draining_is_mentioned_where_it_takes_much(step):
    """Two micro-batches in four stages of 1 s each, a third of it forward: 2 + 3·1 s for 2 s of work."""
    ends = [(s, s + 1, "activations") for s in range(3)] + [(s + 1, s, "gradients") for s in range(3)]
    links = [LinkRecord(min(a, b), a, b, t, 2, 100, 200, 100, 1e-3, 1e-3, 1e-3) for a, b, t in ends]
    diagnosis = diagnose(step(5.0, stages(2.0, 2.0, 2.0, 2.0, commit_s=0.0), *links), FACTS)
    assert (diagnosis.kind, diagnosis.share) == ("compute", pytest.approx(0.4))
    assert "filling and draining the pipeline takes 60 %: more micro-batches per step" in diagnosis.sentence


@pytest.mark.parametrize(("wire_s", "kind"), [(2.0, "latency"), (9.0, "link")])
def test_long_path_is_not_taken_for_a_busy_link(step, wire_s, kind):
    """Bytes are unacknowledged all the time; what counts is how long they take on the wire."""
    far = link(0, 1, "activations", wire_s, busy_s=9.9, sending_s=9.9)
    assert diagnose(step(10.0, stages(3.0, 3.0), far), FACTS).kind == kind


def test_stage_without_room_is_named_when_no_stage_is_busy(step):
    held_up = (
        StageRecord(0, {}, 0, StageSplit(forward_s=1.0, backward_s=2.0, wait_memory_s=4.0)),
        StageRecord(1, {}, 0, StageSplit(forward_s=1.0, backward_s=2.0, wait_s={0: 4.0})),
    )
    diagnosis = diagnose(step(10.0, held_up, link(0, 1, "activations", 1.0)), FACTS)
    assert (diagnosis.kind, diagnosis.brief) == ("memory", "room on stage 0 40 %")
    assert "greater `pipeline.in_flight`" in diagnosis.sentence


def test_step_without_measurements_has_no_diagnosis(record, step):
    assert diagnose(record(1), FACTS) is None
    assert diagnose(step(0.0, stages(1.0)), FACTS) is None


def test_no_resource_needs_more_than_a_step_that_it_was_measured_in(step):
    """1F1B by hand, two stages, m micro-batches of f = 1, b = 2, x = y = 0.5: 1 + 0.5 + 3m + 0.5 + 2 is stage 1's."""
    m = MICRO_BATCHES
    seconds = 1 + 0.5 + 3 * m + 0.5 + 2
    links = link(0, 1, "activations", 0.5 * m), link(1, 0, "gradients", 0.5 * m)
    exact = step(seconds, stages(3.0 * m, 3.0 * m, commit_s=0.0), *links)
    leasts = {resource.name: resource.least_s for resource in resources_of(exact)}
    assert max(leasts.values()) == pytest.approx(seconds)
    assert leasts["stage 1's compute"] == pytest.approx(seconds)
