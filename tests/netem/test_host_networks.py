"""What every backend of real hosts does, beyond the figures of test_acceptance: with real packets, and at run time."""

import itertools
import json
import subprocess
import sys

import pytest
from support.host_traffic import begin, run
from support.real_networks import BUILDERS, on_each_backend

from tahq.comm.network_model import GOODPUT_SHARE
from tahq.errors import ConfigError, NetworkError
from tahq_netem.measure.agents import MeasuringAgent, MeasuringAgents
from tahq_netem.measure.path_measurements import FULL
from tahq_netem.network.description import PairConfig, PathShape, plan_network, uniform

pytestmark = [pytest.mark.netns, on_each_backend]


def network_with(config, *pairs):
    return config.model_copy(update={"pairs": list(pairs)})


def trips_s(network, source, destination, count=5, wait_s=1.0):
    """Round trips of the datagrams that came back."""
    with MeasuringAgents(network) as agents:
        arguments = {"count": count, "interval_s": 0.01, "wait_s": wait_s}
        return agents.measure("round_trips", source, destination, wait_s, **arguments)


def arrivals(network, num_packets, pause_s):
    """Numbers of the packets that arrived of a stream from host0 to host1, in order of arrival."""
    server = begin(network, "host1", "count", network.address("host1"), 2.0)
    run(network, "host0", "blast", network.address("host1"), num_packets, pause_s)
    return json.loads(server.communicate(timeout=60)[0])


def test_hosts_reach_each_other_and_know_their_names(backend, build):
    network = build(backend, uniform(3))
    assert [network.address(host) for host in network.plan.hosts] == ["10.77.0.1", "10.77.0.2", "10.77.0.3"]
    for source, destination in network.plan.paths:
        assert len(trips_s(network, source, destination, count=2)) == 2


def test_network_of_one_host_is_one(backend, build):
    network = build(backend, uniform(1, rate=1e8))
    assert len(trips_s(network, "host0", "host0", count=1)) == 1


def test_process_runs_on_its_host_and_ends_with_the_network(backend, build):
    network = build(backend, uniform(2))
    process = network.popen("host1", [sys.executable, "-c", "import time; time.sleep(60)"], env={"A": "b"})
    network.close()
    assert process.wait(10) == -15


def test_two_networks_do_not_meet(backend, build):
    first, second = build(backend, uniform(2)), build(backend, uniform(2))
    agent, other = MeasuringAgent(first, "host0"), MeasuringAgent(second, "host1")
    # The first network has that address, too, and nobody answers there.
    with pytest.raises(NetworkError, match="ConnectionRefusedError"):
        agent.measure(
            "round_trips",
            (second.address("host1"), other.port),
            lasts_s=1.0,
            arguments={"count": 2, "interval_s": 0.1, "wait_s": 1.0},
        )
    for each in (agent, other):
        each.close()


def test_data_arrives_as_it_was_sent_over_a_path_that_loses_and_reorders(backend, build):
    """Frames that stand for many segments are lost and overtaken in parts: a wrong cut would show in the data."""
    network = build(backend, uniform(2, rate=1e8, delay=0.002, jitter=0.001, loss=0.01, reorder=0.01))
    server = begin(network, "host1", "receive", network.address("host1"))
    sent = run(network, "host0", "send", network.address("host1"), 3_000_000)
    assert json.loads(server.communicate(timeout=60)[0]) == sent


@pytest.mark.serial
def test_slower_of_up_and_down_decides(backend, build, measure, judge):
    network = build(backend, uniform(2, up=1e7, down=4e7))
    measurements = measure(network)
    judge(measurements.steady("host0", "host1"))
    network.set_rate("host0", up=8e7)
    judge(measurements.steady("host0", "host1"))
    network.set_rate("host1", down=None)
    assert network.plan.rate_bits_per_s("host0", "host1") == 8e7
    judge(measurements.steady("host0", "host1"))


