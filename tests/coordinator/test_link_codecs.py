"""Codecs in force: as decided, as recorded, as kept in a snapshot."""

import json
from dataclasses import replace

import pytest

from tahq.coordinator.link_codecs import (
    RAW,
    CodecOptions,
    FollowRules,
    LinkCodecs,
    LinkKey,
    LinkLoad,
    computing_s,
    step_load,
)
from tahq.coordinator.observer import LinkRecord, StageRecord, StepRecord
from tahq.errors import ConfigError, SnapshotError
from tahq.observe.metrics import step_object
from tahq.quant.ladder import Ladder
from tahq_launch.start.codec_choice import recorded_codecs

UP = ("wf:bits=2,group=128,center=on", "wf:bits=4,group=128,center=on")
DOWN = ("eden:bits=2,group=256", "eden:bits=3,group=256", "eden:bits=4,group=256")
RULES = FollowRules({"activations": Ladder(UP, (1000, 2000)), "gradients": Ladder(DOWN, (1000, 1500, 2000))})
OPTIONS = CodecOptions({"activations": UP[1], "gradients": DOWN[1]}, RULES)
NUM_LINKS = 2


def step_of(step: int, busy_s: float = 0.4, **changes) -> StepRecord:
    """A step of three stages that computed for half a second; only link 1's gradients are ever slow."""
    links = [
        LinkRecord(link, link + up, link + 1 - up, ("gradients", "activations")[1 - up], 4, 6000, 6400, 8000, spent)
        for link in range(NUM_LINKS)
        for up, spent in ((0, 0.4), (1, busy_s if link else 0.4))
    ]
    tied = [LinkRecord(NUM_LINKS, 0, 2, "gradients", 1, 9000, 9100, 2250, 0.1)]
    stages = [StageRecord(stage, {"forward": 0.2, "backward": 0.3, "wait": 9.0}) for stage in range(3)]
    return replace(StepRecord(step, 3.0, 100, 1.0, 1.0, 1.0, False, False, stages, links + tied), **changes)


def specs(record: StepRecord) -> list[str]:
    return [link.codec for link in record.links]


def played(codecs: LinkCodecs, busy_by_step, first: int = 1) -> tuple[list[StepRecord], list[list[list[int]]]]:
    """Steps as they are told to observers, and the rows of their COMMITs."""
    records, rows = [], []
    for step, busy_s in enumerate(busy_by_step, first):
        record = codecs.described(step_of(step, busy_s))
        changes, told = codecs.decide(record)
        records.append(replace(record, codec_changes=changes))
        rows.append(told)
    return records, rows


def test_what_is_decided_after_a_step_holds_in_the_next():
    records, rows = played(LinkCodecs(OPTIONS, NUM_LINKS, 0), [0.4, 0.4, 2.0, 0.4])
    assert rows == [[], [], [[1, 1, 3]], []]  # raw, two for activations, then the first for gradients
    assert [specs(record)[3] for record in records] == [DOWN[1]] * 3 + [DOWN[0]]
    assert specs(records[-1]) == [UP[1], DOWN[1], UP[1], DOWN[0], RAW]
    assert [str(change).split(" (")[0] for change in records[2].codec_changes] == [
        f"link 1, gradients: {DOWN[1]} -> {DOWN[0]}"
    ]


def loads(wire_s: float):
    record = step_of(1, 2.0)
    record = replace(record, links=[replace(link, wire_s=wire_s) for link in record.links])
    return step_load(record, NUM_LINKS)


def test_the_policy_is_told_what_computing_took_and_of_every_cut_what_the_wire_did():
    load = loads(0.25)
    assert (load.step, load.compute_s, load.loss, load.finite) == (0, 0.5, 3.0, True)
    assert [(*key, link.sending_s, link.uplink) for key, link in sorted(load.links.items())] == [
        (0, "activations", 0.25, 0),
        (0, "gradients", 0.25, 1),
        (1, "activations", 0.25, 1),
        (1, "gradients", 0.25, 2),
    ]


def test_a_transport_that_does_not_know_the_wire_tells_all_that_was_under_way():
    assert loads(0.0).links[LinkKey(1, "gradients")] == LinkLoad(6000, 2.0)


