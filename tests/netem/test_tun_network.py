"""What is the tun backend's alone: its wire process, seen from outside."""

import os
import subprocess
import sys

import pytest
from support.host_traffic import begin, run
from support.processes import is_alive, wait_until

from tahq.errors import NetworkError
from tahq_netem.backends.leftovers import sweep_leftovers
from tahq_netem.backends.namespaces import HOST_DEVICE, netlink
from tahq_netem.backends.tun import MOST_SEGMENTS, wire_tree
from tahq_netem.measure.agents import MeasuringAgents
from tahq_netem.network.description import PathShape, plan_network, uniform

pytestmark = pytest.mark.netns


def count(network, num_datagrams):
    """How many of so many datagrams from host0 arrive on host1."""
    with MeasuringAgents(network) as agents:
        arguments = {"count": num_datagrams, "datagrams_per_s": 5e3, "wait_s": 0.5}
        return agents.measure("count_datagrams", "host0", "host1", 2.0, **arguments)


def counters_of(network, source, destination):
    paths = network.counters()["paths"]
    return next(path for path in paths if (path["source"], path["destination"]) == (source, destination))


def test_wire_counts_what_it_moves_and_what_it_loses(build):
    network = build("tun", uniform(2, rate=1e8, loss=0.1))
    network.set_path("host1", "host0", PathShape())
    arrived = count(network, 1000)
    counted = counters_of(network, "host0", "host1")
    # Besides those counted: the questions for the tally, as many as got lost and one.
    assert counted["packets"] - counted["lost"] == arrived + 1
    assert counted["lost"] >= 1000 - arrived > 0
    assert counted["dropped"] == 0


def test_same_packets_meet_the_same_fate(build):
    first, second = (count(build("tun", uniform(2, loss=0.1)), 500) for _ in range(2))
    assert first == second < 500


SEND = "import socket, sys; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', (sys.argv[1], 9))"


def test_wire_counts_what_a_host_does_not_take_whose_device_was_set_down(build):
    network = build("tun", uniform(2))
    with netlink(network.namespace("host1")) as kernel:
        kernel.link("set", index=kernel.link_lookup(ifname=HOST_DEVICE)[0], state="down")
    sender = network.popen("host0", [sys.executable, "-c", SEND, network.address("host1")])
    assert sender.wait(20) == 0
    wait_until(lambda: network.counters()["refused"] >= 1, 10, "the wire tries to deliver it")


def test_segments_of_a_frame_are_counted_one_by_one(build):
    network = build("tun", uniform(2))
    server = begin(network, "host1", "receive", network.address("host1"))
    run(network, "host0", "send", network.address("host1"), 1_448_000)
    server.communicate(timeout=20)
    # 1000 full segments, and at each end of a write and of the connection one that is not.
    assert 1000 <= counters_of(network, "host0", "host1")["packets"] < 1100


def test_wire_says_how_it_is_scheduled(build):
    assert build("tun", uniform(2)).describe()["wire_scheduling"] in ("real-time", "nice -10", "normal")


def test_wire_ends_with_the_network(build):
    network = build("tun", uniform(2))
    pid = network.wire.pid
    assert is_alive(pid)
    network.close()
    assert not is_alive(pid)
    with pytest.raises(RuntimeError, match="closed"):
        network.counters()


def test_wire_that_has_died_is_named(build):
    network = build("tun", uniform(2))
    os.kill(network.wire.pid, 9)
    wait_until(lambda: not is_alive(network.wire.pid), 10, "the wire dies")
    with pytest.raises(NetworkError, match="wire process"):
        network.set_rate("host0", up=1e7)


OWNER = """
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
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True, process_group=0) as owner:
        wire = int(owner.stdout.readline())
        try:
            assert owner.wait(20) == -9
            wait_until(lambda: not is_alive(wire), 10, "the wire ends")
        finally:
            os.killpg(owner.pid, 9)
    sweep_leftovers()


@pytest.mark.parametrize(("rate", "expected"), [(None, MOST_SEGMENTS), (1e9, MOST_SEGMENTS), (1e8, 8), (1e6, 1)])
def test_frames_are_no_longer_than_a_millisecond_of_the_hosts_own_line(rate, expected):
    assert wire_tree(plan_network(uniform(2, rate=rate)), "host0").most_segments == expected
