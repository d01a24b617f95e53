"""Timelines: read, and played on a network that only notes its calls, by a virtual clock."""

import math
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.loopback_network import LoopbackNetwork
from support.processes import wait_until

from tahq.errors import ConfigError, NetworkError
from tahq_netem.network.description import PathShape, uniform
from tahq_netem.network.faults import FaultPlayer, NetworkFault, Timeline, conditions, play

PLAIN = PathShape(delay_s=0.01)
LOSSY = PathShape(delay_s=0.01, loss=0.1)


class NotedNetwork(LoopbackNetwork):
    """Keeps its plan, and a list of its calls."""

    def __init__(self, config) -> None:
        super().__init__(config)
        self.calls: list[tuple] = []
        self.refused: set[str] = set()

    def set_plan(self, plan):
        changes = [
            ("rate", host, shape.up_bits_per_s, shape.down_bits_per_s)
            for host, shape in plan.host_shapes.items()
            if shape != self.plan.host_shapes[host]
        ]
        changes += [("path", *ends, shape) for ends, shape in plan.paths.items() if shape != self.plan.paths[ends]]
        if self.refused & {what for what, *_ in changes}:
            raise NetworkError(f"no {self.refused.pop()} here")
        self.calls += changes
        super().set_plan(plan)

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
    return NotedNetwork(uniform(3, rate=100e6, delay=0.01))


def player_of(network, text: str) -> FaultPlayer:
    return FaultPlayer(Timeline.parse(text), network)


# -- reading --------------------------------------------------------------------------------------


def test_timeline_is_read_with_its_units_and_written_as_it_is_read():
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
    assert Timeline.model_validate(timeline.model_dump(by_alias=True)) == timeline


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{at: 1s, step: 2, link: a, what: down}", "exactly one of `at` and `step`"),
        ("{at: 1s, link: [a, b], what: reset}", "one host"),
        ("{at: 1s, link: a, what: reset, for: 1s}", "leave `for` out"),
        ("{at: 1s, link: a, what: rate}", "rate needs `to`, such as 10mbit"),
        ("{at: 1s, link: a, what: down, to: 1}", "down takes no `to`"),
        ("{at: 1s, link: a, what: loss, to: 5}", "0 to 1; got 5"),
        ("{at: 1s, link: a, what: rate, to: 10}", "a rate needs a unit"),
        ("{at: 1, link: a, what: down}", "a duration needs a unit"),
        ("{at: 1s, link: a, what: explode}", "down, up, rate, loss, delay or reset"),
        ("{at: 1s, link: a, what: down, fro: 1s}", "fro is not a key"),
        ("{at: 1s, link: [a, b, c], what: down}", "link"),
        ("{at: 1s, link: ]}", "not valid YAML"),
    ],
)
def test_mistake_is_one_line_that_names_its_place(line, message):
    with pytest.raises(ConfigError) as caught:
        Timeline.parse(f"- {{at: 1s, link: a, what: down}}\n- {line}\n", "faults.yaml")
    assert message in str(caught.value)
    assert str(caught.value).startswith("faults.yaml:2: ")
    assert "\n" not in str(caught.value)


def test_fault_that_the_network_cannot_have_is_refused_before_the_start(network):
    with pytest.raises(ConfigError, match="did you mean host1"):
        player_of(network, "- {at: 1s, link: host11, what: down}")
    reordering = NotedNetwork(uniform(2, delay=0.01, reorder=0.1))
    with pytest.raises(ConfigError, match="reorder needs a delay"):
        player_of(reordering, "- {at: 1s, link: host0, what: delay, to: 0s}")
    at_a_step = Timeline.parse("- {step: 2, link: host1, what: reset}")
    with pytest.raises(ConfigError, match="steps are not counted here"), play(at_a_step, network):
        pytest.fail("the block must not begin")
    assert network.take() == reordering.take() == []


# -- playing --------------------------------------------------------------------------------------


