"""Bits follow the bandwidth: in a small closed loop, and decision by decision."""

import itertools
import math
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tahq.coordinator.link_codecs import (
    LOSS_WINDOW,
    RISING_STEPS,
    WARM_UP_STEPS,
    FollowRules,
    LinkKey,
    LinkLoad,
    PolicyState,
    StepLoad,
    initial_state,
    tick,
)
from tahq.quant.ladder import Ladder

FORWARD, BACKWARD = LinkKey(0, "activations"), LinkKey(0, "gradients")
NBYTES = (2_000_000, 4_000_000, 6_000_000, 8_000_000, 12_000_000)
LADDER = Ladder(tuple(f"wf:bits={bits}" for bits in range(2, 7)), NBYTES)
RULES = FollowRules({"activations": LADDER, "gradients": LADDER})
COMPUTE_S = 0.5
FAST, SLOW = 300e6, 50e6


@dataclass
class Loop:
    """Two links whose rates are given, a policy, and the outcome. Only the first link's rate ever changes."""

    rules: FollowRules = RULES
    state: PolicyState = field(default_factory=lambda: initial_state(RULES, 2, {"activations": 2, "gradients": 2}))
    step: int = 0
    history: list[int] = field(default_factory=list)

    def run(self, rate: float, steps: int, noise=lambda step: 1.0, compute_s: float = COMPUTE_S) -> list[int]:
        """Rungs of the first link's activations, in force in each step."""
        begin = len(self.history)
        for _ in range(steps):
            self.history.append(self.state.links[FORWARD].rung)
            links = {key: self.load(key, rate, noise(self.step)) for key in self.state.links}
            self.tell(StepLoad(self.step, compute_s, 3.0, True, links))
        return self.history[begin:]

    def load(self, key: LinkKey, rate: float, noise: float) -> LinkLoad:
        nbytes = 3 * self.rules.ladders[key.direction].nbytes[self.state.links[key].rung]
        return LinkLoad(nbytes, noise * 8 * nbytes / (rate if key == FORWARD else FAST))

    def tell(self, load: StepLoad):
        self.state, changes = tick(self.rules, self.state, load)
        self.step += 1
        return changes


def busy_s(rung: int, rate: float) -> float:
    return 3 * 8 * NBYTES[rung] / rate


def fits(rate: float) -> int:
    """The highest rung that sends in the time that computing takes."""
    return max((rung for rung in range(len(NBYTES)) if busy_s(rung, rate) <= COMPUTE_S), default=0)


def test_bits_follow_a_falling_rate_within_three_steps_and_come_back():
    loop = Loop()
    settled = loop.run(FAST, 30)[-1]
    assert settled == 2  # 0.48 s of 0.5 s: fits, and the next rung would not
    assert loop.run(SLOW, 20)[1:] == [0] * 19
    assert loop.run(FAST, 30)[-1] == fits(0.75 * FAST)


def test_a_rung_that_fits_is_chosen_at_once_and_not_rung_by_rung():
    rules = FollowRules({"activations": Ladder(("a", "b", "c", "d", "e"), (1, 2, 4, 8, 16))})
    state = initial_state(rules, 1, {"activations": 4})
    for step, rung in ((0, 4), (1, 2)):  # the first step is warm-up
        load = LinkLoad(16, 3.0)
        state, _ = tick(rules, state, StepLoad(step, 1.0, 3.0, True, {FORWARD: load}))
        assert state.links[FORWARD].rung == rung


def test_links_and_directions_are_decided_apart():
    loop = Loop()
    loop.run(SLOW, 5)
    rungs = {key: link.rung for key, link in loop.state.links.items()}
    assert rungs == {FORWARD: 0, BACKWARD: 2, LinkKey(1, "activations"): 2, LinkKey(1, "gradients"): 2}


@given(
    rate=st.floats(20e6, 2e9),
    noises=st.lists(st.floats(0.93, 1.07), min_size=1, max_size=50),
    start=st.integers(0, len(NBYTES) - 1),
)
@settings(max_examples=60, deadline=None)
def test_rung_settles_at_a_constant_rate_however_noisy(rate, noises, start):
    loop = Loop(state=initial_state(RULES, 1, {"activations": start, "gradients": start}))
    rungs = loop.run(rate, 150, lambda step: noises[step % len(noises)])
    settled = rungs[40:]
    assert len(set(settled)) == 1
    below = busy_s(settled[0], rate)
    assert below * max(noises) <= COMPUTE_S or settled[0] == 0


