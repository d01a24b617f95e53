"""Which resource limits a step, in one sentence.

Resources are what one micro-batch after the other goes through: a stage's compute, the threads beside it that code, a
host's uplink (which all it sends shares), and the coordinator. A step cannot be shorter than what one of them needs,

    least = (until the first micro-batch gets there) + busy + (from the last one to the end of the step),

with the measured times of one micro-batch everywhere else. The resource with the largest `least` is the bottleneck if
that, together with the work done once per step (optimizer, data), explains the step. Otherwise latency limits the step:
micro-batches are in transit, or a stage may hold no more of them. The share reported is busy / step. Pure functions.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from tahq.coordinator.observer import LinkRecord, StepRecord, Traffic
from tahq.observe import figures

Advise = Callable[[StepRecord], str]
"""What would shorten steps like this one, as the rest of a sentence; simulated, which takes up to a few seconds."""

Kind = Literal["compute", "codec", "link", "coordinator"]

MAIN_FLOW = 0.8
"""Share of an uplink's time from which on it is named by the one link and direction."""
EXPLAINS = 0.7
"""Share of a step that a resource and what is done once a step must account for."""
MEMORY_SHARE = 0.1
"""Share of a step that a stage waits for room before memory is what is named."""
WORTH_FILLING = 0.85
"""busy / least below which filling and draining the pipeline is mentioned."""


@dataclass(frozen=True, slots=True)
class Flow:
    """What one stage sends another in one direction, over however many links."""

    sender: int
    receiver: int
    traffic: Traffic
    wire_s: float
    frames: int

    @property
    def name(self) -> str:
        """``link 2→1, gradients``."""
        return f"link {self.sender}→{self.receiver}, {self.traffic}"

    @property
    def each_s(self) -> float:
        """Of one micro-batch."""
        return self.wire_s / self.frames if self.frames else 0.0


@dataclass(frozen=True, slots=True)
class Resource:
    """Something that one micro-batch after the other needs, and how long in a step."""

    kind: Kind
    name: str
    busy_s: float
    least_s: float


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The limit of a step and the share of the step that it takes, as a sentence and in brief."""

    kind: Kind | Literal["memory", "latency"]
    share: float
    sentence: str
    brief: str
    """For a table: ``link 2→1 gradients 71 %``."""


def diagnose(step: StepRecord) -> Diagnosis | None:
    """What a step, or the medians of several (`median_step`), waits for; None if nothing was measured."""
    if step.step_time_s <= 0 or not any(stage.split.compute_s > 0 for stage in step.stages):
        return None
    resources = sorted(resources_of(step), key=lambda resource: resource.least_s, reverse=True)
    top = resources[0]
    # the work that is done once per step, with nothing beside it
    once_s = max(s.split.data_s + s.split.optimizer_s + s.split.snapshot_s + s.split.other_s for s in step.stages)
    if top.least_s + (0.0 if top.kind == "coordinator" else once_s) < EXPLAINS * step.step_time_s:
        return _latency_bound(step, max(resources, key=lambda resource: resource.busy_s))
    share = top.busy_s / step.step_time_s
    sentence = f"{top.name} is the bottleneck: {figures.share(share)} of the step{_filling(top, share)}"
    return Diagnosis(top.kind, share, sentence, _brief(top.name, share))


def limit_and_advice(step: StepRecord, advise: Advise | None) -> str:
    """The limit of a step, and what would shorten it most, in one sentence; empty: nothing was measured."""
    diagnosis = diagnose(step)
    if diagnosis is None:
        return ""
    advice = "" if advise is None else advise(step)
    return f"{diagnosis.sentence}; {advice}" if advice else diagnosis.sentence


def _filling(top: Resource, share: float) -> str:
    if top.busy_s == 0 or top.busy_s >= WORTH_FILLING * top.least_s:
        return ""
    return f"; filling and draining the pipeline takes {figures.share(share * (top.least_s / top.busy_s - 1))}"


def _latency_bound(step: StepRecord, busiest: Resource) -> Diagnosis:
    share = busiest.busy_s / step.step_time_s
    crowded = max(step.stages, key=lambda stage: stage.split.wait_memory_s)
    room = crowded.split.wait_memory_s / step.step_time_s
    if room >= MEMORY_SHARE:
        sentence = (
            f"stage {crowded.stage} waits for room for {figures.share(room)} of the step: as many micro-batches as it "
            f"may hold are in flight"
        )
        return Diagnosis("memory", room, sentence, f"room on stage {crowded.stage} {figures.share(room)}")
    sentence = (
        f"no resource is saturated: {busiest.name}, the busiest, is busy for {figures.share(share)} of the step, "
        f"and for the rest micro-batches or the commit are in transit"
    )
    return Diagnosis("latency", share, sentence, f"latency, all below {figures.share(share)}")


def _brief(name: str, share: float) -> str:
    return f"{name.partition(' (')[0].replace(',', '')} {figures.share(share)}"


# -- resources -----------------------------------------------------------------------------------


def flows_of(links: Sequence[LinkRecord]) -> list[Flow]:
    """The links' traffic by sender, receiver and kind; where a transport does not measure `wire_s`, by `sending_s`."""
    flows: dict[tuple[int, int, Traffic], Flow] = {}
    for link in links:
        key = (link.sender, link.receiver, link.direction)
        old = flows.get(key, Flow(*key, 0.0, 0))
        flows[key] = Flow(*key, old.wire_s + (link.wire_s or link.sending_s), old.frames + link.frames)
    return list(flows.values())