def on_pair(fault: str, shape: PathShape):
    """A fault of one direction of a pair, for a second."""
    text = f"- {{at: 1s, link: [host0, host1], {fault}, for: 1s}}"
    return text, {1.0: [("path", "host0", "host1", shape)], 2.0: [("path", "host0", "host1", PLAIN)]}


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (
            "- {at: 10s, link: host1, what: down, for: 2s}",
            {9.9: [], 10.0: [("link", "host1", False)], 12.0: [("link", "host1", True)]},
        ),
        (
            "- {at: 1s, link: host1, what: down}\n- {at: 3s, link: host1, what: up}",
            {1.0: [("link", "host1", False)], 2.0: [], 3.0: [("link", "host1", True)]},
        ),
        (
            "- {at: 1s, link: host0, what: rate, to: 10mbit, for: 2s}",
            {1.0: [("rate", "host0", 10e6, 10e6)], 3.0: [("rate", "host0", 100e6, 100e6)]},
        ),
        (
            "- {at: 1s, link: host0, what: loss, to: 0.1}",
            {1.0: [("path", "host0", "host1", LOSSY), ("path", "host0", "host2", LOSSY)], 9.0: []},
        ),
        on_pair("what: down", PathShape(delay_s=0.01, loss=1.0)),
        on_pair("what: loss, to: 0.1", LOSSY),
        on_pair("what: delay, to: 1s", PathShape(delay_s=1.0)),
        on_pair("what: rate, to: 1mbit", PathShape(delay_s=0.01, rate_bits_per_s=1e6)),
        ("- {at: 1s, link: host2, what: reset}", {5.0: [("reset", "host2")], 6.0: []}),
        (  # in any order; at 5 s the first ends under the third, which changes nothing
            "- {at: 1s, link: host0, what: rate, to: 50mbit, for: 4s}\n"
            "- {at: 2s, link: host0, what: rate, to: 10mbit, for: 1s}\n"
            "- {at: 4s, link: host0, what: rate, to: 20mbit, for: 4s}",
            {
                now_s: [("rate", "host0", rate, rate) for rate in rates]
                for now_s, rates in {1.0: [50e6], 2.0: [10e6], 3.0: [50e6], 4.0: [20e6], 5.0: [], 8.0: [100e6]}.items()
            },
        ),
    ],
)
def test_faults_change_the_network_and_their_end_changes_it_back(network, text, calls):
    player = player_of(network, text)
    for now_s, expected in calls.items():
        player.advance(now_s)
        assert network.take() == expected
        assert player.next_s() > now_s


def test_faults_happen_in_order_however_late_the_call(network):
    player = player_of(network, "- {at: 2s, link: host1, what: down, for: 1s}\n- {at: 1s, link: host2, what: reset}")
    player.advance(100.0)
    assert network.take() == [("reset", "host2"), ("link", "host1", False), ("link", "host1", True)]
    assert [(event.at_s, event.due_s) for event in player.log] == [(100.0, 1.0), (100.0, 2.0), (100.0, 3.0)]
    assert player.log[0].num_connections == 3


def test_fault_at_a_step_begins_with_it_after_those_due_by_time_and_lasts_from_then(network):
    text = "- {step: 3, link: host1, what: down, for: 2s}\n- {at: 5500ms, link: host2, what: reset}"
    player = player_of(network, text)
    player.advance(5.0, 2)
    assert (network.take(), len(player.waiting)) == ([], 2)
    player.advance(6.0, 4)
    assert network.take() == [("reset", "host2"), ("link", "host1", False)]
    assert player.waiting == []
    player.advance(8.0, 4)
    assert network.take() == [("link", "host1", True)]
    events = [(event.at_s, event.due_s, event.step, event.change) for event in player.log]
    assert events == [(6.0, 5.5, 4, "began"), (6.0, None, 4, "began"), (8.0, 8.0, 4, "ended")]


def test_log_says_when_a_fault_was_applied_and_is_fit_for_json(network):
    text = "- {at: 1s, link: [host0, host1], what: loss, to: 0.5, for: 1s}\n- {at: 1s, link: host2, what: reset}"
    player = FaultPlayer(Timeline.parse(text), network)
    player.advance(1.2)
    player.close(1.8)
    assert [(event.at_s, event.due_s) for event in player.log] == [(1.2, 1.0), (1.2, 1.0), (1.8, None)]
    assert player.log[0].as_dict() == {
        "at_s": 1.2,
        "due_s": 1.0,
        "step": None,
        "change": "began",
        "num_connections": None,
        "fault": {"at": 1.0, "link": ("host0", "host1"), "what": "loss", "to": 0.5, "for": 1.0},
    }


