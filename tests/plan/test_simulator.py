"""Every expected number is worked out by hand beside it; rates are 1 byte per second unless stated."""

import heapq
import itertools
import math
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import schedules

from tahq.comm.link.frame import Direction
from tahq.comm.link.spec import First
from tahq.errors import ScheduleError
from tahq.pipeline.schedule.generators import generate
from tahq.pipeline.schedule.grid import render
from tahq.pipeline.schedule.schedule import ActionKind
from tahq.plan.simulate.costs import Costs, CutCosts, HostCosts, uniform_costs
from tahq.plan.simulate.simulator import SimulatedNetwork, Transfer, draw_grid, simulate

ONE_BYTE_A_SECOND = HostCosts(uplink_bits_per_s=8.0, downlink_bits_per_s=8.0)


def span(timeline, text):
    return next(span for span in timeline.actions if span.action == schedules.action(text))


def times(timeline, text):
    return span(timeline, text).start_s, span(timeline, text).end_s


def busy_s(timeline, stage):
    return sum(span.end_s - span.start_s for span in timeline.actions if span.stage == stage)


BUBBLES = [
    # the last stage starts P − 1 forwards late, the first one ends P − 1 backwards later: (m + P − 1)·3 in all
    *(
        (name, {}, stages, count, 3 * (count + stages - 1))
        for name, stages, count in itertools.product(("gpipe", "1f1b"), (1, 4), (1, 8))
    ),
    # F, I and W of one unit each: 3m + P − 1 (Qi et al. 2023, ZB-H1)
    *(("zero-bubble", {}, stages, count, 3 * count + stages - 1) for stages, count in ((1, 8), (4, 9), (8, 32))),
    # (P − 1)·(f + b)/v (Narayanan et al. 2021, §2.2)
    *(("interleaved", {"chunks_per_stage": 2}, 4, count, 3 * count + 3 * 3 / 2) for count in (4, 8, 32)),
]


@pytest.mark.parametrize(("name", "options", "num_stages", "count", "step_s"), BUBBLES)
def test_bubble_without_a_wire_is_the_textbook_one(name, options, num_stages, count, step_s):
    schedule = generate(name, num_stages, count, **options)
    chunks = options.get("chunks_per_stage", 1)
    costs = uniform_costs(chunks * num_stages, num_stages, forward_s=1 / chunks, backward_s=2 / chunks)
    timeline = simulate(schedule, costs)
    assert timeline.step_time_s == step_s
    assert all(busy_s(timeline, stage) == 3 * count for stage in range(num_stages))


class Wire:
    """A network that runs until all is delivered: what was delivered when, by direction and micro-batch."""

    def __init__(self, costs, **changes):
        self.delivered = {}
        self._events, self._numbers = [], itertools.count()
        self._network = SimulatedNetwork(replace(costs, **changes), self._at)

    def _at(self, time_s, event):
        heapq.heappush(self._events, (time_s, next(self._numbers), event))

    def queue(self, direction, micro_batch, source, target, nbytes, queued_s=0.0):
        transfer = Transfer(0, direction, micro_batch, source, target, nbytes)
        self._at(queued_s, lambda now: self._network.send(transfer, now, lambda: self._note(transfer)))

    def _note(self, done):
        self.delivered[f"{done.direction.name.lower()} {done.micro_batch}"] = done.delivered_s

    def run(self):
        while self._events:
            now, _, event = heapq.heappop(self._events)
            event(now)
        return self.delivered


THREE_STAGES = uniform_costs(3, 3, forward_s=1, backward_s=1, host=ONE_BYTE_A_SECOND)