@pytest.mark.serial
def test_cap_of_a_pair_holds_for_that_pair_only(backend, build, measure, judge):
    network = build(backend, network_with(uniform(3, rate=8e7), PairConfig(between=("host0", "host1"), rate=1e7)))
    measurements = measure(network)
    judge(measurements.steady("host0", "host1"))
    judge(measurements.steady("host0", "host2"))
    network.set_path("host0", "host1", PathShape(rate_bits_per_s=2e7))
    judge(measurements.steady("host0", "host1"))
    network.set_path("host0", "host1", PathShape())
    assert network.plan.rate_bits_per_s("host0", "host1") == 8e7
    judge(measurements.steady("host0", "host1"))


@pytest.mark.serial
def test_downlink_is_shared_by_all_who_send(backend, build):
    network = build(backend, uniform(3, down=4e7))
    expected, total = GOODPUT_SHARE * 4e7, 0.0
    for attempt in range(8):  # noise makes networks slower, never faster
        ports = (6001 + 2 * attempt, 6002 + 2 * attempt)
        servers = [network.popen("host0", receiver(port), stdout=subprocess.PIPE, text=True) for port in ports]
        assert [server.stdout.readline() for server in servers] == ["ready\n", "ready\n"]
        for host, port in zip(("host1", "host2"), ports, strict=True):
            network.popen(host, sender(network.address("host0"), port))
        # Both run all the time, so what arrives in a while is the whole line.
        total = max(total, sum(float(server.stdout.readline()) for server in servers))
        if total >= 0.9 * expected:
            break
    assert total == pytest.approx(expected, rel=0.1)
    network.close()


def receiver(port):
    program = (
        "import socket, time; s = socket.create_server(('', {port})); print('ready', flush=True); c, _ = s.accept(); "
        "end = time.monotonic() + 1\nwhile time.monotonic() < end: c.recv(1 << 16)\n"
        "n = 0; start = time.monotonic()\nwhile time.monotonic() < start + 2: n += len(c.recv(1 << 16))\n"
        "print(8 * n / (time.monotonic() - start), flush=True); time.sleep(60)"
    )
    return [sys.executable, "-c", program.format(port=port)]


def sender(address, port):
    program = f"import socket; c = socket.create_connection(('{address}', {port}))\nwhile True: c.sendall(bytes(65536))"
    return [sys.executable, "-c", program]


@pytest.mark.serial
def test_rate_holds_with_a_delay(backend, build, measure, judge):
    # TCP doubles from 10 packets to the 170 of 50 Mbit/s and 40 ms in 5 round trips: 0.2 s, which are skipped.
    judge(measure(build(backend, uniform(2, rate=5e7, delay=0.02)), FULL).steady("host0", "host1"))


@pytest.mark.serial
def test_delay_of_a_pair_changes_at_run_time_and_for_that_pair_only(backend, build, measure, judge):
    network = build(backend, network_with(uniform(3, delay=0.01), PairConfig(between=("host0", "host1"), delay=0.05)))
    measurements = measure(network)
    judge(measurements.round_trip("host0", "host1"))
    judge(measurements.round_trip("host0", "host2"))
    for delay_s in (0.1, 0.0):
        network.set_path("host0", "host1", PathShape(delay_s=delay_s))
        judge(measurements.round_trip("host0", "host1"))


@pytest.mark.serial
def test_jitter_spreads_the_round_trips_and_keeps_the_order(backend, build, measure, judge):
    network = build(backend, uniform(2, delay=0.02, jitter=0.01))
    assert arrivals(network, 1000, pause_s=1e-3) == list(range(1000))
    judge(measure(network).round_trip("host0", "host1"))
    trips = trips_s(network, "host0", "host1", count=60)
    # Two delays of 10 to 30 ms each. That none of 60 is in the lowest or highest quarter has odds below 0.1 %.
    assert 0.018 < min(trips) < 0.035
    assert 0.045 < max(trips) < 0.08


@pytest.mark.serial
def test_reordered_packets_overtake_and_none_is_lost(backend, build):
    numbers = arrivals(build(backend, uniform(2, delay=0.02, reorder=0.2)), 1000, pause_s=1e-3)
    assert sorted(numbers) == list(range(1000))
    overtaking = sum(number > following for number, following in itertools.pairwise(numbers))
    # About 200 overtake; several in a row count once.
    assert 80 < overtaking < 300


