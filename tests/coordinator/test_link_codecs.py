"""Bits follow the bandwidth, in a small closed loop and decision by decision; codecs in force are kept and replayed."""

import itertools
import json
import math
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tahq.coordinator.link_codecs import (
    LOSS_WINDOW,
    RAW,
    RISING_STEPS,
    WARM_UP_STEPS,
    CodecOptions,
    FollowRules,
    LinkCodecs,
    LinkKey,
    LinkLoad,
    PolicyState,
    StepLoad,
    computing_s,
    initial_state,
    step_load,
    tick,
)
from tahq.coordinator.observer import LinkRecord, StageRecord, StepRecord
from tahq.errors import ConfigError, SnapshotError
from tahq.observe.metrics import step_object
from tahq.quant.ladder import Ladder
from tahq_launch.start.codec_choice import recorded_codecs

FORWARD, BACKWARD = LinkKey(0, "activations"), LinkKey(0, "gradients")
NBYTES = (2_000_000, 4_000_000, 6_000_000, 8_000_000, 12_000_000)
LADDER = Ladder(tuple(f"wf:bits={bits}" for bits in range(2, 7)), NBYTES)
RULES = FollowRules({"activations": LADDER, "gradients": LADDER})
COMPUTE_S = 0.5
FAST, SLOW = 300e6, 50e6


def state_at(rung: int, num_links: int = 1) -> PolicyState:
    return initial_state(RULES, num_links, {"activations": rung, "gradients": rung})


@dataclass
class Loop:
    """Two links whose rates are given, a policy, and the outcome. Only the first link's rate ever changes."""

    rules: FollowRules = RULES
    state: PolicyState = field(default_factory=lambda: state_at(2, num_links=2))
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
    assert loop.run(FAST, 30)[-1] == 2  # 0.48 s of 0.5 s: fits, and the next rung would not
    assert loop.run(SLOW, 20)[1:] == [0] * 19
    rungs = {key: link.rung for key, link in loop.state.links.items()}  # links and directions are decided apart
    assert rungs == {FORWARD: 0, BACKWARD: 2, LinkKey(1, "activations"): 2, LinkKey(1, "gradients"): 2}
    assert loop.run(FAST, 30)[-1] == fits(0.75 * FAST)


def test_a_rung_that_fits_is_chosen_at_once_after_the_first_step_and_not_rung_by_rung():
    rules = FollowRules({"activations": Ladder(("a", "b", "c", "d", "e"), (1, 2, 4, 8, 16))})
    state = initial_state(rules, 1, {"activations": 4})
    for step, rung in enumerate([4] * WARM_UP_STEPS + [2]):
        state, _ = tick(rules, state, StepLoad(step, 1.0, 3.0, True, {FORWARD: LinkLoad(16, 3.0)}))
        assert state.links[FORWARD].rung == rung


@given(
    rate=st.floats(20e6, 2e9),
    noises=st.lists(st.floats(0.93, 1.07), min_size=1, max_size=50),
    start=st.integers(0, len(NBYTES) - 1),
)
@settings(max_examples=60, deadline=None)
def test_rung_settles_at_a_constant_rate_however_noisy(rate, noises, start):
    settled = Loop(state=state_at(start)).run(rate, 150, lambda step: noises[step % len(noises)])[40:]
    assert len(set(settled)) == 1
    assert busy_s(settled[0], rate) * max(noises) <= COMPUTE_S or settled[0] == 0