def resources_of(step: StepRecord) -> list[Resource]:
    """Everything that a step may wait for."""
    flows, stages = flows_of(step.links), step.stages
    units = max((flow.frames for flow in flows), default=1)
    forward_s = [stage.split.forward_s / units for stage in stages]
    backward_s = [stage.split.backward_s / units for stage in stages]
    crossing_s: dict[tuple[int, int, Traffic], float] = defaultdict(float)
    crossing_s.update({(flow.sender, flow.receiver, flow.traffic): flow.each_s for flow in flows})
    firsts = list[int]()  # of the pipeline, by stage; replicas send each other no activations
    for s in range(len(stages)):
        firsts.append(firsts[-1] if (s - 1, s, "activations") in crossing_s else s)
    there_s = [forward_s[s] + crossing_s[s, s + 1, "activations"] for s in range(len(stages))]
    back_s = [backward_s[s] + crossing_s[s + 1, s, "gradients"] for s in range(len(stages))]
    # until the first micro-batch is at a stage, and from the end of its last backward to the last one of all
    before_s, after_s = ([sum(parts[firsts[s] : s]) for s in range(len(stages))] for parts in (there_s, back_s))

    def beyond_s(first: int) -> float:
        """From a first stage's last activation on the wire to the end: all the way there and back."""
        last = max(s for s in range(len(stages)) if firsts[s] == first)
        return sum(there_s[first + 1 : last]) + forward_s[last] + backward_s[last] + after_s[last]

    def stage_resource(kind: Kind, stage: int, what: str, busy_s: float) -> Resource:
        return Resource(kind, f"stage {stage}'s {what}", busy_s, before_s[stage] + busy_s + after_s[stage])

    computes, coding, uplinks = [], [], []
    for stage in stages:
        number, split = stage.stage, stage.split
        busy_s = split.compute_s + split.encode_s + split.decode_s
        computes.append(stage_resource("compute", number, "compute", busy_s))
        beside_s = max(split.beside_s.get("encode", 0.0), split.beside_s.get("decode", 0.0))
        if beside_s > 0:
            coding.append(stage_resource("codec", number, "encoding and decoding", beside_s))
        sent = sorted((flow for flow in flows if flow.sender == number), key=lambda flow: -flow.wire_s)
        if sent:
            gradients_s = sum(flow.each_s for flow in sent if flow.traffic == "gradients")
            drain_s = beyond_s(number) if firsts[number] == number else after_s[number] - gradients_s
            uplinks.append(_uplink(number, sent, before_s[number] + forward_s[number], drain_s))
    commit_s = min(stage.split.commit_s for stage in stages)
    coordinator = Resource("coordinator", "the round trip to the coordinator", commit_s, commit_s)
    return [*computes, *coding, *uplinks, coordinator]


def _uplink(stage: int, flows: Sequence[Flow], fill_s: float, drain_s: float) -> Resource:
    """An uplink that these flows share, the largest first; named by that one if it takes nearly all of it."""
    busy_s = sum(flow.wire_s for flow in flows)
    parts = (f"{figures.share(f.wire_s / busy_s)} {f.traffic} to stage {f.receiver}" for f in flows)
    is_one = flows[0].wire_s >= MAIN_FLOW * busy_s
    name = flows[0].name if is_one else f"stage {stage}'s uplink ({', '.join(parts)})"
    return Resource("link", name, busy_s, fill_s + busy_s + max(0.0, drain_s))
