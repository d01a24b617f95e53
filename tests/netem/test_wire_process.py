"""The wire's process over pairs of sockets, each of which stands for a host's device."""

import contextlib
import json
import os
import socket
import subprocess

import pytest
from support.ethernet_frames import udp_frame

from tahq_netem.network.description import plan_network, uniform
from tahq_netem.programs import module_argv, module_environment
from tahq_netem.wire.control import WireControl, plan_to_json


@contextlib.contextmanager
def process(control, devices):
    """The wire, which ends with the block, without a word."""
    owner = os.pidfd_open(os.getpid())
    with os.fdopen(owner, "rb"):
        descriptors = [control.fileno(), owner, *(device.fileno() for device in devices)]
        wire = subprocess.Popen(
            module_argv("tahq_netem.wire.process", *map(str, descriptors)),
            pass_fds=descriptors,
            env=module_environment(),
            stderr=subprocess.PIPE,
        )
    control.close()
    try:
        yield wire
        _, words = wire.communicate(timeout=60)
    finally:
        wire.kill()
        wire.communicate()
    assert (wire.returncode, words) == (0, b"")


@pytest.fixture
def start():
    """start(num_hosts): the control of a wire that is up, and the hosts' ends of its devices."""
    with contextlib.ExitStack() as stack:

        def begin(num_hosts):
            own_end, wire_end = socket.socketpair()
            pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(num_hosts)]
            hosts = [stack.enter_context(host) for host, _ in pairs]
            devices = [stack.enter_context(device) for _, device in pairs]
            for host, device in pairs:
                host.settimeout(20)
                device.setblocking(False)
            stack.enter_context(process(wire_end, devices))
            control = stack.enter_context(contextlib.closing(WireControl(own_end)))
            for device in devices:
                device.close()
            addresses = [f"10.77.0.{index + 1}" for index in range(num_hosts)]
            plan = plan_to_json(plan_network(uniform(num_hosts)))
            control.start({"plan": plan, "addresses": addresses, "seed": 0})
            return control, hosts

        yield begin


def test_frames_get_where_they_are_addressed_to(start):
    _, hosts = start(3)
    frame = udp_frame(b"hello", source="10.77.0.1", destination="10.77.0.3")
    hosts[0].send(frame)
    assert hosts[2].recv(2048) == frame


def test_a_device_that_takes_nothing_is_counted_and_the_others_go_on(start):
    control, hosts = start(3)
    hosts[1].close()
    hosts[0].send(udp_frame(b"to a device that is gone", destination="10.77.0.2"))
    last = udp_frame(b"after that", destination="10.77.0.3")
    hosts[0].send(last)
    assert hosts[2].recv(2048) == last
    assert control.counters()["refused"] == 1


def test_plan_and_counters_of_many_hosts_get_through(start):
    # 1.4 MB there and 0.9 MB back, through buffers of 0.2 MB.
    control, hosts = start(100)
    hosts[0].send(udp_frame(b"x", destination="10.77.0.100"))
    assert hosts[99].recv(2048)
    assert len(control.counters()["paths"]) == 100 * 99


@pytest.mark.parametrize("said", [b"", b'{"plan": {'], ids=["nothing", "half an order"])
def test_an_owner_that_is_gone_before_it_has_said_everything_is_no_error(said):
    own_end, wire_end = socket.socketpair()
    with process(wire_end, []), own_end:
        own_end.sendall(said)


def test_an_owner_that_is_gone_before_the_wire_is_ready_is_no_error():
    own_end, wire_end = socket.socketpair()
    order = {"plan": plan_to_json(plan_network(uniform(1))), "addresses": ["10.77.0.1"], "seed": 0}
    own_end.sendall(json.dumps(order).encode() + b"\n")
    own_end.close()
    host, device = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with host, device, process(wire_end, [device]):
        pass