@pytest.mark.parametrize(
    ("first", "times_s"),
    [
        ("oldest", {"forward 1": 4, "backward 0": 8, "forward 2": 12}),
        ("activations", {"forward 1": 4, "forward 2": 8, "backward 0": 12}),
        # the first activation's first piece has left when the gradient comes
        ("gradients", {"backward 0": 6, "forward 1": 8, "forward 2": 12}),
        # links take turns: activation, gradient, activation, gradient, and the other activation
        (None, {"forward 1": 6, "backward 0": 8, "forward 2": 12}),
    ],
)
def test_frames_that_go_first_go_between_pieces(first, times_s):
    """Frames of 4 bytes in pieces of 2 at a byte a second; a gradient comes while the first activation is sent."""
    wire = Wire(THREE_STAGES, piece_nbytes=2, first=first)
    wire.queue(Direction.FORWARD, 1, 1, 2, 4)
    wire.queue(Direction.BACKWARD, 0, 1, 0, 4)
    wire.queue(Direction.FORWARD, 2, 1, 2, 4)
    assert wire.run() == times_s


@pytest.mark.parametrize(
    ("queue_s", "times_s"),
    [
        # without an end: both have left at 4 and arrive by turns until 8; stage 2 sends the other frame from 4 to 8
        (math.inf, {"forward 0": 7, "backward 0": 8, "forward 9": 8}),
        # of 2 s, here 2 bytes: from 2 on one piece goes when one has come, in turn; stage 2 sends nothing from 2 to 3,
        # and from 4 on the other frame's pieces where the older frame's have no room; a byte of it is left at 8
        (2.0, {"forward 0": 7, "backward 0": 8, "forward 9": 9}),
    ],
)
def test_frames_that_do_not_fit_into_a_queue_wait_in_their_sender(queue_s, times_s):
    """Stages 0 and 2 send 4 bytes each to stage 1, in pieces of one; at 4, stage 2 has 4 more for stage 0."""
    wire = Wire(THREE_STAGES, piece_nbytes=1, queue_s=queue_s)
    wire.queue(Direction.FORWARD, 0, 0, 1, 4)
    wire.queue(Direction.BACKWARD, 0, 2, 1, 4)
    wire.queue(Direction.FORWARD, 9, 2, 0, 4, queued_s=4.0)
    assert wire.run() == times_s


@pytest.mark.parametrize(
    ("acknowledged", "times_s"),
    # what comes while nothing is sent costs nothing; the second piece of the gradient waits for 2 bytes' worth
    [(0.0, {"forward 0": 2, "backward 0": 5}), (0.25, {"forward 0": 2, "backward 0": 5.5})],
)
def test_acknowledgements_hold_up_what_is_sent_meanwhile(acknowledged, times_s):
    """Stage 1 gets 2 bytes from stage 0 until 2, and sends it 4 bytes in pieces of 2, from 1 on."""
    wire = Wire(THREE_STAGES, piece_nbytes=2, acknowledged=acknowledged)
    wire.queue(Direction.FORWARD, 0, 0, 1, 2)
    wire.queue(Direction.BACKWARD, 0, 1, 0, 4, queued_s=1.0)
    assert wire.run() == times_s


def test_one_micro_batch_crosses_a_slow_link():
    cut = CutCosts(5, 3, latency_s=0.5)
    costs = uniform_costs(2, 2, forward_s=1, backward_s=2, cut=cut, host=ONE_BYTE_A_SECOND)
    timeline = simulate(generate("1f1b", 2, 1), replace(costs, commit_s=1))
    # forward 0–1; 5 bytes 1–6, + 0.5 = 6.5, cut through the equally fast downlink
    assert times(timeline, "1F0") == (6.5, 7.5)
    assert times(timeline, "1B0") == (7.5, 9.5)
    # gradient: 3 bytes 9.5–12.5, there at 13
    assert times(timeline, "0B0") == (13, 15)
    # and a second for the commit
    assert timeline.step_time_s == 16
    activation, gradient = timeline.transfers
    assert (activation.direction, activation.queued_s, activation.start_s) == (Direction.FORWARD, 1, 1)
    assert (activation.sent_s, activation.delivered_s) == (6, 6.5)
    assert (gradient.direction, gradient.source, gradient.target, gradient.nbytes) == (Direction.BACKWARD, 1, 0, 3)