def test_only_what_keeps_the_stage_from_nothing_else_counts_as_computing():
    timing = {"forward": 1.0, "weight_gradient": 2.0, "encode": 0.5, "beside:decode": 9.0, "wait:1": 9.0, "commit": 9.0}
    assert computing_s(timing) == 3.5


def test_codecs_that_do_not_follow_are_named_and_never_change():
    codecs = LinkCodecs(replace(OPTIONS, rules=None), NUM_LINKS, 0)
    records, rows = played(codecs, [9.0, 9.0, 9.0])
    assert rows == [[], [], []]
    assert specs(records[-1]) == [UP[1], DOWN[1], UP[1], DOWN[1], RAW]
    assert codecs.saved() == {}
    assert codecs.start_rows() == []


def test_a_resumed_run_goes_on_with_the_codecs_that_were_in_force():
    codecs = LinkCodecs(OPTIONS, NUM_LINKS, 0)
    played(codecs, [0.4, 0.4, 2.0])
    saved = json.loads(json.dumps(codecs.saved()))
    resumed = LinkCodecs(replace(OPTIONS, saved=saved), NUM_LINKS, 3)
    assert resumed.start_rows() == [[1, 1, 3]]
    assert specs(resumed.described(step_of(4))) == [UP[1], DOWN[1], UP[1], DOWN[0], RAW]
    assert resumed.saved() == saved


def test_codecs_that_a_new_ladder_does_not_have_and_links_that_are_no_more_are_left_behind():
    codecs = LinkCodecs(OPTIONS, NUM_LINKS, 0)
    played(codecs, [0.4, 0.4, 2.0])
    ladders = {"activations": RULES.ladders["activations"], "gradients": Ladder(DOWN[1:], (1500, 2000))}
    fewer = LinkCodecs(replace(OPTIONS, rules=FollowRules(ladders), saved=codecs.saved()), NUM_LINKS, 3)
    assert fewer.start_rows() == []
    assert LinkCodecs(replace(OPTIONS, saved=codecs.saved()), 1, 3).start_rows() == []


@pytest.mark.parametrize("saved", [{"links": 3}, {"links": [{"link": 0}]}, {"loss_average": 1.0}])
def test_what_no_snapshot_would_keep_is_refused(saved):
    with pytest.raises(SnapshotError, match=r"wire\.follow=false"):
        LinkCodecs(replace(OPTIONS, saved=saved), NUM_LINKS, 3)


@pytest.fixture
def metrics(tmp_path):
    """metrics.jsonl of a run that lowered bits, and raised them again."""
    records, _ = played(LinkCodecs(OPTIONS, NUM_LINKS, 0), [0.4, 0.4, 2.0, *[0.01] * 12])
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(step_object(record)) + "\n" for record in records))
    return path, records


def test_a_recorded_run_is_repeated_whatever_is_measured(metrics):
    path, records = metrics
    repeated, rows = played(LinkCodecs(replace(OPTIONS, replay=recorded_codecs(path)), NUM_LINKS, 0), [0.4] * 15)
    assert [specs(record) for record in repeated] == [specs(record) for record in records]
    assert rows[2] == [[1, 1, 3]]
    assert {change.reason for record in repeated for change in record.codec_changes} == {"replay"}


def test_a_record_may_begin_otherwise_than_configured_and_ends_with_what_was_last(metrics):
    path, records = metrics
    late = LinkCodecs(replace(OPTIONS, replay=recorded_codecs(path)), NUM_LINKS, 3)
    assert late.start_rows() == [[1, 1, 3]]
    beyond, _ = played(late, [0.4] * 15, first=4)
    assert specs(beyond[-1]) == specs(records[-1])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        *(
            (f"{line}\n", r".*metrics\.jsonl:1 does not have the codecs of a step")
            for line in ("no json", '{"step": 1}', '{"step": 1, "links": [{"link": 0}]}', "[]", "7")
        ),
        ("", ".* has no steps"),
        ('{"step": 1, "li', ".* has no steps"),
        (None, ".*cannot read"),
    ],
)
def test_file_that_is_not_a_record_is_refused(tmp_path, text, reason):
    path = tmp_path / "metrics.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=rf"wire\.replay: {reason}"):
        recorded_codecs(path)


def test_a_record_whose_last_line_was_cut_is_that_of_the_steps_before(metrics):
    path, records = metrics
    path.write_text(path.read_text()[:-10])
    assert list(recorded_codecs(path)) == [record.step for record in records[:-1]]
