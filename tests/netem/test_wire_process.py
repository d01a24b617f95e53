"""The wire's process over pairs of sockets, each of which stands for a host's device; and its owner's requests."""

import contextlib
import socket
import threading
import time
from multiprocessing.connection import Connection

import pytest
from support.ethernet_frames import udp_frame

from tahq.errors import NetworkError
from tahq_netem.network.description import plan_network, uniform
from tahq_netem.wire.process import ANSWER_TIMEOUT_S, WireControl, WireProcess


@pytest.fixture
def start():
    """start(num_hosts): a wire that is up, and the hosts' ends of its devices."""
    with contextlib.ExitStack() as stack:

        def begin(num_hosts):
            pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(num_hosts)]
            hosts = [stack.enter_context(host) for host, _ in pairs]
            for host, device in pairs:
                host.settimeout(20)
                device.setblocking(False)
            addresses = [f"10.77.0.{index + 1}" for index in range(num_hosts)]
            devices = [device.fileno() for _, device in pairs]
            wire = WireProcess(devices, plan_network(uniform(num_hosts)), addresses)
            for _, device in pairs:
                device.close()
            return stack.enter_context(contextlib.closing(wire)), hosts

        yield begin


def test_frames_get_where_they_are_addressed_to(start):
    _, hosts = start(3)
    frame = udp_frame(b"hello", source="10.77.0.1", destination="10.77.0.3")
    hosts[0].send(frame)
    assert hosts[2].recv(2048) == frame


def test_device_that_takes_nothing_does_not_affect_the_others(start):
    _, hosts = start(3)
    hosts[1].close()
    hosts[0].send(udp_frame(b"to a device that is gone", destination="10.77.0.2"))
    last = udp_frame(b"after that", destination="10.77.0.3")
    hosts[0].send(last)
    assert hosts[2].recv(2048) == last


def test_request_that_fails_is_refused_with_the_reason_and_the_next_is_served(start):
    wire, _ = start(2)
    for request, reason in ((("explode",), "AttributeError: .*explode"), (("set_link", "host0"), "TypeError")):
        with pytest.raises(NetworkError, match=f"wire process refused: {reason}"):
            wire.ask(*request)
    wire.ask("set_plan", plan_network(uniform(2, delay=0.1)))


def test_wire_ends_with_its_owners_connection(start):
    wire, _ = start(2)
    wire.close()
    wire.close()
    with pytest.raises(NetworkError, match=r"wire process is gone .*; build the network again"):
        wire.ask("set_link", "host0", True)


# -- the connection, with a thread in place of the process ----------------------------------------


@pytest.fixture
def control():
    """The owner's end, and the process's."""
    own, other = socket.socketpair()
    control = WireControl(own)
    with Connection(other.detach()) as process:
        yield control, process
        control.close()


def test_process_that_does_not_answer_in_time_is_given_up(control):
    own, process = control
    with pytest.raises(NetworkError, match=r"wire process did not answer within 0\.1 s"):
        own.ask("a", timeout_s=0.1)
    process.send(("too late", None))
    with pytest.raises(NetworkError, match=r"wire process did not answer within 0\.1 s"):
        own.ask("b")


def test_closing_wakes_the_thread_that_waits_for_an_answer(control):
    own, _ = control
    closer = threading.Timer(0.2, own.close)
    closer.start()
    start_s = time.monotonic()
    with pytest.raises(NetworkError, match=r"has ended|is gone"):
        own.ask("a")
    assert time.monotonic() - start_s < ANSWER_TIMEOUT_S / 2
    closer.join()
