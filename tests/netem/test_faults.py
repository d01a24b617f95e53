"""Timelines: read, and played on a network that only notes its calls, by a virtual clock."""

import math
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.loopback_network import LoopbackNetwork
from support.processes import wait_until

from tahq.errors import ConfigError, NetworkError
from tahq_netem.network.description import NetworkPlan, PathShape, plan_network, uniform
from tahq_netem.network.fault_player import FaultPlayer, play
from tahq_netem.network.faults import Fault, Timeline, conditions


class WrittenNetwork(LoopbackNetwork):
    """Keeps its plan, and a list of its calls."""

    def __init__(self, plan: NetworkPlan) -> None:
        self.plan = plan
        self.calls: list[tuple] = []
        self.refused: set[str] = set()

    def set_rate(self, host, *, up=..., down=...):
        self._note("rate", host, up, down)
        self.plan = self.plan.with_rates(host, up, down)

    def set_path(self, source, destination, shape):
        self._note("path", source, destination, shape)
        self.plan = self.plan.with_path(source, destination, shape)

    def set_link(self, host, *, is_up):
        self._note("link", host, is_up)

    def reset_tcp(self, host):
        self._note("reset", host)
        return 3

    def _note(self, what, *details):
        if what in self.refused:
            raise NetworkError(f"no {what} here")
        self.calls.append((what, *details))

    def take(self) -> list[tuple]:
        """The calls since the last time."""
        calls, self.calls = self.calls, []
        return calls


@pytest.fixture
def network():
    return WrittenNetwork(plan_network(uniform(3, rate=100e6, delay=0.01)))


def player_of(network, text: str) -> FaultPlayer:
    return FaultPlayer(Timeline.parse(text), network)


def test_timeline_is_read_with_its_units():
    timeline = Timeline.parse(
        """
        - {at: 10s, link: host1, what: down, for: 500ms}
        - {at: 1min, link: host0, what: rate, to: 10mbit, for: 30s}
        - {step: 40, link: [host0, host1], what: loss, to: 0.05}
        - {at: 0, link: host0, what: delay, to: 200ms}
        - {step: 50, link: host2, what: reset}
        """
    )
    assert [(fault.at, fault.step, fault.lasts) for fault in timeline.faults] == [
        (10.0, None, 0.5),
        (60.0, None, 30.0),
        (None, 40, None),
        (0.0, None, None),
        (None, 50, None),
    ]
    assert [timeline.faults[index].value for index in (1, 2, 3)] == [10e6, 0.05, 0.2]
    assert timeline.faults[2].link == ("host0", "host1")


def test_timeline_is_written_as_it_is_read():
    timeline = Timeline.parse("- {at: 1s, link: [a, b], what: rate, to: 10mbit, for: 2s}")
    assert Timeline.model_validate(timeline.model_dump(by_alias=True)) == timeline
    assert timeline.faults == [Fault(at=1.0, link=("a", "b"), what="rate", to="10mbit", lasts=2.0)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{at: 1s, step: 2, link: a, what: down}", "exactly one of `at` and `step`"),
        ("{link: a, what: down}", "exactly one of `at` and `step`"),
        ("{at: 1s, link: [a, b], what: reset}", "one host"),
        ("{at: 1s, link: a, what: reset, for: 1s}", "leave `for` out"),
        ("{at: 1s, link: a, what: up, for: 1s}", "leave `for` out"),
        ("{at: 1s, link: a, what: rate}", "rate needs `to`, such as 10mbit"),
        ("{at: 1s, link: a, what: down, to: 1}", "down takes no `to`"),
        ("{at: 1s, link: a, what: loss, to: 5}", "0 to 1; got 5"),
        ("{at: 1s, link: a, what: loss, to: 5%}", "0 to 1; got '5%'"),
        ("{at: 1s, link: a, what: rate, to: 10}", "a rate needs a unit"),
        ("{at: 1s, link: a, what: rate, to: 0mbit}", "above zero"),
        ("{at: 1, link: a, what: down}", "a duration needs a unit"),
        ("{at: 1s, link: a, what: explode}", "down, up, rate, loss, delay or reset"),
        ("{at: 1s, link: a, what: down, fro: 1s}", "fro is not a key"),
        ("{at: 1s, link: [a, b, c], what: down}", "link"),
    ],
)
def test_mistake_is_one_line_that_names_where(line, message):
    with pytest.raises(ConfigError) as caught:
        Timeline.parse(f"- {{at: 1s, link: a, what: down}}\n- {line}\n", "faults.yaml")
    assert message in str(caught.value)
    assert str(caught.value).startswith("faults.yaml:2: ")
    assert "\n" not in str(caught.value)