@pytest.mark.parametrize("pieces", [None, 1, 4])
@pytest.mark.parametrize(
    ("uplink", "path", "downlink", "arrival"),
    [
        # 12 bytes, computed at 1, latency 2: the slowest of the three alone says when the last one is there
        *((3, 1, 4, 15), (1, 3, 4, 15), (4, 3, 1, 15), (1, math.inf, 1, 15)),
        *((math.inf, 2, math.inf, 9), (math.inf, math.inf, math.inf, 3)),
    ],
)
def test_a_transfer_takes_the_slowest_of_uplink_path_and_downlink(pieces, uplink, path, downlink, arrival):
    cut = CutCosts(12, 0, latency_s=2, forward_bits_per_s=8 * path)
    base = uniform_costs(2, 2, forward_s=1, backward_s=1, cut=cut, host=HostCosts(8 * uplink, 8 * downlink))
    costs = replace(base, piece_nbytes=pieces)
    assert times(simulate(generate("gpipe", 2, 1), costs), "1F0")[0] == pytest.approx(arrival)


@pytest.mark.parametrize("relay", [HostCosts(8 * 2, 8 * 4), 2])
def test_a_relayed_frame_crosses_the_relays_downlink_and_its_uplink_piece_by_piece(relay):
    # 12 bytes in pieces of 4, computed at 1, at the relay at 2: its downlink 2–3–4–5, its uplink 3–5–7–9, there at 10
    cuts = [CutCosts(12, 0, latency_s=2, is_relayed=True), CutCosts()]
    base = uniform_costs(3, 3, forward_s=1, backward_s=1)
    hosts = [HostCosts(), HostCosts(), HostCosts(8 * 2, 8 * 4)]
    costs = Costs(base.compute_s, cuts, hosts, piece_nbytes=4, relay=relay)
    timeline = simulate(generate("gpipe", 3, 1), costs)
    assert times(timeline, "1F0")[0] == pytest.approx(10)
    (transfer,) = [each for each in timeline.transfers if each.nbytes == 12]
    assert (transfer.source, transfer.target, transfer.queued_s, transfer.start_s) == (0, 1, 1, 1)
    assert transfer.delivered_s == pytest.approx(10)


def test_a_relaying_host_sends_its_own_frames_and_those_of_others_over_one_uplink():
    # stage 2's uplink takes a second per byte: its gradients 5–11–17, and those that it relays from 1 to 0 17–23–29
    cuts = [CutCosts(0, 6, is_relayed=True), CutCosts(0, 6)]
    base = uniform_costs(3, 3, forward_s=1, backward_s=1)
    hosts = [HostCosts(), HostCosts(), HostCosts(uplink_bits_per_s=8)]
    timeline = simulate(generate("gpipe", 3, 2), Costs(base.compute_s, cuts, hosts, relay=2))
    sent = [each for each in timeline.transfers if each.direction is Direction.BACKWARD]
    assert len(sent) == 4
    assert timeline.step_time_s == 30


def test_a_slow_path_holds_up_no_other_path_of_its_sender():
    # the middle stage's uplink takes 12 bytes in 1 s; the path down takes 12 s for them, the path up none
    schedule = schedules.schedule("0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1\n2F0 2B0 2F1 2B1")
    hosts = [HostCosts(), HostCosts(uplink_bits_per_s=96.0), HostCosts()]
    base = uniform_costs(3, 3, forward_s=1, backward_s=1)
    cuts = [CutCosts(0, 12), CutCosts(12, 0, forward_bits_per_s=8.0)]
    timeline = simulate(schedule, Costs(base.compute_s, cuts, hosts))
    # 1F0 1–2 and 1F1 2–3 send; the path is busy 2–14–26. 2F0 14–15, 2B0 15–16, 1B0 16–17, its gradient 17–18
    assert times(timeline, "2F0") == (14, 15)
    assert times(timeline, "0B0") == (18, 19)
    assert times(timeline, "2F1") == (26, 27)


