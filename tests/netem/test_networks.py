"""What real networks do beyond their figures: hosts, links that go down, resets, faults, and their end."""

import json
import os
import socket
import subprocess
import sys
import threading
import time

import pytest
from support.processes import is_alive, wait_until
from support.real_networks import BUILDERS, on_each_backend

from tahq.comm.network_config import PairConfig
from tahq.errors import NetworkError
from tahq_netem.backends.choice import probe
from tahq_netem.backends.namespace_group import sweep_leftovers
from tahq_netem.backends.namespaces import HOST_DEVICE, netlink
from tahq_netem.backends.tun import wire_tree
from tahq_netem.measure import meter
from tahq_netem.network.description import HostShape, PathShape, plan_network, uniform
from tahq_netem.network.faults import FaultPlayer, Timeline

pytestmark = pytest.mark.netns


def trips(measurements, source, destination, count=5, wait_s=1.0):
    """Round trips of the datagrams that came back; `wait_s` is waited only if one did not."""
    return measurements.measure(meter.round_trips, source, destination, count=count, interval_s=0.005, wait_s=wait_s)


def connected(network, client="host0", server="host1"):
    """Both ends of a TCP connection: the client's and the server's."""
    with network.entered(server), socket.create_server((network.address(server), 0)) as listener:
        with network.entered(client):
            near = socket.create_connection(listener.getsockname(), 20)
        far, _ = listener.accept()
    far.settimeout(20)
    return near, far


def end_of(connection):
    """The error that a connection ends with."""
    with connection, pytest.raises(ConnectionError) as caught:
        connection.recv(1)
    return caught.type


def count(measurements, num_datagrams):
    """How many of so many datagrams from host0 arrive on host1."""
    train = {"count": num_datagrams, "datagrams_per_s": 5e3, "wait_s": 0.3}
    return measurements.measure(meter.count_datagrams, "host0", "host1", **train)


@on_each_backend
def test_hosts_reach_each_other_and_a_link_goes_down_without_an_error(backend, build, measure):
    network = build(backend, uniform(3))
    measurements = measure(network)
    assert [network.address(host) for host in network.plan.hosts] == ["10.77.0.1", "10.77.0.2", "10.77.0.3"]
    for source, destination in [*network.plan.paths, ("host0", "host0")]:
        assert len(trips(measurements, source, destination, count=2)) == 2
    network.set_link("host1", is_up=False)
    assert trips(measurements, "host0", "host1", wait_s=0.2) == trips(measurements, "host1", "host0", wait_s=0.2) == []
    assert len(trips(measurements, "host0", "host2")) == 5
    network.set_link("host1", is_up=True)
    assert len(trips(measurements, "host0", "host1")) == 5


@on_each_backend
def test_data_arrives_as_it_was_sent_over_a_path_that_loses_and_reorders(backend, build):
    """Frames that stand for many segments are lost and overtaken in parts: a wrong cut would show in the data."""
    near, far = connected(build(backend, uniform(2, rate=1e8, delay=0.002, jitter=0.001, loss=0.01, reorder=0.01)))
    sent, received = os.urandom(2_000_000), bytearray()
    sender = threading.Thread(target=lambda: (near.sendall(sent), near.close()))
    sender.start()
    with far:
        while piece := far.recv(1 << 20):
            received += piece
    sender.join()
    assert received == sent


@on_each_backend
def test_reset_ends_connections_at_both_ends_but_not_those_within_the_host(backend, build):
    if not probe().parts["tcp-reset"]:
        pytest.skip("this kernel cannot reset connections")
    network = build(backend, uniform(2))
    inner, own = connected(network, "host0", "host0")
    client, server = connected(network)
    assert network.reset_tcp("host0") == 1
    assert (end_of(client), end_of(server)) == (ConnectionAbortedError, ConnectionResetError)
    assert network.reset_tcp("host0") == network.reset_tcp("host1") == 0
    with inner, own:
        inner.sendall(b"x")
        assert own.recv(1) == b"x"


def test_wire_gets_the_former_plan_back_if_a_host_cannot_be_shaped(build, monkeypatch):
    network = build("tun", uniform(2, rate=1e8))
    before, changed = network.plan, network.plan.with_rates("host0", HostShape(1e7))
    asked = []
    monkeypatch.setattr(network.wire, "ask", lambda *message: asked.append(message))
    monkeypatch.setattr(
        network, "_egress_tree", lambda host: 1 / 0 if network.plan == changed else wire_tree(before, host)
    )
    with pytest.raises(ZeroDivisionError):
        network.set_plan(changed)
    assert asked == [("set_plan", changed), ("set_plan", before)]
    assert network.plan == before


@on_each_backend
def test_description_fits_json_and_says_what_is_in_force(backend, build):
    config = uniform(2, rate=1e9, congestion_control="reno")
    pair = PairConfig(between=("host0", "host1"), rate=1e7)
    network = build(backend, config.model_copy(update={"pairs": [pair], "tcp_slow_start_after_idle": False}))
    network.set_plan(network.plan.with_rates("host0", HostShape(2e7, 1e9)))
    described = json.loads(json.dumps(network.describe()))
    assert described["backend"] == backend
    assert described["congestion_control"] == network.congestion_control == "reno"
    assert described["tcp"]["tcp_slow_start_after_idle"] is False
    assert described["hosts"]["host0"] == {"address": "10.77.0.1", "up_bits_per_s": 2e7, "down_bits_per_s": 1e9}
    assert [path["rate_bits_per_s"] for path in described["paths"]] == [1e7, 1e7]
    assert described["kernel"]
    assert described["pyroute2"]
    in_force = network._namespaces.tune_tcp(plan_network(uniform(2, rate=1e9, delay=0.5)))
    # 1 Gbit/s for 1 s are 125 MB; the kernel keeps half of a buffer for itself.
    assert all(int(in_force[name].split()[2]) >= 2 * 125_000_000 for name in ("tcp_rmem", "tcp_wmem"))