def test_invalid_yaml_is_refused_with_its_line():
    with pytest.raises(ConfigError, match=r"^faults\.yaml:2: not valid YAML"):
        Timeline.parse("- {at: 1s,\n  link: ]}", "faults.yaml")


def test_fault_that_the_network_cannot_have_is_refused_before_the_start(network):
    with pytest.raises(ConfigError, match="did you mean host1"):
        player_of(network, "- {at: 1s, link: host11, what: down}")
    reordering = WrittenNetwork(plan_network(uniform(2, delay=0.01, reorder=0.1)))
    with pytest.raises(ConfigError, match="reorder needs a delay"):
        player_of(reordering, "- {at: 1s, link: host0, what: delay, to: 0s}")
    assert network.take() == reordering.take() == []


def test_link_goes_down_for_a_time(network):
    player = player_of(network, "- {at: 10s, link: host1, what: down, for: 2s}")
    player.advance(9.9)
    assert network.take() == []
    assert player.next_s() == 10.0
    player.advance(10.0)
    assert network.take() == [("link", "host1", False)]
    assert player.next_s() == 12.0
    player.advance(12.0)
    assert network.take() == [("link", "host1", True)]
    assert player.next_s() == math.inf


LOSSY = PathShape(delay_s=0.01, loss=0.1)


@pytest.mark.parametrize(
    ("text", "at_1_s", "at_3_s"),
    [
        (
            "- {at: 1s, link: host1, what: down}\n- {at: 3s, link: host1, what: up}",
            [("link", "host1", False)],
            [("link", "host1", True)],
        ),
        (
            "- {at: 1s, link: host0, what: rate, to: 10mbit, for: 2s}",
            [("rate", "host0", 10e6, 10e6)],
            [("rate", "host0", 100e6, 100e6)],
        ),
        (
            "- {at: 1s, link: host0, what: loss, to: 0.1}",
            [("path", "host0", "host1", LOSSY), ("path", "host0", "host2", LOSSY)],
            [],
        ),
        ("- {at: 1s, link: host2, what: reset}", [("reset", "host2")], []),
    ],
    ids=["up ends down", "rate of both directions", "loss of everything sent", "reset once"],
)
def test_fault_of_a_host_begins_and_ends(network, text, at_1_s, at_3_s):
    player = player_of(network, text)
    player.advance(1.0)
    player.advance(2.0)
    assert network.take() == at_1_s
    player.advance(3.0)
    assert network.take() == at_3_s
    assert player.log[0].num_connections == (3 if "reset" in text else None)


@pytest.mark.parametrize(
    ("fault", "shape"),
    [
        ("what: down", PathShape(delay_s=0.01, loss=1.0)),
        ("what: loss, to: 0.5", PathShape(delay_s=0.01, loss=0.5)),
        ("what: delay, to: 1s", PathShape(delay_s=1.0)),
        ("what: rate, to: 1mbit", PathShape(delay_s=0.01, rate_bits_per_s=1e6)),
    ],
)
def test_fault_of_a_pair_is_on_one_direction(network, fault, shape):
    player = player_of(network, f"- {{at: 1s, link: [host0, host1], {fault}, for: 1s}}")
    player.advance(1.0)
    assert network.take() == [("path", "host0", "host1", shape)]
    player.advance(2.0)
    assert network.take() == [("path", "host0", "host1", PathShape(delay_s=0.01))]


def test_overlapping_faults_end_in_any_order(network):
    text = """
    - {at: 1s, link: host0, what: rate, to: 50mbit, for: 4s}
    - {at: 2s, link: host0, what: rate, to: 10mbit, for: 1s}
    - {at: 4s, link: host0, what: rate, to: 20mbit, for: 4s}
    """
    player = player_of(network, text)
    ups = []
    for now_s in (1.0, 2.0, 3.0, 4.0, 5.0, 8.0):
        player.advance(now_s)
        ups.append([up for _, _, up, _ in network.take()])
    # At 5 s the first ends under the third, which the network does not notice.
    assert ups == [[50e6], [10e6], [50e6], [20e6], [], [100e6]]