@given(before=st.floats(100e6, 2e9), after=st.floats(20e6, 2e9), when=st.integers(10, 60), mixed=st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_any_fall_is_answered_within_three_steps_and_any_rise_in_the_end(before, after, when, mixed):
    """The step in which the rate changes has a bit of either, `mixed` of the new one."""
    loop = Loop()
    loop.run(before, when)
    loop.run(1 / (mixed / after + (1 - mixed) / before), 1)
    rungs = loop.run(after, 60)
    assert all(rung <= fits(after) for rung in rungs[2:4])  # in force in the third step
    assert rungs[-1] >= fits(0.7 * after)


def test_a_raise_that_proves_wrong_is_tried_less_and_less_often():
    """The rate depends on how much is sent: with many bits another bottleneck shows up that few do not meet."""
    loop = Loop(state=state_at(0))
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
    state: PolicyState = field(default_factory=lambda: state_at(4))

    def run(self, steps: int, noise=lambda step: 1.0) -> list[tuple[int, int]]:
        """Rungs in force in each step."""
        history = []
        for step in range(steps):
            history.append((self.state.links[FORWARD].rung, self.state.links[BACKWARD].rung))
            self.state, _ = tick(RULES, self.state, StepLoad(step, COMPUTE_S, 3.0, True, self.loads(noise(step))))
        return history

    def loads(self, noise: float) -> dict[LinkKey, LinkLoad]:
        nbytes = {key: 3 * NBYTES[link.rung] for key, link in self.state.links.items()}
        rates = dict(zip((FORWARD, BACKWARD), self.paths, strict=True))
        return {key: LinkLoad(n, noise * 8 * n / min(self.rate, rates[key]), uplink=7) for key, n in nbytes.items()}

    def total_s(self) -> float:
        return sum(load.sending_s for load in self.loads(1.0).values())


def test_links_that_share_an_uplink_are_the_bottleneck_together_and_a_slow_path_lowers_only_its_own():
    shared = Uplink(700e6)
    assert shared.run(3)[-1] == (2, 2)  # either would fit alone
    assert shared.total_s() <= COMPUTE_S
    assert Uplink(2e9, paths=(2e9, SLOW)).run(40)[-1] == (4, 0)


@given(
    rate=st.floats(20e6, 4e9),
    path=st.floats(20e6, 4e9),
    noises=st.lists(st.floats(0.95, 1.05), min_size=1, max_size=30),
)
@settings(max_examples=60, deadline=None)
def test_rungs_settle_on_a_shared_uplink_and_fit(rate, path, noises):
    uplink = Uplink(rate, paths=(path, math.inf))
    rungs = uplink.run(200, lambda step: noises[step % len(noises)])
    assert len(set(rungs[100:])) == 1
    measured_s = min(noises) * uplink.total_s()  # a rate that is always measured too high may be filled as such
    assert measured_s <= COMPUTE_S * (1 + 1e-9) or 0 in rungs[-1]


def test_one_slow_step_does_not_lower_where_two_are_asked_for():
    loop = Loop(rules=replace(RULES, lower_after=2))
    loop.run(FAST, 5)
    assert loop.run(SLOW, 1) + loop.run(FAST, 3) == [2, 2, 2, 2]
    assert loop.run(SLOW, 4) == [2, 2, 0, 0]


def test_change_names_the_figures_and_a_step_without_traffic_or_compute_decides_nothing():
    loop = Loop()
    loop.run(FAST, 3)
    (change,) = loop.tell(StepLoad(3, COMPUTE_S, 3.0, True, {FORWARD: LinkLoad(18_000_000, 2.88)}))
    assert str(change) == (
        "link 0, activations: wf:bits=4 -> wf:bits=2 (bottleneck: sending took 2.88 s at 50 Mbit/s, computing 0.5 s)"
    )
    assert loop.tell(StepLoad(4, COMPUTE_S, 3.0, True, {})) == ()
    assert loop.tell(StepLoad(5, 0.0, 3.0, True, {FORWARD: LinkLoad(1000, 5.0)})) == ()


def quiet(step: int, **changes) -> StepLoad:
    """A step that asks for nothing: links just full."""
    links = {key: LinkLoad(1000, 0.48) for key in (FORWARD, BACKWARD)}
    return replace(StepLoad(step, COMPUTE_S, 3.0, True, links), **changes)


@pytest.fixture
def one_link() -> Loop:
    loop = Loop(state=state_at(2))
    for step in range(LOSS_WINDOW + 5):
        assert loop.tell(quiet(step)) == ()
    return loop


def test_non_finite_step_raises_all_bits_and_holds_them_whatever_the_link_is_like(one_link):
    changes = one_link.tell(quiet(one_link.step, finite=False, loss=math.nan))
    assert [(c.link, c.direction, c.new, c.reason) for c in changes] == [
        (0, direction, "wf:bits=5", "guard") for direction in ("activations", "gradients")
    ]
    jammed = {key: LinkLoad(1000, 5.0) for key in (FORWARD, BACKWARD)}
    changes = [one_link.tell(quiet(one_link.step, links=jammed)) for _ in range(RULES.hold + 1)]
    first = next(index for index, some in enumerate(changes) if some)
    assert first == RULES.hold - 1  # decided with the last step that is held, in force after it
    assert {change.new for change in changes[first]} == {"wf:bits=2"}


def test_an_error_that_is_too_large_raises_that_direction_alone(one_link):
    links = {FORWARD: LinkLoad(1000, 0.48), BACKWARD: LinkLoad(1000, 0.48, error=0.7)}
    (change,) = one_link.tell(quiet(one_link.step, links=links))
    assert (change.direction, change.new) == ("gradients", "wf:bits=5")
    assert change.detail == "relative error 0.7, above the limit of 0.5"


def test_a_loss_that_stays_above_its_average_raises_all_bits_and_a_single_high_or_falling_one_does_not(one_link):
    for loss in (4.0, 3.0, 4.0, 4.0, 3.0, 2.9, 2.5, 2.0):
        assert one_link.tell(quiet(one_link.step, loss=loss)) == ()
    calls = [one_link.tell(quiet(one_link.step, loss=5.0)) for _ in range(RISING_STEPS)]
    assert [len(changes) for changes in calls] == [0] * (RISING_STEPS - 1) + [2]
    assert "loss 5" in calls[-1][0].detail


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10), st.floats(0, 1), st.booleans()), max_size=60))
@settings(max_examples=40, deadline=None)
def test_the_same_reports_give_the_same_decisions_and_rungs_stay_on_the_ladder(reports):
    ends = []
    for _ in range(2):
        loop = Loop(state=state_at(2))
        for step, (busy, compute, error, finite) in enumerate(reports):
            loop.tell(StepLoad(step, compute, 3.0, finite, {FORWARD: LinkLoad(1000, busy, error)}))
        ends.append(loop.state)
    assert ends[0] == ends[1]
    assert all(0 <= link.rung < len(NBYTES) for link in ends[0].links.values())