@on_each_backend
def test_network_that_cannot_be_built_leaves_nothing(backend, own_namespaces):
    with pytest.raises(NetworkError, match="no congestion control warp"):
        BUILDERS[backend](plan_network(uniform(3, congestion_control="warp")))
    assert own_namespaces() == []


# -- faults ---------------------------------------------------------------------------------------


@on_each_backend
def test_faults_take_a_link_down_change_its_rate_and_lose_packets_for_a_time(backend, build, measure):
    network = build(backend, uniform(2, rate=50e6))
    measurements = measure(network)
    text = "- {at: 1s, link: host1, what: down, for: 2s}\n- {at: 5s, link: host1, what: rate, to: 4mbit, for: 1s}\n"
    has_loss = backend == "tun" or probe().parts["netem"]
    if has_loss:
        text += "- {at: 8s, link: [host1, host0], what: loss, to: 0.5, for: 1s}\n"
    player = FaultPlayer(Timeline.parse(text), network)
    answers = {}
    for now_s, wait_s in {0.5: 10.0, 1.0: 0.2, 2.9: 0.2, 3.0: 10.0}.items():
        player.advance(now_s)
        answers[now_s] = len(trips(measurements, "host0", "host1", 40, wait_s))
    assert answers == {0.5: 40, 1.0: 0, 2.9: 0, 3.0: 40}
    goodputs = []
    for now_s in (5.0, 6.0):
        player.advance(now_s)
        flow = measurements.measure(meter.steady, "host0", "host1", max_bytes=10**7, skip_s=0.2, duration_s=0.7)
        goodputs.append(8 * flow.steady_bytes / flow.steady_s)
    # A burst adds less than a hundredth to half a second at 4 Mbit/s.
    assert 0 < goodputs[0] < 1.01 * 4e6
    assert goodputs[1] > 8e6
    if has_loss:
        player.advance(8.0)
        # All of 40 arrive, or none, once in 2^39 times.
        assert 0 < len(trips(measurements, "host0", "host1", 40, 0.3)) < 40
        player.advance(9.0)
        assert len(trips(measurements, "host0", "host1", 40, 10.0)) == 40


# -- backend kernel -------------------------------------------------------------------------------


def test_delay_without_netem_is_refused_and_the_network_stays_as_it_was(build, measure):
    if probe().parts["netem"]:
        pytest.skip("this kernel has netem")
    network = build("kernel", uniform(2, rate=1e8))
    with pytest.raises(NetworkError, match=r"this kernel has no netem \(module sch_netem\)"):
        network.set_plan(network.plan.with_path("host0", "host1", PathShape(delay_s=0.01)))
    assert network.plan == plan_network(uniform(2, rate=1e8))
    network.set_plan(network.plan.with_rates("host1", HostShape(1e8, 5e7)))
    assert count(measure(network), 9) == 9


def test_packets_to_a_host_that_is_down_or_silent_reach_no_other_host(build):
    network = build("kernel", uniform(4, rate=1e8))

    def num_received() -> int:
        with netlink(network.namespace("host3")) as kernel:
            [device] = kernel.link_lookup(ifname=HOST_DEVICE)
            [link] = kernel.get_links(device)
            return link.get_attr("IFLA_STATS64")["rx_packets"]

    network.set_link("host1", is_up=False)
    before = num_received()
    with network.entered("host0"), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for host in ("host1", "host2") * 10:
            sender.sendto(b"x", (network.address(host), 9))
    time.sleep(0.1)
    # Both floods would be 20 packets; the kernel sends a few of its own now and then, such as group memberships.
    assert num_received() - before < 5


# -- backend tun ----------------------------------------------------------------------------------


def test_wire_that_has_died_is_named(build):
    network = build("tun", uniform(2))
    os.kill(network.wire.pid, 9)
    wait_until(lambda: not is_alive(network.wire.pid), 10, "the wire dies")
    with pytest.raises(NetworkError, match="wire process"):
        network.set_plan(network.plan.with_rates("host0", HostShape(1e7)))


FORKING_OWNER = """
import os, sys, time
from tahq_netem.network.description import plan_network, uniform
from tahq_netem.backends.tun import TunNetwork
network = TunNetwork(plan_network(uniform(2)))
if os.fork() == 0:
    time.sleep(60)
print(network.wire.pid, flush=True)
os.kill(os.getpid(), 9)
"""


def test_wire_ends_with_its_owner_though_a_forked_child_lives_on():
    argv = [sys.executable, "-c", FORKING_OWNER]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, process_group=0) as owner:
        wire = int(owner.stdout.readline())
        try:
            assert owner.wait(20) == -9
            wait_until(lambda: not is_alive(wire), 10, "the wire ends")
        finally:
            os.killpg(owner.pid, 9)
    sweep_leftovers()