def test_two_cuts_between_the_same_hosts_share_their_path():
    # chunks 0 and 2 on stage 0, 1 on stage 1: the activation of 0 and the gradient of 2 both go from 0 to 1
    schedule = schedules.schedule("0F0 2F0 2B0 0F1 2F1 2B1 0B0 0B1\n1F0 1F1 1B0 1B1")
    base = uniform_costs(3, 2, forward_s=1, backward_s=1)
    cuts = [CutCosts(10, 0, forward_bits_per_s=8.0), CutCosts(0, 10, backward_bits_per_s=8.0)]
    timeline = simulate(schedule, Costs(base.compute_s, cuts, base.hosts))
    # 0F0 0–1, 10 s on the path; 1F0 11–12, 2F0 12–13, 2B0 13–14, its gradient 14–24; 0F1 14–15, behind it until 34
    assert times(timeline, "1F1") == (34, 35)


CODEC = CutCosts(forward_encode_s=2, forward_decode_s=3, backward_encode_s=4, backward_decode_s=5)


def test_codec_beside_compute_overlaps_it():
    base = uniform_costs(2, 2, forward_s=1, backward_s=1, cut=CODEC)
    timeline = simulate(generate("gpipe", 2, 2), base)
    assert (times(timeline, "0F0"), times(timeline, "0F1")) == ((0, 1), (1, 2))
    # lane 0 encodes 1–3, 3–5; lane 1 decodes 3–6, 6–9
    assert (times(timeline, "1F0"), times(timeline, "1F1")) == ((6, 7), (9, 10))
    # 1B0 10–11, 1B1 11–12; lane 1 encodes 11–15, 15–19; lane 0 decodes 15–20, 20–25
    assert (times(timeline, "0B0"), times(timeline, "0B1")) == ((20, 21), (25, 26))


def test_stages_that_share_a_gpu_compute_together_at_its_speed():
    costs = uniform_costs(2, 2, forward_s=2, backward_s=4)
    timeline = simulate(generate("1f1b", 2, 2), replace(costs, devices=(0, 0)))
    # forward 1 of stage 0 and forward 0 of stage 1 take turns from 2 on, then backward 0 of stage 1 is alone
    assert [times(timeline, name) for name in ("0F1", "1F0", "1B0")] == [(2, 6), (2, 6), (6, 10)]
    assert timeline.step_time_s == 2 * 2 * (2 + 4)


def test_interleaved_chunks_send_round_the_ring():
    schedule = schedules.schedule("0F0 2F0 2B0 0B0\n1F0 3F0 3B0 1B0")
    costs = uniform_costs(4, 2, forward_s=1, backward_s=1, cut=CutCosts(1, 1), host=ONE_BYTE_A_SECOND)
    # eight actions, one after another, and six crossings of 1 s between them
    assert simulate(schedule, costs).step_time_s == 8 + 6


def test_deadlock_is_reported():
    with pytest.raises(ScheduleError, match="deadlocks with stage 0 at 0B0, stage 1 at 1B0"):
        simulate(schedules.schedule("0F0 0B0\n1B0 1F0"), uniform_costs(2, 2, forward_s=1, backward_s=1))


DURATIONS = st.integers(0, 20).map(float)
RATES = st.sampled_from([8.0, 16.0, 40.0, math.inf])