@given(before=st.floats(100e6, 2e9), after=st.floats(20e6, 2e9), when=st.integers(10, 60), mixed=st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_any_fall_is_answered_within_three_steps_and_any_rise_in_the_end(before, after, when, mixed):
    """The step in which the rate changes has a bit of either, `mixed` of the new one."""
    loop = Loop()
    loop.run(before, when)
    loop.run(1 / (mixed / after + (1 - mixed) / before), 1)
    rungs = loop.run(after, 60)
    affordable = fits(after)
    assert all(rung <= affordable for rung in rungs[2:4])  # in force in the third step
    assert rungs[-1] >= fits(0.7 * after)


def test_a_raise_that_proves_wrong_is_tried_less_and_less_often():
    """The rate depends on how much is sent: with many bits another bottleneck shows up that few do not meet."""
    loop = Loop(state=initial_state(RULES, 1, {"activations": 0, "gradients": 0}))
    rungs = [loop.run(1e9 if loop.state.links[FORWARD].rung == 0 else 60e6, 1)[0] for _ in range(400)]
    raised = [step for step, (a, b) in enumerate(itertools.pairwise(rungs)) if b > a]
    gaps = [b - a for a, b in itertools.pairwise(raised)]
    assert gaps[:4] == sorted(set(gaps[:4]))
    assert gaps[-1] > 7 * gaps[0]


@dataclass
class Uplink:
    """Activations to the next host and gradients to the one before share a rate, and each path has its own."""

    rate: float
    paths: tuple[float, float] = (math.inf, math.inf)
    state: PolicyState = field(default_factory=lambda: initial_state(RULES, 1, {"activations": 4, "gradients": 4}))

    def run(self, steps: int, noise=lambda step: 1.0) -> list[tuple[int, int]]:
        """Rungs in force in each step."""
        history = []
        for step in range(steps):
            history.append((self.state.links[FORWARD].rung, self.state.links[BACKWARD].rung))
            load = StepLoad(step, COMPUTE_S, 3.0, True, self.loads(noise(step)))
            self.state, _ = tick(RULES, self.state, load)
        return history

    def loads(self, noise: float) -> dict[LinkKey, LinkLoad]:
        nbytes = {key: 3 * NBYTES[link.rung] for key, link in self.state.links.items()}
        rates = dict(zip((FORWARD, BACKWARD), self.paths, strict=True))
        return {key: LinkLoad(n, noise * 8 * n / min(self.rate, rates[key]), uplink=7) for key, n in nbytes.items()}

    def total_s(self) -> float:
        return sum(load.sending_s for load in self.loads(1.0).values())


def test_links_that_share_an_uplink_are_the_bottleneck_together():
    uplink = Uplink(700e6)
    assert uplink.run(3)[-1] == (2, 2)  # either would fit alone
    assert uplink.total_s() <= COMPUTE_S


def test_slow_path_lowers_only_its_own_link():
    uplink = Uplink(2e9, paths=(2e9, SLOW))
    assert {forward for forward, _ in uplink.run(40)} == {4}
    assert uplink.state.links[BACKWARD].rung == 0


@given(
    rate=st.floats(20e6, 4e9),
    way=st.floats(20e6, 4e9),
    noises=st.lists(st.floats(0.95, 1.05), min_size=1, max_size=30),
)
@settings(max_examples=60, deadline=None)
def test_rungs_settle_on_a_shared_uplink_and_fit(rate, way, noises):
    uplink = Uplink(rate, paths=(way, math.inf))
    rungs = uplink.run(200, lambda step: noises[step % len(noises)])
    assert len(set(rungs[100:])) == 1
    measured_s = min(noises) * uplink.total_s()  # a rate that is always measured too high may be filled as such
    assert measured_s <= COMPUTE_S * (1 + 1e-9) or 0 in rungs[-1]


def test_one_slow_step_does_not_lower_where_two_are_asked_for():
    loop = Loop(rules=replace(RULES, lower_after=2))
    loop.run(FAST, 5)
    assert loop.run(SLOW, 1) + loop.run(FAST, 3) == [2, 2, 2, 2]
    assert loop.run(SLOW, 4) == [2, 2, 0, 0]


def test_the_first_step_after_a_start_says_nothing_of_links():
    loop = Loop()
    assert loop.run(SLOW, WARM_UP_STEPS + 2) == [2] * (WARM_UP_STEPS + 1) + [0]


def test_change_names_the_figures():
    loop = Loop()
    loop.run(FAST, 3)
    (change,) = loop.tell(StepLoad(3, COMPUTE_S, 3.0, True, {FORWARD: LinkLoad(18_000_000, 2.88)}))
    assert str(change) == (
        "link 0, activations: wf:bits=4 -> wf:bits=2 (bottleneck: sending took 2.88 s at 50 Mbit/s, computing 0.5 s)"
    )


def quiet(step: int, **changes) -> StepLoad:
    """A step that asks for nothing: links just full."""
    links = {key: LinkLoad(1000, 0.48) for key in (FORWARD, BACKWARD)}
    return replace(StepLoad(step, COMPUTE_S, 3.0, True, links), **changes)


@pytest.fixture
def one_link() -> Loop:
    loop = Loop(state=initial_state(RULES, 1, {"activations": 2, "gradients": 2}))
    for step in range(LOSS_WINDOW + 5):
        assert loop.tell(quiet(step)) == ()
    return loop


def test_non_finite_step_raises_all_bits(one_link):
    changes = one_link.tell(quiet(one_link.step, finite=False, loss=math.nan))
    assert [(c.link, c.direction, c.new, c.reason) for c in changes] == [
        (0, "activations", "wf:bits=5", "guard"),
        (0, "gradients", "wf:bits=5", "guard"),
    ]


def test_an_error_that_is_too_large_raises_that_direction_alone(one_link):
    links = {FORWARD: LinkLoad(1000, 0.48), BACKWARD: LinkLoad(1000, 0.48, error=0.7)}
    (change,) = one_link.tell(quiet(one_link.step, links=links))
    assert (change.direction, change.new) == ("gradients", "wf:bits=5")
    assert change.detail == "relative error 0.7, above the limit of 0.5"


def test_a_loss_that_rises_against_its_average_raises_all_bits(one_link):
    calls = [one_link.tell(quiet(one_link.step, loss=4.0)) for _ in range(RISING_STEPS)]
    assert [len(changes) for changes in calls] == [0] * (RISING_STEPS - 1) + [2]
    assert "loss 4" in calls[-1][0].detail


def test_a_single_high_loss_or_a_falling_one_raises_nothing(one_link):
    for loss in (4.0, 3.0, 4.0, 4.0, 3.0, 2.9, 2.5, 2.0):
        assert one_link.tell(quiet(one_link.step, loss=loss)) == ()


def test_bits_that_the_guard_raised_are_held_whatever_the_link_is_like(one_link):
    one_link.tell(quiet(one_link.step, finite=False))
    jammed = {key: LinkLoad(1000, 5.0) for key in (FORWARD, BACKWARD)}
    changes = [one_link.tell(quiet(one_link.step, links=jammed)) for _ in range(RULES.hold + 1)]
    first = next(index for index, some in enumerate(changes) if some)
    assert first == RULES.hold - 1  # decided with the last step that is held, in force after it
    assert {change.new for change in changes[first]} == {"wf:bits=2"}


def test_the_guard_has_nothing_above_the_top():
    loop = Loop(state=initial_state(RULES, 1, {"activations": 4, "gradients": 4}))
    assert loop.tell(quiet(0, finite=False)) == ()
    assert loop.state.links[FORWARD].floor == 4


def test_a_step_without_traffic_or_without_compute_decides_nothing():
    loop = Loop()
    loop.run(FAST, 3)
    assert loop.tell(StepLoad(3, COMPUTE_S, 3.0, True, {})) == ()
    assert loop.tell(StepLoad(4, 0.0, 3.0, True, {FORWARD: LinkLoad(1000, 5.0)})) == ()


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10), st.floats(0, 1), st.booleans()), max_size=60))
@settings(max_examples=40, deadline=None)
def test_the_same_reports_give_the_same_decisions_and_rungs_stay_on_the_ladder(reports):
    ends = []
    for _ in range(2):
        loop = Loop(state=initial_state(RULES, 1, {"activations": 2, "gradients": 2}))
        for step, (busy, compute, error, finite) in enumerate(reports):
            loop.tell(StepLoad(step, compute, 3.0, finite, {FORWARD: LinkLoad(1000, busy, error)}))
        ends.append(loop.state)
    assert ends[0] == ends[1]
    assert all(0 <= link.rung < len(NBYTES) for link in ends[0].links.values())
