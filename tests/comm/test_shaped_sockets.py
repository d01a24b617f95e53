"""Shaping as a receiver sees it, through real sockets and threads.

The machine may be busy: a measurement is repeated, and the best of three counts. Being held up makes a
link slower, never faster than it is set to, so this cannot hide a rate that is too high; that is
checked for every run.
"""

import time
from dataclasses import replace

import pytest
import torch

from tahq.comm.link.frame import Direction
from tahq.comm.link.shaping import Shaping

pytestmark = pytest.mark.serial

TOLERANCE = 0.05
MEGABIT = 1e6


def join(make_endpoint, shaping):
    lower, upper = make_endpoint(1, shaping=shaping), make_endpoint(2, shaping=shaping)
    sender = lower.open_link(1, 2, "upper", "")
    receiver = upper.open_link(1, 1, "lower", lower.address)
    lower.wait_connected(10.0)
    upper.wait_connected(10.0)
    return sender, receiver


def stream_goodput(sender, receiver, frames) -> float:
    """Payload bits a second, from the first send until the receiver has the last frame."""
    for frame in frames:
        receiver.expect(frame.id, frame.payload.numel())
    started_s = time.monotonic()
    for frame in frames:
        sender.send(frame)
    for _ in frames:
        receiver.recv(30.0)
    return 8 * sum(frame.payload.numel() for frame in frames) / (time.monotonic() - started_s)


@pytest.mark.parametrize(("rate_mbit", "num_frames"), [(20, 3), (100, 10), (300, 30)])
def test_goodput_is_within_five_percent(rate_mbit, num_frames, make_endpoint, make_frame):
    rate = rate_mbit * MEGABIT
    sender, receiver = join(make_endpoint, Shaping(rate_bits_per_s=rate))
    payload = make_frame(1_000_000).payload
    goodputs = []
    for attempt in range(3):
        ids = [make_frame(0, micro_batch=i, step=attempt) for i in range(num_frames)]
        goodputs.append(stream_goodput(sender, receiver, [replace(frame, payload=payload) for frame in ids]))
        assert goodputs[-1] <= rate
        if goodputs[-1] > rate * (1 - TOLERANCE):
            return
    pytest.fail(f"goodputs {goodputs} bit/s; set were {rate}")


@pytest.mark.parametrize("delay_ms", [5, 20, 100])
def test_one_way_delay_of_a_small_frame_is_as_set(delay_ms, make_endpoint, make_frame):
    rate, delay_s = 100 * MEGABIT, delay_ms / 1000
    sender, receiver = join(make_endpoint, Shaping(rate, delay_s))
    expected_s = delay_s + 8 * 1100 / rate
    took_s = []
    for i in range(5):
        frame = make_frame(1000, micro_batch=i)
        receiver.expect(frame.id, 1000)
        time.sleep(0.01)
        started_s = time.monotonic()
        sender.send(frame)
        receiver.recv(5.0)
        took_s.append(time.monotonic() - started_s)
    # a piece is held 0.6 ms less than the delay, for what handling takes at both ends; the least of five is nearest
    assert expected_s - 0.0006 <= min(took_s) <= expected_s + max(0.001, TOLERANCE * expected_s)


def test_links_of_a_host_share_its_uplink(make_endpoint, make_frame):
    rate = 80 * MEGABIT
    shaping = Shaping(rate_bits_per_s=rate)
    hub = make_endpoint(1, shaping=shaping)
    down, up = make_endpoint(0, shaping=shaping), make_endpoint(2, shaping=shaping)
    links = [hub.open_link(0, 0, "down", down.address), hub.open_link(1, 2, "up", up.address)]
    receivers = [down.open_link(0, 1, "hub", ""), up.open_link(1, 1, "hub", "")]
    hub.wait_connected(10.0)
    started_s = time.monotonic()
    for link, receiver in zip(links, receivers, strict=True):
        frame = make_frame(2_000_000, direction=Direction.FORWARD)
        receiver.expect(frame.id, 2_000_000)
        link.send(frame)
    for receiver in receivers:
        receiver.recv(10.0)
    took_s = time.monotonic() - started_s
    assert took_s > 0.99 * 8 * 4e6 / rate
    assert took_s < 1.5 * 8 * 4e6 / rate


def test_senders_to_one_host_share_its_downlink(make_endpoint, make_frame):
    rate = 80 * MEGABIT
    shaping = Shaping(rate_bits_per_s=rate)
    hub = make_endpoint(1, shaping=shaping)
    down, up = make_endpoint(0, shaping=shaping), make_endpoint(2, shaping=shaping)
    receivers = [hub.open_link(0, 0, "down", down.address), hub.open_link(1, 2, "up", up.address)]
    senders = [down.open_link(0, 1, "hub", ""), up.open_link(1, 1, "hub", "")]
    hub.wait_connected(10.0)
    started_s = time.monotonic()
    for sender, receiver in zip(senders, receivers, strict=True):
        frame = make_frame(2_000_000)
        receiver.expect(frame.id, 2_000_000)
        sender.send(frame)
    for receiver in receivers:
        receiver.recv(10.0)
    took_s = time.monotonic() - started_s
    # The first piece comes through unhindered: the other's is held up by it, not the other way round.
    assert took_s > 0.9 * 8 * 4e6 / rate
    assert took_s < 1.5 * 8 * 4e6 / rate


def time_behind_four_megabytes(first, make_endpoint, make_frame) -> float:
    """Seconds of a gradient on one link of a host with 4 MB of activations queued on the other, 0.8 s of its uplink."""
    shaping = Shaping(rate_bits_per_s=40 * MEGABIT, piece_nbytes=65536)
    hub = make_endpoint(1, shaping=shaping, first=first)
    down, up = make_endpoint(0), make_endpoint(2)
    back, onward = hub.open_link(0, 0, "down", down.address), hub.open_link(1, 2, "up", up.address)
    receiver, sink = down.open_link(0, 1, "hub", ""), up.open_link(1, 1, "hub", "")
    hub.wait_connected(10.0)
    activation = make_frame(4_000_000)
    sink.expect(activation.id, 4_000_000)
    onward.send(activation)
    gradient = make_frame(1000, direction=Direction.BACKWARD)
    receiver.expect(gradient.id, 1000)
    started_s = time.monotonic()
    back.send(gradient)
    receiver.recv(10.0)
    took_s = time.monotonic() - started_s
    assert torch.equal(sink.recv(10.0).payload, activation.payload)
    return took_s


def test_gradient_that_is_to_go_first_goes_between_pieces_of_the_other_link(make_endpoint, make_frame):
    took_s = time_behind_four_megabytes("gradients", make_endpoint, make_frame)
    assert took_s < 0.3  # a piece takes 13 ms


@pytest.mark.parametrize("first", ["oldest", "activations"])
def test_gradient_that_is_not_to_go_first_waits_for_what_was_queued_before_it(first, make_endpoint, make_frame):
    assert time_behind_four_megabytes(first, make_endpoint, make_frame) > 0.7