@st.composite
def steps(draw):
    num_stages, num_micro_batches = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    name = draw(st.sampled_from(("gpipe", "1f1b", "zero-bubble")))
    depths = (
        None
        if name == "gpipe"
        else draw(st.none() | st.lists(st.integers(1, 8), min_size=num_stages, max_size=num_stages))
    )
    schedule = generate(name, num_stages, num_micro_batches, depths=depths)
    cut = st.builds(CutCosts, *[DURATIONS] * 7, RATES, RATES)
    cuts = [draw(cut) for _ in range(num_stages - 1)]
    hosts = [draw(st.builds(HostCosts, RATES, RATES)) for _ in range(num_stages)]
    compute_s = {(chunk, kind): draw(DURATIONS) for chunk in range(num_stages) for kind in ActionKind}
    pieces = draw(st.sampled_from([None, 3]))
    first = draw(st.sampled_from(get_args(First)))
    devices = draw(st.just(()) | st.lists(st.integers(0, 2), min_size=num_stages, max_size=num_stages))
    return schedule, Costs(compute_s, cuts, hosts, draw(DURATIONS), pieces, first, devices=devices)


@given(steps())
@settings(max_examples=80, deadline=None)
def test_any_step_obeys_its_resources(step):
    schedule, costs = step
    timeline = simulate(schedule, costs)
    assert timeline == simulate(schedule, costs)
    assert len(timeline.actions) == sum(map(len, schedule.actions))
    for stage, row in enumerate(schedule.actions):
        spans = [span(timeline, str(action)) for action in row]
        assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(spans))
        sent = sorted((t.start_s, t.sent_s) for t in timeline.transfers if t.source == stage)
        if costs.piece_nbytes is None:  # pieces of a frame that goes first come between those of another
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(sent))
        # the stage's own work and its uplink's bytes are both lower bounds
        assert timeline.step_time_s >= busy_s(timeline, stage) + costs.commit_s - 1e-9
    for transfer in timeline.transfers:
        assert transfer.queued_s <= transfer.start_s <= transfer.sent_s
        cut = costs.cuts[transfer.cut]
        assert transfer.delivered_s >= transfer.sent_s + cut.latency_s - 1e-9
        forward = transfer.direction is Direction.FORWARD
        path = cut.forward_bits_per_s if forward else cut.backward_bits_per_s
        rate = min(path, costs.hosts[transfer.target].downlink_bits_per_s)
        assert transfer.delivered_s >= transfer.start_s + cut.latency_s + 8 * transfer.nbytes / rate - 1e-9


# -- the picture ---------------------------------------------------------------------------------


def test_grid_draws_backwards_twice_as_wide_and_keeps_labels_apart():
    assert draw_grid(generate("1f1b", 2, 2)).splitlines() == [
        "stage 0  0F0 0F1 .   .   0B0---- .   0B1----",
        "stage 1  .   1F0 1B0---- 1F1 1B1---- .   .",
    ]
    assert "0F10 0B0------ 0B1" in draw_grid(generate("gpipe", 1, 11))


@pytest.mark.parametrize("width", [40, 60, 79, 80, 100])
def test_grid_is_cut_at_the_terminal_with_a_note(width):
    whole = draw_grid(generate("1f1b", 4, 8)).splitlines()
    *rows, note = draw_grid(generate("1f1b", 4, 8), width).splitlines()
    assert all(len(row) <= width for row in rows)
    assert all(whole_row.startswith(row) for row, whole_row in zip(rows, whole, strict=True))
    # 4 stages and 8 micro-batches take (8 + 4 - 1) * 3 slots
    assert "of 33 time slots shown" in note
    needed = int(note.split("needs ")[1].split()[0])
    assert draw_grid(generate("1f1b", 4, 8), needed).splitlines() == whole


def test_grid_of_a_simulated_step_is_to_scale():
    # 3 s for the activation's bytes, 1 s for the gradient's
    costs = uniform_costs(2, 2, forward_s=1, backward_s=2, cut=CutCosts(3, 1), host=ONE_BYTE_A_SECOND)
    assert draw_grid(simulate(generate("1f1b", 2, 1), costs)).splitlines() == [
        "stage 0  0F0 .   .   .   .   .   .   .   0B0----",
        "stage 1  .   .   .   .   1F0 1B0---- .   .   .",
    ]


def test_picture_of_nothing_has_the_names_of_the_rows():
    assert render([], ["a", "b"]).splitlines() == ["a", "b"]
