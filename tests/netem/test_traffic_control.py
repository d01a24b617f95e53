"""Shapers of a device: the kernel's settings after each change, and netem's and bfifo's requests."""

import pytest
from pyroute2.netlink.rtnl.tcmsg import sched_netem

from tahq_netem.backends.choice import probe
from tahq_netem.backends.kernel import egress_tree, port_tree
from tahq_netem.backends.namespaces import netlink
from tahq_netem.backends.traffic_control import DESTINATION_FIELD, Leaf, Shaper, Tree, netem_options, queue_message
from tahq_netem.backends.tun import MOST_SEGMENTS, wire_tree
from tahq_netem.network.description import HostShape, PathShape, plan_network, uniform

ADDRESSES = {0: "10.77.0.1", 1: "10.77.0.2", 2: "10.77.0.3"}
QUEUE = 100_000


def capped(bits_per_s: float) -> Leaf:
    return Leaf(PathShape(rate_bits_per_s=bits_per_s), QUEUE)


def test_lossy_and_slow_paths_carry_single_packets():
    plan = plan_network(uniform(2, rate=1e8))
    assert egress_tree(plan, "host0").most_segments == 4
    assert egress_tree(plan.with_path("host0", "host1", PathShape(loss=0.01)), "host0").most_segments == 1
    assert egress_tree(plan_network(uniform(2, rate=5e6)), "host0").most_segments == 1
    assert egress_tree(plan_network(uniform(2)), "host0").most_segments is None


def test_netem_holds_packets_under_way_and_the_acknowledgements_of_a_fast_download():
    plan = plan_network(uniform(2, up=1e7, down=1e9, delay=0.1))
    [leaf] = port_tree(plan, "host0").leaves.values()
    assert leaf.netem_limit > 1e7 / 8 * 0.1 / 1514
    fast = plan_network(uniform(2, rate=1e9, delay=0.1)).with_rates("host1", HostShape(1e7, 1e9))
    [leaf] = port_tree(fast, "host0").leaves.values()
    assert leaf.netem_limit > 1e9 / 8 * 0.1 / 1514


@pytest.mark.parametrize(("rate", "expected"), [(None, MOST_SEGMENTS), (1e9, MOST_SEGMENTS), (1e8, 8), (1e6, 1)])
def test_frames_are_no_longer_than_a_millisecond_of_the_hosts_own_line(rate, expected):
    assert wire_tree(plan_network(uniform(2, rate=rate)), "host0").most_segments == expected


def test_pyroute2_puts_the_options_into_netems_structure():
    """delay and jitter in ticks of 64 ns, loss as a share of 2**32 − 1: tc_netem_qopt of linux/pkt_sched.h."""
    leaf = Leaf(PathShape(delay_s=0.064, jitter_s=0.0064, loss=0.5, reorder=0.5), QUEUE, 10)
    packed = sched_netem.get_parameters(netem_options(leaf))
    assert (packed["delay"], packed["jitter"], packed["limit"]) == (1_000_000, 100_000, 10)
    assert packed["loss"] == (2**32 - 1) // 2
    assert packed["gap"] == 1
    assert dict(packed["attrs"])["TCA_NETEM_REORDER"]["prob_reorder"] == (2**32 - 1) // 2
    # With jitter, a rate keeps the order.
    assert dict(packed["attrs"])["TCA_NETEM_RATE"]["rate"] == 4_000_000_000


def test_bfifo_message_holds_the_limit_in_bytes():
    message = queue_message(3, 0x20000, 0x10002, Leaf(PathShape(), 0x12345678))
    message.encode()
    assert b"bfifo\0" in message.data
    assert bytes.fromhex("78563412") in message.data


@pytest.fixture
def device(namespace):
    """A veth in a namespace: the IPRoute there, and the device's index."""
    with netlink(namespace) as kernel:
        kernel.link("add", ifname="eth0", kind="veth", peer="eth1")
        yield kernel, kernel.link_lookup(ifname="eth0")[0]


def classes(kernel, index: int) -> dict[int, tuple[int, int]]:
    """Rate and ceiling of each class, in bytes a second."""
    found = {}
    for entry in kernel.get_classes(index=index):
        parameters = entry.get_attr("TCA_OPTIONS").get_attr("TCA_HTB_PARMS")
        found[entry["handle"] & 0xFFFF] = (parameters["rate"], parameters["ceil"])
    return found


def kinds(kernel, index: int) -> dict[int, str]:
    """Kind of the queue below each class."""
    mine = (qdisc for qdisc in kernel.get_qdiscs() if qdisc["index"] == index and qdisc["handle"] >> 16 > 1)
    return {qdisc["parent"] & 0xFFFF: qdisc.get_attr("TCA_KIND") for qdisc in mine}


