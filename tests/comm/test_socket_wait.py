import logging
import os
import resource
import threading
import time

import pytest
import zmq

from tahq.comm.zmq.monitor import RateLimitedLog
from tahq.comm.zmq.socket_wait import WaitSet, Waker, take_messages
from tahq.comm.zmq.sockets import ENOUGH, raise_descriptor_limit, replace_silent_connections


@pytest.fixture
def waker():
    waker = Waker()
    yield waker
    waker.close()


@pytest.fixture
def pair():
    context = zmq.Context()
    left, right = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    port = left.bind_to_random_port("tcp://127.0.0.1")
    right.connect(f"tcp://127.0.0.1:{port}")
    yield left, right
    context.destroy(linger=0)


def took_s(wait_set: WaitSet, timeout_s: float) -> float:
    started_s = time.monotonic()
    wait_set.wait(timeout_s)
    return time.monotonic() - started_s


def test_timeout_is_kept_to_well_below_a_millisecond(waker):
    wait_set = WaitSet(waker)
    late_s = min(took_s(wait_set, 0.0103) - 0.0103 for _ in range(10))
    assert 0.0 <= late_s < 0.0005


def assert_quiet_once_cleared(waker: Waker) -> None:
    waker.clear()
    assert took_s(WaitSet(waker), 0.02) >= 0.02


def test_waker_that_is_woken_in_the_midst_of_clearing_wakes_once_more(waker, monkeypatch):
    read, waking = os.eventfd_read, threading.Thread(target=waker.wake)

    def slowly(descriptor: int) -> int:
        value = read(descriptor)
        if waking.ident is None:
            waker._is_set = False  # as the one that wakes sees it who looked before
            waking.start()
            waking.join(0.05)
        return value

    waker.wake()
    monkeypatch.setattr(os, "eventfd_read", slowly)
    waker.clear()
    waking.join()
    assert took_s(WaitSet(waker), 5.0) < 1.0
    assert_quiet_once_cleared(waker)


def test_wakes_of_a_racing_thread_are_never_lost(waker):
    """Every item that is queued before a wake is seen, however the two threads interleave."""
    wait_set, items, seen = WaitSet(waker), [], 0

    def produce() -> None:
        for i in range(5000):
            items.append(i)
            waker.wake()

    producer = threading.Thread(target=produce)
    producer.start()
    while seen < 5000:
        waker.clear()
        seen = len(items)
        if seen < 5000:
            assert took_s(wait_set, 10.0) < 5.0
    producer.join()


def test_wake_after_close_has_no_effect():
    waker = Waker()
    waker.close()
    waker.close()
    waker.wake()


def test_message_ends_the_wait_and_is_there(waker, pair):
    left, right = pair
    wait_set = WaitSet(waker)
    got = []
    wait_set.add(left, lambda: got.extend(parts[0].bytes for parts in take_messages(left, 64)))
    for i in range(50):
        right.send(b"%d" % i)
        assert took_s(wait_set, 10.0) < 5.0
        wait_set.serve()
        assert got == [b"%d" % number for number in range(i + 1)]
    assert took_s(wait_set, 0.02) >= 0.02


def test_log_that_is_limited_says_how_much_it_left_out(caplog):
    now_s = [0.0]
    log = RateLimitedLog(logging.getLogger("tahq.comm.test"), interval_s=5.0, clock=lambda: now_s[0])
    for now_s[0] in (0.0, 1.0, 4.9, 5.0, 6.0, 20.0):
        log.warning(f"at {now_s[0]}")
    assert caplog.messages == [
        "at 0.0",
        "at 5.0 (2 more like this were left out)",
        "at 20.0 (1 more like this were left out)",
    ]


def test_waiting_works_with_descriptors_beyond_1023(waker):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    raise_descriptor_limit()
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    context = zmq.Context()
    left, right = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    try:
        left.bind("inproc://far")
        right.connect("inproc://far")
        wait_set = WaitSet(waker)
        wait_set.add(right, lambda: None)
        assert right.get(zmq.FD) > 1023
        assert took_s(wait_set, 0.02) >= 0.02
        threading.Timer(0.05, left.send, (b"x",)).start()
        assert took_s(wait_set, 5.0) < 1.0
        wait_set.close(0)
    finally:
        context.destroy(linger=0)
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_limit_of_descriptors_is_raised_and_never_lowered():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        for given in (256, 20_000):
            if hard >= 20_000:
                resource.setrlimit(resource.RLIMIT_NOFILE, (given, hard))
                raise_descriptor_limit()
                assert resource.getrlimit(resource.RLIMIT_NOFILE) == (max(given, ENOUGH), hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(("peer_timeout_s", "expected_ms"), [(10.0, 2000), (60.0, 12000), (1.0, 200)])
def test_connection_whose_peer_acknowledges_nothing_is_closed_by_the_kernel(peer_timeout_s, expected_ms):
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        replace_silent_connections(socket, peer_timeout_s)
        assert socket.get(zmq.TCP_MAXRT) == expected_ms
        assert socket.get(zmq.TCP_KEEPALIVE) == 1