# -- the links of a run ----------------------------------------------------------------------------

UP = ("wf:bits=2,group=128,center=on", "wf:bits=4,group=128,center=on")
DOWN = ("eden:bits=2,group=256", "eden:bits=3,group=256", "eden:bits=4,group=256")
LADDERS = {"activations": Ladder(UP, (1000, 2000)), "gradients": Ladder(DOWN, (1000, 1500, 2000))}
OPTIONS = CodecOptions({"activations": UP[1], "gradients": DOWN[1]}, FollowRules(LADDERS))
NUM_LINKS = 2
LOWERED = [[1, 1, 3]]
"""Raw, two for activations, then the first for gradients."""


def step_of(step: int, busy_s: float = 0.4, wire_s: float = 0.0) -> StepRecord:
    """A step of three stages that computed for half a second; only link 1's gradients are ever slow."""
    links = [
        LinkRecord(link, link + up, link + 1 - up, ("gradients", "activations")[1 - up], 4, 6000, 6400, 8000, spent)
        for link in range(NUM_LINKS)
        for up, spent in ((0, 0.4), (1, busy_s if link else 0.4))
    ]
    links.append(LinkRecord(NUM_LINKS, 0, 2, "gradients", 1, 9000, 9100, 2250, 0.1))  # of tied embeddings
    stages = [StageRecord(stage, {"forward": 0.2, "backward": 0.3, "wait": 9.0}) for stage in range(3)]
    links = [replace(link, wire_s=wire_s) for link in links]
    return StepRecord(step, 3.0, 100, 1.0, 1.0, 1.0, False, False, stages, links)


def specs(record: StepRecord) -> list[str]:
    return [link.codec for link in record.links]


def played(codecs: LinkCodecs, busy_by_step, first: int = 1) -> tuple[list[StepRecord], list[list[list[int]]]]:
    """Steps as they are told to observers, and the rows of their COMMITs."""
    records, rows = [], []
    for step, busy_s in enumerate(busy_by_step, first):
        record = codecs.described(step_of(step, busy_s))
        changes, told = codecs.decide(record)
        records.append(replace(record, codec_changes=changes))
        rows.append(told)
    return records, rows


@pytest.fixture
def lowered() -> LinkCodecs:
    """The codecs of a run that has lowered the bits of link 1's gradients."""
    codecs = LinkCodecs(OPTIONS, NUM_LINKS, 0)
    records, rows = played(codecs, [0.4, 0.4, 2.0, 0.4])
    assert rows == [[], [], LOWERED, []]
    assert [specs(record)[3] for record in records] == [DOWN[1]] * 3 + [DOWN[0]]
    assert specs(records[-1]) == [UP[1], DOWN[1], UP[1], DOWN[0], RAW]
    return codecs


