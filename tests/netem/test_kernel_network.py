"""What is the kernel backend's alone: the shapers that it makes of a plan, and what it does without netem."""

import socket
import time

import pytest

from tahq.errors import NetworkError
from tahq_netem.backends.kernel import egress_tree, port_tree
from tahq_netem.backends.namespaces import HOST_DEVICE, entered, netlink
from tahq_netem.backends.probe import probe
from tahq_netem.measure.agents import MeasuringAgents
from tahq_netem.network.description import PathShape, plan_network, uniform


@pytest.mark.netns
def test_delay_without_netem_is_refused_and_the_network_stays_as_it_was(build):
    if probe().has_netem:
        pytest.skip("this kernel has netem")
    network = build("kernel", uniform(2, rate=1e8))
    with pytest.raises(NetworkError, match=r"this kernel has no netem \(module sch_netem\)"):
        network.set_path("host0", "host1", PathShape(delay_s=0.01))
    assert network.plan == plan_network(uniform(2, rate=1e8))
    network.set_rate("host1", down=5e7)
    with MeasuringAgents(network) as agents:
        assert agents.measure("count_datagrams", "host0", "host1", 1.0, count=9, datagrams_per_s=1e3, wait_s=0.5) == 9


@pytest.mark.netns
def test_what_is_sent_to_a_host_that_is_down_or_silent_reaches_nobody_else(build):
    network = build("kernel", uniform(4, rate=1e8))

    def num_received() -> int:
        with netlink(network.namespace("host3")) as kernel:
            [device] = kernel.link_lookup(ifname=HOST_DEVICE)
            [link] = kernel.get_links(device)
            return link.get_attr("IFLA_STATS64")["rx_packets"]

    def send() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            for host in ("host1", "host2"):
                for _ in range(10):
                    sender.sendto(b"x", (network.address(host), 9))

    network.set_link("host1", is_up=False)
    before = num_received()
    with entered(network.namespace("host0")):
        send()
    time.sleep(0.1)
    # Both floods would be 20 packets; the kernel says a word of its own now and then, such as who is in which group.
    assert num_received() - before < 5


def test_lossy_paths_carry_single_packets():
    plan = plan_network(uniform(2, rate=1e8))
    assert egress_tree(plan, "host0").most_segments == 4
    assert egress_tree(plan.with_path("host0", "host1", PathShape(loss=0.01)), "host0").most_segments == 1
    assert egress_tree(plan_network(uniform(2)), "host0").most_segments is None


def test_netem_holds_what_is_under_way_and_the_acknowledgements_of_a_fast_download():
    plan = plan_network(uniform(2, up=1e7, down=1e9, delay=0.1))
    [leaf] = port_tree(plan, "host0").leaves.values()
    assert leaf.netem_limit > 1e7 / 8 * 0.1 / 1514
    fast = plan_network(uniform(2, rate=1e9, delay=0.1)).with_rates("host1", up=1e7)
    [leaf] = port_tree(fast, "host0").leaves.values()
    assert leaf.netem_limit > 1e9 / 8 * 0.1 / 1514