def test_faults_happen_in_order_however_late_the_call(network):
    player = player_of(network, "- {at: 2s, link: host1, what: down, for: 1s}\n- {at: 1s, link: host2, what: reset}")
    player.advance(100.0)
    assert network.take() == [("reset", "host2"), ("link", "host1", False), ("link", "host1", True)]
    assert [(event.at_s, event.due_s) for event in player.log] == [(100.0, 1.0), (100.0, 2.0), (100.0, 3.0)]


def test_fault_at_a_step_begins_with_it_and_lasts_from_then(network):
    player = player_of(network, "- {step: 3, link: host1, what: down, for: 2s}")
    player.advance(5.0, 2)
    assert network.take() == []
    assert [fault.step for fault in player.waiting] == [3]
    player.advance(6.0, 4)
    assert network.take() == [("link", "host1", False)]
    assert player.waiting == []
    player.advance(8.0, 4)
    assert network.take() == [("link", "host1", True)]
    events = [(event.at_s, event.due_s, event.step, event.change) for event in player.log]
    assert events == [(6.0, None, 4, "began"), (8.0, 8.0, 4, "ended")]


def test_fault_at_a_step_comes_after_those_that_were_due_by_time(network):
    text = "- {step: 3, link: host0, what: rate, to: 2mbit}\n- {at: 1s, link: host0, what: rate, to: 1mbit}"
    player = player_of(network, text)
    player.advance(5.0, 3)
    assert [up for _, _, up, _ in network.take()] == [1e6, 2e6]
    assert [event.due_s for event in player.log] == [1.0, None]


def test_log_says_when_a_fault_was_applied_besides_when_it_was_due(network):
    timeline = Timeline.parse("- {at: 1s, link: host1, what: down}\n- {at: 1s, link: host2, what: reset}")
    # Every look at the clock takes it on: that is, everything that is done takes a while.
    times_s = iter([1.2, 1.5, 2.25])
    player = FaultPlayer(timeline, network, lambda: next(times_s))
    player.advance(1.0)
    player.close(2.0)
    assert [event.at_s for event in player.log] == [1.2, 1.5, 2.25]
    assert [event.due_s for event in player.log] == [1.0, 1.0, None]


ALL_AT_ONCE = """
- {at: 1s, link: host0, what: rate, to: 1mbit}
- {at: 1s, link: host0, what: loss, to: 0.1}
- {at: 1s, link: host1, what: down}
"""


@pytest.mark.parametrize("refused", ["rate", "path", "link"])
def test_setting_that_cannot_be_undone_does_not_keep_others_from_being_undone(network, refused):
    player = player_of(network, ALL_AT_ONCE)
    player.advance(1.0)
    network.take()
    network.refused = {refused}
    with pytest.raises(NetworkError, match=f"no {refused} here"):
        player.close(2.0)
    assert {what for what, *_ in network.take()} == {"rate", "path", "link"} - {refused}
    network.refused = set()
    player.close(3.0)
    assert {what for what, *_ in network.take()} == {refused}


def test_fault_that_failed_half_way_is_undone_with_the_rest(network):
    network.refused = {"path"}
    player = player_of(network, ALL_AT_ONCE)
    with pytest.raises(NetworkError, match="no path here"):
        player.advance(1.0)
    assert network.take() == [("rate", "host0", 1e6, 1e6)]
    network.refused = set()
    player.close(2.0)
    # Whether a path that was refused has changed is unknown.
    as_it_was = PathShape(delay_s=0.01)
    assert network.take() == [
        ("rate", "host0", 100e6, 100e6),
        ("path", "host0", "host1", as_it_was),
        ("path", "host0", "host2", as_it_was),
    ]


def test_everything_is_undone_at_the_end_and_logged(network):
    player = player_of(network, "- {at: 1s, link: host1, what: down}\n- {at: 2s, link: host0, what: rate, to: 1mbit}")
    before = network.plan
    player.advance(2.0)
    network.take()
    player.close(7.0)
    assert sorted(network.take(), key=str) == [("link", "host1", True), ("rate", "host0", 100e6, 100e6)]
    assert network.plan == before
    assert [(event.at_s, event.due_s, event.change) for event in player.log[2:]] == [(7.0, None, "undone")] * 2
    player.advance(100.0)
    assert network.take() == []


