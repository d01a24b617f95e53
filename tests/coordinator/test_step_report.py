"""The stages' PREPAREs as one record."""

import math

import pytest

from tahq.comm.control.messages import Commit
from tahq.coordinator.step_report import step_record
from tahq.errors import RemoteProtocolError

COMMIT = Commit(4, True, 1.0, False, False, False)


def record(prepares):
    return step_record(COMMIT, prepares, 1.5, 2.0)


def test_links_say_who_sent_what_to_whom(prepare):
    links = record([prepare(4, stage) for stage in range(3)]).links
    assert [(link.link, link.sender, link.receiver, link.direction) for link in links] == [
        (0, 0, 1, "activations"),
        (1, 1, 2, "activations"),
        (0, 1, 0, "gradients"),
        (1, 2, 1, "gradients"),
    ]
    assert (links[0].bits_per_element, links[0].goodput_bits_per_s) == (4.0, 16000.0)
    assert (links[2].bits_per_element, links[2].goodput_bits_per_s) == (8.0, 32000.0)


@pytest.mark.parametrize(("num_stages", "last"), [(2, 1), (3, 2)])
def test_link_of_tied_embeddings_joins_first_and_last_stage(prepare, num_stages, last):
    prepares = [prepare(4, stage, num_stages, links=[]) for stage in range(num_stages)]
    rows = [[float(last), float(direction), 1.0, 8.0, 8.0, 2.0, 1.0, 1.0, 0.5] for direction in (0, 1)]
    prepares[0] = prepare(4, 0, num_stages, links=[rows[0]])
    prepares[last] = prepare(4, last, num_stages, links=[rows[1]])
    links = record(prepares).links
    assert [(link.sender, link.receiver, link.direction) for link in links] == [
        (0, last, "gradients"),
        (last, 0, "gradients"),
    ]


def test_links_have_the_error_that_was_measured_of_their_codec(prepare):
    prepares = [prepare(4, stage) for stage in range(3)]
    prepares[1] = prepare(4, 1, codec_errors=[[1.0, 0.0, 0.25], [0.0, 1.0, math.inf]])
    assert [link.relative_error for link in record(prepares).links] == [None, 0.25, math.inf, None]


@pytest.mark.parametrize("rows", [[[]], [[1.0, 0.0]], [[1.0, 0.0, -0.1]], [[1.0, 0.0, math.nan]]])
def test_impossible_errors_name_the_stage(prepare, rows):
    prepares = [prepare(4, stage) for stage in range(3)]
    prepares[1] = prepare(4, 1, codec_errors=rows)
    with pytest.raises(RemoteProtocolError, match="stage 1 reported impossible codec errors"):
        record(prepares)


def test_one_stage_has_no_links(prepare):
    assert record([prepare(4, 0, 1, links=[])]).links == ()


@pytest.mark.parametrize(
    "row",
    [
        [],
        [0.0] * 8,
        [5.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
        [-1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
        [0.0, 7.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
        [math.nan, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
        [0.0, 0.0, 1.0, 1.0, 1.0, 1e308, 1.0, 1.0, 1.0],
        [0.0, 0.0, math.inf, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
        [0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, math.nan],
    ],
)
def test_impossible_traffic_names_the_stage(prepare, row):
    prepares = [prepare(4, 0, links=[row]), prepare(4, 1), prepare(4, 2)]
    with pytest.raises(RemoteProtocolError, match="stage 0 reported impossible traffic"):
        record(prepares)


def test_waiting_share_is_the_part_of_measured_time(prepare):
    stages = record(
        [
            prepare(4, 0, timing={"forward": 2.0, "wait": 1.0, "wait_commit": 1.0}),
            prepare(4, 1),
            prepare(4, 2, timing={}),
        ]
    ).stages
    assert [stage.waiting_share for stage in stages] == [0.5, 0.75, 0.0]


def test_links_say_how_long_they_sent_had_to_wait_and_were_idle(prepare):
    link = record([prepare(4, stage) for stage in range(3)]).links[0]
    assert (link.busy_s, link.sending_s, link.wire_s) == (0.5, 0.4, 0.25)
    assert link.queued_s == pytest.approx(0.1)
    assert link.idle_s == 1.5  # of a step of 2 s


def test_stage_waits_for_its_commit_from_its_prepare_to_the_end_of_the_step(prepare):
    timing = {"forward": 0.5, "wait:1": 0.25, "norms": 0.125}
    split = record([prepare(4, stage, timing=timing, active_s=1.5) for stage in range(3)]).stages[0].split
    assert (split.commit_s, split.other_s, split.optimizer_s) == (0.5, 0.625, 0.125)
    assert split.wait_s == {1: 0.25}
    assert split.total_s == 2.0