def test_the_policy_is_told_compute_time_and_transmission_time_of_every_cut():
    load = step_load(step_of(1, 2.0, wire_s=0.25), NUM_LINKS)
    assert (load.step, load.compute_s, load.loss, load.finite) == (0, 0.5, 3.0, True)
    assert [(*key, link.sending_s, link.uplink) for key, link in sorted(load.links.items())] == [
        (0, "activations", 0.25, 0),
        (0, "gradients", 0.25, 1),
        (1, "activations", 0.25, 1),
        (1, "gradients", 0.25, 2),
    ]
    without_wire_times = step_load(step_of(1, 2.0), NUM_LINKS)
    assert without_wire_times.links[LinkKey(1, "gradients")] == LinkLoad(6000, 2.0)
    timing = {"forward": 1.0, "weight_gradient": 2.0, "encode": 0.5, "beside:decode": 9.0, "wait:1": 9.0, "commit": 9.0}
    assert computing_s(timing) == 3.5


def test_codecs_that_do_not_follow_are_named_and_never_change():
    codecs = LinkCodecs(replace(OPTIONS, rules=None), NUM_LINKS, 0)
    records, rows = played(codecs, [9.0, 9.0, 9.0])
    assert rows == [[], [], []]
    assert specs(records[-1]) == [UP[1], DOWN[1], UP[1], DOWN[1], RAW]
    assert (codecs.saved(), codecs.start_rows()) == ({}, [])


def test_a_resumed_run_goes_on_with_the_codecs_that_were_in_force_and_still_exist(lowered):
    saved = json.loads(json.dumps(lowered.saved()))
    resumed = LinkCodecs(replace(OPTIONS, saved=saved), NUM_LINKS, 3)
    assert resumed.start_rows() == LOWERED
    assert resumed.saved() == saved
    fewer = FollowRules({**LADDERS, "gradients": Ladder(DOWN[1:], (1500, 2000))})
    assert LinkCodecs(replace(OPTIONS, rules=fewer, saved=saved), NUM_LINKS, 3).start_rows() == []
    assert LinkCodecs(replace(OPTIONS, saved=saved), 1, 3).start_rows() == []


@pytest.mark.parametrize("saved", [{"links": 3}, {"links": [{"link": 0}]}, {"loss_average": 1.0}])
def test_state_that_no_checkpoint_would_keep_is_refused(saved):
    with pytest.raises(SnapshotError, match=r"wire\.follow=false"):
        LinkCodecs(replace(OPTIONS, saved=saved), NUM_LINKS, 3)


@pytest.fixture
def metrics(tmp_path):
    """metrics.jsonl of a run that lowered bits, and raised them again."""
    records, _ = played(LinkCodecs(OPTIONS, NUM_LINKS, 0), [0.4, 0.4, 2.0, *[0.01] * 12])
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(step_object(record)) + "\n" for record in records))
    return path, records


def test_a_recorded_run_is_repeated_whatever_is_measured_also_from_its_middle(metrics):
    path, records = metrics
    options = replace(OPTIONS, replay=recorded_codecs(path))
    repeated, rows = played(LinkCodecs(options, NUM_LINKS, 0), [0.4] * 15)
    assert [specs(record) for record in repeated] == [specs(record) for record in records]
    assert rows[2] == LOWERED
    assert {change.reason for record in repeated for change in record.codec_changes} == {"replay"}
    late = LinkCodecs(options, NUM_LINKS, 3)
    assert late.start_rows() == LOWERED
    beyond, _ = played(late, [0.4] * 15, first=4)
    assert specs(beyond[-1]) == specs(records[-1])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        *(
            (f"{line}\n", r".*metrics\.jsonl:1 does not have the codecs of a step")
            for line in ("no json", '{"step": 1}', '{"step": 1, "links": [{"link": 0}]}', "[]", "7")
        ),
        ("", ".* has no steps"),
        ('{"step": 1, "li', ".* has no steps"),
        (None, ".*cannot read"),
    ],
)
def test_file_that_is_not_a_record_is_refused(tmp_path, text, reason):
    path = tmp_path / "metrics.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=rf"wire\.replay: {reason}"):
        recorded_codecs(path)


def test_a_record_whose_last_line_was_cut_is_that_of_the_steps_before(metrics):
    path, records = metrics
    path.write_text(path.read_text()[:-10])
    assert list(recorded_codecs(path)) == [record.step for record in records[:-1]]
