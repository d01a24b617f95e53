"""The measuring programs over loopback, without root; limits and repeats of measurements by arithmetic."""

import json
import os
import socket
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.loopback_network import LoopbackNetwork

from tahq.errors import NetworkError
from tahq_netem.measure import meter
from tahq_netem.measure.agents import MeasuringAgent
from tahq_netem.measure.calibration import calibrate
from tahq_netem.measure.figures import round_trip_figure
from tahq_netem.measure.meter import StreamFigures
from tahq_netem.measure.path_measurements import FULL, QUICK, PathMeasurements, lifted
from tahq_netem.measure.responder import Responder
from tahq_netem.network.description import plan_network, uniform
from tahq_netem.programs import module_argv, module_environment


@pytest.fixture(scope="module")
def target():
    responder = Responder("127.0.0.1")
    responder.start()
    return "127.0.0.1", responder.port


@pytest.fixture
def network():
    return LoopbackNetwork(uniform(2, rate=100e6, delay=0.005))


def test_every_datagram_of_a_train_comes_back(target):
    trips_s = meter.round_trips(target, count=20, interval_s=1e-3, wait_s=2.0)
    assert len(trips_s) == 20
    assert all(0 < trip_s < 2.0 for trip_s in trips_s)


def test_every_datagram_of_a_train_is_counted(target):
    assert meter.count_datagrams(target, count=300, datagrams_per_s=10_000.0, wait_s=0.5) == 300


def test_trains_are_counted_apart(target):
    first = meter.count_datagrams(target, count=30, datagrams_per_s=10_000.0, wait_s=0.2)
    second = meter.count_datagrams(target, count=20, datagrams_per_s=10_000.0, wait_s=0.2)
    assert (first, second) == (30, 20)


def test_a_message_arrives_whole(target):
    figures = meter.message(target, num_bytes=1_000_000, idle_s=0.0, timeout_s=10.0, num_wakers=3)
    assert figures.num_bytes == 1_000_000
    assert figures.total_s > 0
    assert figures.congestion_control


def test_a_flow_ends_when_its_time_is_over_and_its_beginning_is_skipped(target):
    figures = meter.steady(target, max_bytes=10**13, skip_s=0.1, duration_s=0.3)
    assert 0 < figures.steady_bytes < figures.num_bytes
    assert 0.1 < figures.steady_s < figures.total_s


def test_a_flow_ends_with_its_last_byte(target):
    figures = meter.steady(target, max_bytes=3_000_000, skip_s=5.0, duration_s=30.0)
    assert figures.num_bytes == 3_000_000
    assert (figures.steady_bytes, figures.steady_s) == (0, 0.0)


def test_a_message_of_any_length_fits_into_the_senders_buffer_where_that_may_be(unread):
    if os.geteuid() != 0:
        pytest.skip("only root may widen it without limit")
    longest = int(Path("/proc/sys/net/ipv4/tcp_wmem").read_text().split()[2])
    num_bytes = 4 * longest
    meter._widen_send_buffer(unread, 4 * num_bytes)
    assert meter._send_zeros(unread, num_bytes, time.monotonic_ns() + 20 * 10**9) == num_bytes


def test_a_senders_buffer_that_may_not_be_widened_is_left_to_tcp(unread):
    class Unprivileged(socket.socket):
        def setsockopt(self, level, option, value):
            if option == meter._SO_SNDBUFFORCE:
                raise PermissionError
            super().setsockopt(level, option, value)

    with Unprivileged(fileno=unread.detach()) as connection:
        before = connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        meter._widen_send_buffer(connection, 1_000_000)
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == before


@pytest.fixture
def unread():
    """A connection whose other end reads nothing."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname(), timeout=20) as connection,
        listener.accept()[0],
    ):
        yield connection


def test_the_program_reports_a_network_that_lets_nothing_through():
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    command = {"do": "steady", "target": ["127.0.0.1", port], "max_bytes": 1, "skip_s": 0, "duration_s": 1}
    program = subprocess.run(
        module_argv("tahq_netem.measure.meter", "--address", "127.0.0.1"),
        input=json.dumps(command) + "\n",
        env=module_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    port_line, answer = map(json.loads, program.stdout.splitlines())
    assert port_line["port"] > 0
    assert "ConnectionRefusedError" in answer["error"]


def test_an_agent_says_when_its_program_has_died(network):
    agent = MeasuringAgent(network, "host0")
    agent._process.kill()
    agent._process.wait()
    with pytest.raises(NetworkError, match="on host0 ended with status -9"):
        agent.measure("message", ("127.0.0.1", 1), 1.0, {})
    agent.close()


def test_only_rates_hold_while_a_pair_is_lifted(network):
    before = network.plan
    with lifted(network, "host0", "host1"):
        assert not network.plan.needs_netem
        assert network.plan.host_shapes == before.host_shapes
    assert network.plan == before


def test_a_calibration_measures_what_it_is_told_to_and_refuses_a_network_that_is_too_fast(network):
    # Loopback is a thousand times as fast as described, which no noise explains. Its agents leave with the block.
    calibration = calibrate(network, pairs=[("host1", "host0")], quick=True)
    assert [(figure.what, figure.source) for figure in calibration.figures] == [
        ("round trip", "host1"),
        ("goodput of a message after idle", "host1"),
        ("steady goodput", "host1"),
    ]
    assert calibration.congestion_controls == (Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip(),)
    assert json.loads(json.dumps(calibration.as_dict()))["network"]["backend"] == "loopback"
    with pytest.raises(NetworkError, match=r"not as described: .*host1 → host0: steady goodput .* bit/s, expected 95"):
        calibration.check()


@dataclass
class FakeAgents:
    """Measures by arithmetic: a network that carries `bits_per_s`, and of a train of datagrams `num_answers`."""

    bits_per_s: float = 1e9
    num_answers: int = 0

    def measure(self, do, _source, _destination, lasts_s, **arguments):
        return getattr(self, do)(**arguments)

    def round_trips(self, **_arguments):
        return [0.1] * self.num_answers

    def steady(self, max_bytes, skip_s, duration_s):
        total_s = min(duration_s, 8 * max_bytes / self.bits_per_s)
        steady_s = max(0.0, total_s - skip_s)
        num_bytes, steady_bytes = (int(seconds * self.bits_per_s / 8) for seconds in (total_s, steady_s))
        return asdict(StreamFigures(num_bytes, total_s, steady_bytes, steady_s, "cubic"))


@pytest.mark.parametrize("effort", [FULL, QUICK], ids=["full", "quick"])
def test_the_steady_goodput_of_a_path_that_is_not_shaped_is_what_it_carries(effort):
    network = SimpleNamespace(plan=plan_network(uniform(2)))
    figure = PathMeasurements(network, FakeAgents(bits_per_s=100e9), effort).steady("host0", "host1")
    assert figure.measured == pytest.approx(100e9)


def test_a_round_trip_with_jitter_may_stray_as_the_median_of_those_that_came_back_does():
    plan = plan_network(uniform(2, delay=0.05, jitter=0.01, loss=0.5))
    network = SimpleNamespace(plan=plan)
    figure = PathMeasurements(network, FakeAgents(num_answers=8), FULL).round_trip("host0", "host1")
    assert figure == round_trip_figure(plan, "host0", "host1", 0.1, 8, meter.ECHO_BYTES)
    assert figure.num_samples == 8