def num_filters(kernel, index: int) -> int:
    options = (entry.get_attr("TCA_OPTIONS") for entry in kernel.get_filters(index=index, parent=0x10000))
    return sum(option is not None and option.get_attr("TCA_U32_CLASSID") is not None for option in options)


@pytest.mark.netns
def test_classes_are_made_for_a_rate_and_for_peers_with_a_cap(device):
    kernel, index = device
    shaper = Shaper(index, DESTINATION_FIELD, ADDRESSES)
    shaper.apply(kernel, Tree(None, QUEUE, {}))
    assert classes(kernel, index) == {}
    shaper.apply(kernel, Tree(8e6, QUEUE, {}))
    assert classes(kernel, index) == {1: (1_000_000, 1_000_000), 2: (125, 1_000_000)}
    assert kinds(kernel, index) == {2: "bfifo"}
    shaper.apply(kernel, Tree(8e6, QUEUE, {1: capped(8e5), 2: capped(8e7)}))
    found = classes(kernel, index)
    assert found[0x11] == (125, 100_000)
    assert found[0x12] == (125, 1_000_000), "a cap above the line's rate is the line's rate"
    assert num_filters(kernel, index) == 2


@pytest.mark.netns
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Tree(8e6, QUEUE, {}), Tree(8e5, QUEUE, {})),
        (Tree(8e6, QUEUE, {}), Tree(8e6, QUEUE, {1: capped(8e5)})),
        (Tree(8e6, QUEUE, {1: capped(8e5)}), Tree(8e6, QUEUE, {1: capped(8e4)})),
        (Tree(8e6, QUEUE, {1: capped(8e5)}), Tree(8e6, QUEUE, {2: capped(8e5)})),
        (Tree(8e6, QUEUE, {1: capped(8e5)}), Tree(None, QUEUE, {1: capped(8e5)})),
        (Tree(None, QUEUE, {1: capped(8e5)}), Tree(8e6, QUEUE, {})),
        (Tree(8e6, QUEUE, {1: capped(8e5)}), Tree(None, QUEUE, {})),
        (Tree(None, QUEUE, {}), Tree(8e6, 2 * QUEUE, {0: capped(8e5)}, most_segments=4)),
        (Tree(8e6, QUEUE, {}, most_segments=4), Tree(8e6, QUEUE, {}, most_segments=1)),
        (Tree(8e6, QUEUE, {}, most_segments=4), Tree(8e6, QUEUE, {})),
    ],
)
def test_change_leads_to_the_same_shaper_as_a_fresh_start(device, first, second):
    kernel, index = device
    [other] = kernel.link_lookup(ifname="eth1")
    changed = Shaper(index, DESTINATION_FIELD, ADDRESSES)
    changed.apply(kernel, first)
    changed.apply(kernel, second)
    Shaper(other, DESTINATION_FIELD, ADDRESSES).apply(kernel, second)
    assert state(kernel, index) == state(kernel, other)


def state(kernel, index: int) -> tuple[object, ...]:
    [link] = kernel.get_links(index)
    segments = link.get_attr("IFLA_GSO_MAX_SEGS")
    return classes(kernel, index), kinds(kernel, index), num_filters(kernel, index), segments


@pytest.mark.netem_kernel
@pytest.mark.netns
def test_netem_leaf_comes_changes_and_goes(device):
    if not probe().parts["netem"]:
        pytest.skip("this kernel has no netem; make test-netem-vm runs this on one that has")
    kernel, index = device
    shaper = Shaper(index, DESTINATION_FIELD, ADDRESSES)
    delays = []
    for path in (PathShape(delay_s=0.01), PathShape(delay_s=0.02, jitter_s=0.001, loss=0.1, reorder=0.1)):
        shaper.apply(kernel, Tree(8e6, QUEUE, {1: Leaf(path, QUEUE, 50)}))
        assert kinds(kernel, index)[0x11] == "netem"
        delays += [
            round(qdisc.get_attr("TCA_OPTIONS")["delay"] * 64e-9, 6)
            for qdisc in kernel.get_qdiscs()
            if qdisc.get_attr("TCA_KIND") == "netem"
        ]
    assert delays == [0.01, 0.02]
    shaper.apply(kernel, Tree(8e6, QUEUE, {1: capped(8e5)}))
    assert kinds(kernel, index)[0x11] == "bfifo"
    shaper.apply(kernel, Tree(8e6, QUEUE, {}))
    assert kinds(kernel, index) == {2: "bfifo"}
