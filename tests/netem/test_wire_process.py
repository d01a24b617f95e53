"""The wire's process over pairs of sockets, each of which stands for a host's device; and its owner's requests."""

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from multiprocessing.connection import Connection

import pytest
from support.ethernet_frames import udp_frame

from tahq.errors import NetworkError
from tahq_netem.network.description import PathShape, plan_network, uniform
from tahq_netem.programs import module_argv, module_environment
from tahq_netem.wire import process as wire_process
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


def test_plan_of_many_hosts_gets_through(start):
    _, hosts = start(100)  # 1 MB, through buffers of 0.2 MB
    hosts[0].send(udp_frame(b"x", destination="10.77.0.100"))
    assert hosts[99].recv(2048)


def test_request_that_fails_is_refused_with_the_reason_and_the_next_is_served(start):
    wire, _ = start(2)
    for request, reason in ((("explode",), "AttributeError: .*explode"), (("set_rates", "host0"), "TypeError")):
        with pytest.raises(NetworkError, match=f"wire process refused: {reason}"):
            wire.ask(*request)
    wire.ask("set_path", "host0", "host1", PathShape(delay_s=0.1))


def test_wire_ends_with_its_owners_connection(start):
    wire, _ = start(2)
    wire.close()
    wire.close()
    with pytest.raises(NetworkError, match=r"wire process is gone .*; build the network again"):
        wire.ask("set_link", "host0", True)


def test_owner_that_is_gone_before_it_has_sent_the_order_is_no_error():
    own_end, wire_end = socket.socketpair()
    with wire_end, os.fdopen(os.pidfd_open(os.getpid()), "rb") as owner:
        descriptors = [wire_end.fileno(), owner.fileno()]
        argv = module_argv("tahq_netem.wire.process", *map(str, descriptors))
        wire = subprocess.Popen(argv, pass_fds=descriptors, env=module_environment(), stderr=subprocess.PIPE)
    own_end.close()
    assert wire.communicate(timeout=60) == (None, b"")
    assert wire.returncode == 0


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


def test_process_that_ends_while_it_is_asked_is_named(control):
    own, process = control
    end = threading.Thread(target=lambda: (process.recv(), process.close()))
    end.start()
    with pytest.raises(NetworkError, match=r"wire process has ended \(see its output on stderr\); build"):
        own.ask("a")
    end.join()


def test_closing_wakes_the_thread_that_waits_for_an_answer(control):
    own, _ = control
    closer = threading.Timer(0.2, own.close)
    closer.start()
    start_s = time.monotonic()
    with pytest.raises(NetworkError, match=r"has ended|is gone"):
        own.ask("a")
    assert time.monotonic() - start_s < ANSWER_TIMEOUT_S / 2
    closer.join()


def test_signal_handler_may_close_while_an_answer_is_waited_for(control):
    own, process = control
    before = signal.signal(signal.SIGALRM, lambda *_: own.close())
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(NetworkError):
            own.ask("a")
    finally:
        signal.signal(signal.SIGALRM, before)
    assert process.recv() == ("a",)
    with pytest.raises(EOFError):
        process.recv()


def test_forked_child_that_closes_leaves_the_connection_open(control, monkeypatch):
    own, process = control
    in_child = WireControl(own._socket.dup())
    with monkeypatch.context() as patch:
        patch.setattr(wire_process.os, "getpid", lambda: 1)
        in_child.close()
    process.send(("answer", None))
    assert own.ask("a") == "answer"