def test_the_log_is_fit_for_json(network):
    player = player_of(network, "- {at: 1s, link: [host0, host1], what: loss, to: 0.5, for: 1s}")
    player.advance(1.5)
    assert player.log[0].as_dict() == {
        "at_s": 1.5,
        "due_s": 1.0,
        "step": None,
        "change": "began",
        "num_connections": None,
        "fault": {"at": 1.0, "link": ("host0", "host1"), "what": "loss", "to": 0.5, "for": 1.0},
    }


FAULTS = st.builds(
    lambda at, link, what_to, lasts: Fault(at=at, link=link, what=what_to[0], to=what_to[1], lasts=lasts),
    at=st.floats(0, 10),
    link=st.sampled_from(["host0", "host1", ("host0", "host1"), ("host2", "host0")]),
    what_to=st.sampled_from([("down", None), ("rate", "1mbit"), ("rate", "2mbit"), ("loss", 0.1), ("delay", "500ms")]),
    lasts=st.one_of(st.none(), st.floats(0, 5)),
)


@given(st.lists(FAULTS, max_size=8), st.lists(st.floats(0, 20), max_size=10))
def test_network_is_always_in_the_conditions_of_the_active_faults(faults, looks_s):
    network = WrittenNetwork(plan_network(uniform(3, rate=100e6)))
    plan = network.plan
    player = FaultPlayer(Timeline(faults=faults), network)
    for now_s in sorted(looks_s):
        player.advance(now_s)
        active = [
            fault
            for fault in sorted(faults, key=lambda fault: fault.at)
            if fault.at <= now_s and (fault.lasts is None or now_s < fault.at + fault.lasts)
        ]
        expected = conditions(plan, active)
        assert all(shape == expected["rate", host] for host, shape in network.plan.host_shapes.items())
        assert all(shape == expected["path", *ends] for ends, shape in network.plan.paths.items())
    player.close(30.0)
    assert network.plan == plan


def test_thread_plays_the_timeline_and_undoes_it_at_the_end(network):
    timeline = Timeline.parse("- {at: 0s, link: host1, what: down}")
    is_down = threading.Event()
    network.set_link = lambda host, *, is_up: (network.calls.append((host, is_up)), is_down.set())
    with play(timeline, network):
        assert is_down.wait(20)
    assert network.take() == [("host1", False), ("host1", True)]


def test_thread_looks_at_the_steps(network):
    steps = iter([0, 0, 1, 2])
    reached = threading.Event()
    network.reset_tcp = lambda host: reached.set() or 0
    with play(
        Timeline.parse("- {step: 2, link: host1, what: reset}"), network, step_source=lambda: next(steps)
    ) as player:
        assert reached.wait(20)
    assert [(event.step, event.change) for event in player.log] == [(2, "began")]


def test_fault_at_a_step_is_refused_where_steps_are_not_counted(network):
    with (
        pytest.raises(ConfigError, match="steps are not counted here"),
        play(Timeline.parse("- {step: 2, link: host1, what: reset}"), network),
    ):
        pytest.fail("the block must not begin")


def test_error_of_the_network_or_of_the_step_source_is_raised_at_the_end(network):
    network.refused = {"path"}
    text = "- {at: 0s, link: host0, what: rate, to: 1mbit}\n- {at: 1ms, link: host0, what: loss, to: 0.1}"
    with pytest.raises(NetworkError, match="no path here"):
        _play_to_the_end(Timeline.parse(text), network)
    failed = threading.Event()

    def count() -> int:
        failed.set()
        raise OSError("metrics.jsonl is gone")

    timeline = Timeline.parse("- {step: 2, link: host1, what: reset}")
    with pytest.raises(OSError, match=r"metrics\.jsonl is gone"), play(timeline, network, step_source=count):
        assert failed.wait(20)


def test_error_of_the_timeline_is_a_note_to_the_error_that_ended_the_block(network):
    network.refused = {"link"}
    timeline = Timeline.parse("- {at: 0s, link: host1, what: down}")
    with pytest.raises(TimeoutError, match="no step in 120 s") as caught:
        _play_to_the_end(timeline, network, TimeoutError("no step in 120 s"))
    # When it was to begin, and when it was to be undone.
    assert caught.value.__notes__ == ["the timeline of faults failed, too: NetworkError: no link here"] * 2


def _play_to_the_end(timeline: Timeline, network: WrittenNetwork, error: Exception | None = None) -> None:
    with play(timeline, network) as player:
        wait_until(lambda: player.next_s() == math.inf, 20, "end of the timeline")
        if error is not None:
            raise error
