"""The lines between an owner and its process: in pieces of any length, late, long, or never."""

import contextlib
import json
import os
import signal
import socket
import threading
import time

import pytest

from tahq.errors import LocalProtocolError, NetworkError
from tahq_netem.network.description import HostShape, plan_network, uniform
from tahq_netem.wire import control as wire_control
from tahq_netem.wire.control import (
    ANSWER_TIMEOUT_S,
    WireControl,
    plan_from_json,
    plan_to_json,
    read_line,
    send_line,
    serve,
)

LONG = "x" * 3_000_000
"""Longer than the buffers of both sockets together."""


@pytest.fixture
def ends():
    own, other = socket.socketpair()
    with own, other:
        yield own, other


@contextlib.contextmanager
def serving(connection, carry_out):
    """A process that takes an order and then answers, as a thread; it ends with the connection."""
    taken = []

    def run():
        taken.append(json.loads(read_line(connection)))
        send_line(connection, {"ready": {"is_up": True}})
        while serve(connection, carry_out):
            pass

    thread = threading.Thread(target=run)
    thread.start()
    yield taken
    thread.join(20)
    assert not thread.is_alive()


def test_a_plan_comes_back_as_it_was():
    plan = plan_network(uniform(3, rate=1e8, delay=0.01, jitter=0.001, loss=0.01, reorder=0.02))
    assert plan_from_json(json.loads(json.dumps(plan_to_json(plan)))) == plan


def test_orders_requests_and_answers_may_be_longer_than_any_buffer(ends):
    own, other = ends
    control = WireControl(own)
    with serving(other, lambda request: {"echo": request}) as taken:
        assert control.start({"plan": LONG}) == {"is_up": True}
        assert taken == [{"plan": LONG}]
        control.set_link(LONG, is_up=False)
        assert control._ask({"do": "echo", "text": LONG}) == {"echo": {"do": "echo", "text": LONG}}
        control.close()


@pytest.mark.parametrize(
    "error", [LocalProtocolError("such"), OSError(24, "such"), ValueError("such"), KeyError("such"), TypeError("such")]
)
def test_a_request_that_fails_is_refused_with_the_reason_and_the_next_is_served(ends, error):
    own, other = ends
    outcomes = iter([error, None])

    def carry_out(_request):
        if (outcome := next(outcomes)) is not None:
            raise outcome
        return {"number": 2}

    control = WireControl(own)
    with serving(other, carry_out):
        control.start({})
        with pytest.raises(NetworkError, match=f"wire process refused: {type(error).__name__}.*such"):
            control.set_rates("a", HostShape())
        assert control.counters() == {"number": 2}
        control.close()


def test_a_process_that_does_not_answer_is_given_up(ends, monkeypatch):
    own, other = ends
    monkeypatch.setattr(wire_control, "ANSWER_TIMEOUT_S", 0.1)
    control = WireControl(own)
    with pytest.raises(NetworkError, match=r"wire process did not answer within 0\.1 s"):
        control.counters()
    other.sendall(b'{"done": {"late": true}}\n')
    with pytest.raises(NetworkError, match=r"wire process did not answer within 0\.1 s"):
        control.counters()


def test_a_process_that_takes_nothing_is_given_up(ends, monkeypatch):
    own, _other = ends
    monkeypatch.setattr(wire_control, "START_TIMEOUT_S", 0.1)
    with pytest.raises(NetworkError, match=r"did not answer within 0\.1 s; build the network again"):
        WireControl(own).start({"plan": LONG})


def test_a_process_that_ends_while_it_is_asked_is_named(ends):
    own, other = ends
    control = WireControl(own)
    end = threading.Thread(target=lambda: (other.recv(100), other.close()))
    end.start()
    with pytest.raises(NetworkError, match=r"wire process has ended \(see its output on stderr\); build"):
        control.counters()
    end.join()
    with pytest.raises(NetworkError, match="has ended"):
        control.counters()


def test_closing_wakes_the_thread_that_waits_for_an_answer(ends):
    own, _other = ends
    control = WireControl(own)
    closer = threading.Timer(0.2, control.close)
    closer.start()
    start_s = time.monotonic()
    with pytest.raises(NetworkError, match=r"has ended|is gone"):
        control.counters()
    assert time.monotonic() - start_s < ANSWER_TIMEOUT_S / 2
    closer.join()


def test_a_signal_handler_may_close_while_an_answer_is_waited_for(ends):
    own, other = ends
    control = WireControl(own)
    before = signal.signal(signal.SIGALRM, lambda *_: control.close())
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(NetworkError):
            control.counters()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert other.recv(100)
    assert other.recv(100) == b""


def test_a_forked_child_that_closes_leaves_the_connection_open(ends, monkeypatch):
    own, other = ends
    in_child, control = WireControl(own.dup()), WireControl(own)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 1)
        in_child.close()
    with serving(other, lambda _request: {}):
        assert control.start({}) == {"is_up": True}
        control.close()


def test_malformed_request_is_refused_and_a_partial_one_is_the_end(ends):
    own, other = ends
    own.sendall(b"nonsense\n")
    assert serve(other, lambda _request: {})
    assert "JSONDecodeError" in json.loads(read_line(own))["error"]
    own.sendall(b'{"do": ')
    own.close()
    assert not serve(other, lambda _request: {})