def test_link_goes_down_without_an_error_and_comes_back(backend, build):
    network = build(backend, uniform(3))
    network.set_link("host1", is_up=False)
    assert trips_s(network, "host0", "host1", wait_s=0.3) == trips_s(network, "host1", "host0", wait_s=0.3) == []
    assert len(trips_s(network, "host0", "host2")) == 5
    network.set_link("host1", is_up=True)
    assert len(trips_s(network, "host0", "host1")) == 5


def test_connection_outlives_an_outage(backend, build):
    network = build(backend, uniform(2))
    server = begin(network, "host1", "receive", network.address("host1"))
    network.set_link("host0", is_up=False)
    client = begin(network, "host0", "send", network.address("host1"), 1000)
    with pytest.raises(subprocess.TimeoutExpired):
        client.wait(0.5)
    network.set_link("host0", is_up=True)
    assert client.communicate(timeout=20)[0] == server.communicate(timeout=20)[0]


def test_reset_ends_connections_at_both_ends(backend, build):
    network = build(backend, uniform(2))
    server = begin(network, "host1", "hold_open", network.address("host1"))
    client = begin(network, "host0", "hold", network.address("host1"))
    assert network.reset_tcp("host0") == 1
    assert json.loads(client.communicate(timeout=20)[0]) == "ConnectionAbortedError"
    assert json.loads(server.communicate(timeout=20)[0]) == "ConnectionResetError"
    assert network.reset_tcp("host0") == network.reset_tcp("host1") == 0


def test_reset_leaves_connections_within_the_host_alone(backend, build):
    network = build(backend, uniform(2))
    server = begin(network, "host0", "hold_open", "127.0.0.1")
    client = begin(network, "host0", "hold", "127.0.0.1")
    assert network.reset_tcp("host0") == 0
    assert server.poll() is client.poll() is None


def test_description_of_the_network_fits_json_and_says_what_is_in_force(backend, build):
    config = uniform(2, rate=1e8, congestion_control="reno", tcp_slow_start_after_idle=False)
    network = build(backend, network_with(config, PairConfig(between=("host0", "host1"), rate=1e7)))
    network.set_rate("host0", up=2e7)
    described = json.loads(json.dumps(network.describe()))
    assert described["backend"] == backend
    assert described["congestion_control"] == network.congestion_control == "reno"
    assert described["tcp"]["tcp_slow_start_after_idle"] is False
    assert described["hosts"]["host0"] == {"address": "10.77.0.1", "up_bits_per_s": 2e7, "down_bits_per_s": 1e8}
    assert [path["rate_bits_per_s"] for path in described["paths"]] == [1e7, 1e7]
    assert described["kernel"]
    assert described["pyroute2"]


def test_buffers_of_tcp_have_room_for_the_longest_path(backend, build):
    network = build(backend, uniform(2, rate=1e9))
    network.plan = plan_network(uniform(2, rate=1e9, delay=0.5))
    in_force = network._namespaces.tune_tcp(network.plan)
    # 1 Gbit/s for 1 s are 125 MB; the kernel keeps half of a buffer for itself.
    assert all(int(in_force[name].split()[2]) >= 2 * 125_000_000 for name in ("tcp_rmem", "tcp_wmem"))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda network: network.address("host7"), ConfigError, "no host 'host7'"),
        (lambda network: network.popen("host7", ["true"]), ConfigError, "no host 'host7'"),
        (lambda network: network.set_rate("host7", up=1e6), ConfigError, "no host 'host7'"),
        (lambda network: network.set_rate("host0", up=0), ConfigError, "at least 10000 bit/s"),
        (lambda network: network.set_path("host0", "host7", PathShape()), ConfigError, "no host 'host7'"),
        (lambda network: network.set_link("host7", is_up=True), ConfigError, "no host 'host7'"),
        (lambda network: network.reset_tcp("host7"), ConfigError, "no host 'host7'"),
    ],
)
def test_mistake_is_refused_and_changes_nothing(backend, build, change, error, message):
    network = build(backend, uniform(2, rate=1e8))
    before = network.plan
    with pytest.raises(error, match=message):
        change(network)
    assert network.plan == before


def test_network_that_cannot_be_built_leaves_nothing(backend, own_namespaces):
    with pytest.raises(NetworkError, match="no congestion control warp"):
        BUILDERS[backend](plan_network(uniform(3, congestion_control="warp")))
    assert own_namespaces() == []