ALL_AT_ONCE = """
- {at: 1s, link: host0, what: rate, to: 1mbit}
- {at: 1s, link: host0, what: loss, to: 0.1}
- {at: 1s, link: host1, what: down}
"""


@pytest.mark.parametrize("refused", [None, "rate", "path", "link"])
def test_everything_is_undone_at_the_end_even_if_a_setting_cannot_be(network, refused):
    before = network.plan
    player = player_of(network, ALL_AT_ONCE)
    player.advance(1.0)
    network.take()
    if refused is not None:
        network.refused = {refused}
        with pytest.raises(NetworkError, match=f"no {refused} here"):
            player.close(2.0)
        network.refused = set()
    player.close(3.0)
    kinds = [what for what, *_ in network.take()]
    assert sorted(kinds) == ["link", "path", "path", "rate"]
    assert network.plan == before
    player.advance(100.0)
    assert network.take() == []


FAULTS = st.builds(
    lambda at, link, what_to, lasts: NetworkFault(at=at, link=link, what=what_to[0], to=what_to[1], lasts=lasts),
    at=st.floats(0, 10),
    link=st.sampled_from(["host0", "host1", ("host0", "host1"), ("host2", "host0")]),
    what_to=st.sampled_from([("down", None), ("rate", "1mbit"), ("rate", "2mbit"), ("loss", 0.1), ("delay", "500ms")]),
    lasts=st.one_of(st.none(), st.floats(0, 5)),
)


@given(st.lists(FAULTS, max_size=8), st.lists(st.floats(0, 20), max_size=10))
def test_network_is_always_in_the_conditions_of_the_active_faults(faults, looks_s):
    network = NotedNetwork(uniform(3, rate=100e6))
    plan = network.plan
    player = FaultPlayer(Timeline(faults=faults), network)
    for now_s in sorted(looks_s):
        player.advance(now_s)
        active = [
            fault
            for fault in sorted(faults, key=lambda fault: fault.at)
            if fault.at <= now_s and (fault.lasts is None or now_s < fault.at + fault.lasts)
        ]
        assert network.plan == conditions(plan, active)[0]
    player.close(30.0)
    assert network.plan == plan


# -- playing from a thread ------------------------------------------------------------------------


def test_thread_plays_by_time_and_by_steps_and_undoes_everything_at_the_end(network):
    steps, reached = iter([0, 0, 1, 2]), threading.Event()
    network.reset_tcp = lambda host: reached.set() or 0
    timeline = Timeline.parse("- {at: 0s, link: host1, what: down}\n- {step: 2, link: host1, what: reset}")
    with play(timeline, network, step_source=lambda: next(steps)) as player:
        assert reached.wait(20)
    assert network.take() == [("link", "host1", False), ("link", "host1", True)]
    assert [(event.step, event.change) for event in player.log] == [(0, "began"), (2, "began"), (None, "undone")]


def play_to_the_end(text: str, network: NotedNetwork, error: Exception | None = None) -> None:
    with play(Timeline.parse(text), network) as player:
        wait_until(lambda: player.next_s() == math.inf, 20, "end of the timeline")
        if error is not None:
            raise error


def test_error_of_the_network_or_of_the_step_source_is_raised_at_the_end(network):
    network.refused = {"path"}
    with pytest.raises(NetworkError, match="no path here"):
        play_to_the_end("- {at: 1ms, link: host0, what: loss, to: 0.1}", network)
    failed = threading.Event()

    def count() -> int:
        failed.set()
        raise OSError("metrics.jsonl is gone")

    timeline = Timeline.parse("- {step: 2, link: host1, what: reset}")
    with pytest.raises(OSError, match=r"metrics\.jsonl is gone"), play(timeline, network, step_source=count):
        assert failed.wait(20)


def test_error_of_the_timeline_is_a_note_to_the_error_that_ended_the_block(network):
    network.refused = {"link"}
    with pytest.raises(TimeoutError, match="no step in 120 s") as caught:
        play_to_the_end("- {at: 0s, link: host1, what: down}", network, TimeoutError("no step in 120 s"))
    assert caught.value.__notes__ == ["the timeline of faults failed, too: NetworkError: no link here"]
