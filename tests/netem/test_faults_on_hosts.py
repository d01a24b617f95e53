"""Faults on a real network: the time is the test's own, what goes through is measured."""

import pytest
from support import host_traffic
from support.real_networks import BACKENDS, BUILDERS

from tahq_netem.backends.probe import probe
from tahq_netem.measure.agents import MeasuringAgents
from tahq_netem.measure.meter import StreamFigures
from tahq_netem.network.description import plan_network, uniform
from tahq_netem.network.fault_player import FaultPlayer, play
from tahq_netem.network.faults import Timeline

pytestmark = pytest.mark.netns

RATE_BITS_PER_S = 50e6
FAULTY_BITS_PER_S = 4e6
NUM_PACKETS = 40


@pytest.fixture(scope="module", params=BACKENDS)
def network(request):
    plan = plan_network(uniform(2, rate=RATE_BITS_PER_S))
    if obstacle := probe().obstacle(request.param, plan):
        pytest.skip(obstacle)
    with BUILDERS[request.param](plan) as built:
        yield built


@pytest.fixture(scope="module")
def agents(network):
    with MeasuringAgents(network) as started:
        yield started


def player_of(network, text: str) -> FaultPlayer:
    return FaultPlayer(Timeline.parse(text), network)


def num_answers(agents, wait_s: float, num_packets: int = NUM_PACKETS) -> int:
    """Packets that came back; `wait_s` is waited only if one did not."""
    arguments = {"count": num_packets, "interval_s": 0.002, "wait_s": wait_s}
    return len(agents.measure("round_trips", "host0", "host1", wait_s, **arguments))


def goodput_bits_per_s(agents) -> float:
    arguments = {"max_bytes": 10_000_000, "skip_s": 0.2, "duration_s": 0.7}
    stream = StreamFigures(**agents.measure("steady", "host0", "host1", 1.0, **arguments))
    return 8 * stream.steady_bytes / stream.steady_s


def test_link_is_down_for_a_time(network, agents):
    player = player_of(network, "- {at: 1s, link: host1, what: down, for: 2s}")
    answers = {}
    for now_s, wait_s in {0.5: 10.0, 1.0: 0.2, 2.9: 0.2, 3.0: 10.0}.items():
        player.advance(now_s)
        answers[now_s] = num_answers(agents, wait_s)
    assert answers == {0.5: NUM_PACKETS, 1.0: 0, 2.9: 0, 3.0: NUM_PACKETS}


def test_rate_changes_and_comes_back(network, agents):
    player = player_of(network, "- {at: 1s, link: host1, what: rate, to: 4mbit, for: 1s}")
    player.advance(1.0)
    # A burst adds less than a hundredth to half a second of it.
    assert 0 < goodput_bits_per_s(agents) < 1.01 * FAULTY_BITS_PER_S
    player.advance(2.0)
    assert goodput_bits_per_s(agents) > 2 * FAULTY_BITS_PER_S


def test_burst_of_loss_in_one_direction(network, agents):
    if network.backend == "kernel" and not probe().has_netem:
        pytest.skip("this kernel has no netem; make test-netem-vm runs this on one that has")
    player = player_of(network, "- {at: 1s, link: [host1, host0], what: loss, to: 0.5, for: 1s}")
    player.advance(1.0)
    # All of 40 arrive, or none, once in 2^39 times.
    assert 0 < num_answers(agents, 0.5) < NUM_PACKETS
    player.advance(2.0)
    assert num_answers(agents, 10.0) == NUM_PACKETS


@pytest.mark.parametrize("when", ["at: 0s", "step: 7"])
def test_connections_are_reset_at_a_time_and_at_a_step(network, when):
    if not probe().parts["tcp-reset"]:
        pytest.skip("this kernel cannot reset connections")
    address = network.address("host1")
    listening = host_traffic.begin(network, "host1", "hold_open", address)
    connected = host_traffic.begin(network, "host0", "hold", address)
    with play(Timeline.parse(f"- {{{when}, link: host1, what: reset}}"), network, step_source=lambda: 7) as player:
        ends = {host_traffic.end(process) for process in (listening, connected)}
    assert ends == {"ConnectionResetError", "ConnectionAbortedError"}
    [event] = player.log
    assert event.num_connections == 1
    assert event.step == 7


def test_step_that_is_not_reached_changes_nothing(network, agents):
    with play(Timeline.parse("- {step: 8, link: host1, what: down}"), network, step_source=lambda: 7) as player:
        assert num_answers(agents, 10.0) == NUM_PACKETS
    assert player.log == []
