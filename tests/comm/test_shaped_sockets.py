"""Shaping as a receiver sees it, through real sockets and threads.

The machine may be busy: a measurement is repeated, and the best of three counts. Being held up makes a
link slower, never faster than it is set to, so this cannot hide a rate that is too high; that is
checked for every run.
"""

import time
from dataclasses import replace

import pytest

from tahq.comm.frame import Direction
from tahq.comm.shaping import Shaping

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


def test_small_frame_of_another_link_does_not_wait_for_what_is_queued(make_endpoint, make_frame):
    shaping = Shaping(rate_bits_per_s=20 * MEGABIT, piece_nbytes=65536)
    hub = make_endpoint(1, shaping=shaping)
    down, up = make_endpoint(0), make_endpoint(2)
    busy, quick = hub.open_link(0, 0, "down", down.address), hub.open_link(1, 2, "up", up.address)
    down.open_link(0, 1, "hub", "")
    receiver = up.open_link(1, 1, "hub", "")
    hub.wait_connected(10.0)
    busy.send(make_frame(2_000_000))  # 0.8 s
    small = make_frame(1000)
    receiver.expect(small.id, 1000)
    started_s = time.monotonic()
    quick.send(small)
    receiver.recv(10.0)
    assert time.monotonic() - started_s < 0.3  # a piece takes 26 ms
    busy_stats = busy.take_stats()[0]
    assert busy_stats.payload_bytes == 2_000_000
