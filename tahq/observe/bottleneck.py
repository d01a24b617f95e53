"""Which resource limits a step, and what would help, in one sentence.

Resources are what one micro-batch after the other goes through: a stage's compute, the threads beside it that code, a
host's uplink (which all it sends shares), and the coordinator. A step cannot be shorter than what one of them needs,

    least = (until the first micro-batch gets there) + busy + (from the last one to the end of the step),

with the measured times of one micro-batch everywhere else. The resource with the largest `least` is the bottleneck if
that, together with the work done once per step (optimizer, data), explains the step. Otherwise latency limits the step:
micro-batches are in transit, and more of them in flight would fill the wait, unless a stage has no memory for more. The
share reported is busy / step.

If an uplink is the bottleneck, codecs are named that would make it less busy than the next resource. A codec is chosen
for all links that carry the same traffic, so all uplinks are computed with it: first with another codec for one
direction, that of the uplink's largest flow before the other, then for both directions together. Of the codecs that
suffice the one with most bits is named. Pure functions.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Literal

from tahq.coordinator.observer import LinkRecord, StepRecord, Traffic
from tahq.observe import figures
from tahq.quant import CodecSpec, get_codec

Kind = Literal["compute", "codec", "link", "coordinator"]

MAIN_FLOW = 0.8
"""Share of an uplink's time from which on it is named by the one link and direction."""
EXPLAINS = 0.7
"""Share of a step that a resource and what is done once a step must account for."""
MEMORY_SHARE = 0.1
"""Share of a step that a stage waits for room before memory is what is named."""
EVEN = 0.9
"""Stages whose compute is this share of the longest are called even."""
WORTH_FILLING = 0.85
"""busy / least below which filling and draining the pipeline is mentioned."""

LADDERS = {
    "eden": tuple(f"eden:bits={bits}" for bits in range(5, 0, -1)),
    "wf": tuple(f"wf:bits={bits}" for bits in range(8, 0, -1)),
    "fixed": tuple(f"fixed:bits={bits}" for bits in (12, 10, 8, 7, 6, 5, 4, 3, 2)),
}
"""Codecs from most to fewest bits. `eden` wastes more than 5; `fixed` is only offered to runs that use it."""


@dataclass(frozen=True, slots=True)
class Flow:
    """What one stage sends another in one direction, over however many links."""

    sender: int
    receiver: int
    traffic: Traffic
    wire_s: float
    frames: int
    payload_bytes: int
    codec: str = ""
    """Its codec; empty if unknown."""

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
    flow: Flow | None = None
    """The largest of an uplink's."""


@dataclass(frozen=True, slots=True)
class WireFacts:
    """The configured codecs by direction, and the shape [B, S, C] of a frame."""

    activations: str
    gradients: str
    shape: tuple[int, int, int]

    def codec(self, flow: Flow) -> str:
        """The codec of a flow; the configured one if the step does not say."""
        return flow.codec or (self.activations if flow.traffic == "activations" else self.gradients)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The limit of a step and the share of the step that it takes, as a sentence with a remedy, and in brief."""

    kind: Kind | Literal["memory", "latency"]
    share: float
    sentence: str
    brief: str
    """For a table: ``link 2→1 gradients 71 %``."""


def diagnose(step: StepRecord, facts: WireFacts | None = None) -> Diagnosis | None:
    """What a step, or the medians of several (`median_step`), waits for; None if its stages have not measured anything.

    Without `facts` no codec is named.
    """
    if step.step_time_s <= 0 or not any(stage.split.compute_s > 0 for stage in step.stages):
        return None
    resources = sorted(resources_of(step), key=lambda resource: resource.least_s, reverse=True)
    top = resources[0]
    # the work that is done once per step, with nothing beside it
    once_s = max(s.split.data_s + s.split.optimizer_s + s.split.snapshot_s + s.split.other_s for s in step.stages)
    if top.least_s + (0.0 if top.kind == "coordinator" else once_s) < EXPLAINS * step.step_time_s:
        return _latency_bound(step, max(resources, key=lambda resource: resource.busy_s))
    rest = max((r for r in resources if r is not top), key=lambda resource: resource.busy_s, default=None)
    advice = _advice(step, top, rest, facts)
    share = top.busy_s / step.step_time_s
    filling = _filling(top, share)
    sentence = f"{top.name} is the bottleneck: {figures.share(share)} of the step; {advice}{filling}"
    return Diagnosis(top.kind, share, sentence, _brief(top.name, share))


# -- what would change it ------------------------------------------------------------------------


def _advice(step: StepRecord, top: Resource, rest: Resource | None, facts: WireFacts | None) -> str:
    """What would make the busiest resource less busy, and which one would be next."""
    if top.kind == "link":
        if facts is None or top.flow is None:
            return "fewer bits or a higher rate would help"
        return codec_advice(step, top.flow.sender, facts)
    times = [stage.split.compute_s for stage in step.stages]
    if top.kind == "compute" and len(times) == 1:
        return "a faster machine, or more stages, would help"
    if top.kind == "compute" and min(times) >= EVEN * max(times):
        return "all stages compute about as long, so faster machines or more of them would help"
    # a busier one is not next: it hides behind the filling and draining of `top`
    until = ""
    if rest is not None and 0 < rest.busy_s < top.busy_s:
        until = f", until {rest.name}, busy for {figures.share(rest.busy_s / step.step_time_s)}, is next"
    return f"{_REMEDIES[top.kind]} would help{until}"


def _filling(top: Resource, share: float) -> str:
    if top.busy_s >= WORTH_FILLING * top.least_s:
        return ""
    rest = figures.share(share * (top.least_s / top.busy_s - 1)) if top.busy_s > 0 else ""
    return f"; filling and draining the pipeline takes {rest}: more micro-batches per step would reduce that"


_REMEDIES = {
    "compute": "fewer layers there (`pipeline.layers`)",
    "codec": "more `wire.threads`, or a codec that computes less,",
    "coordinator": "more work per step (`training.global_batch`) or a nearer coordinator",
}


def _latency_bound(step: StepRecord, busiest: Resource) -> Diagnosis:
    share = busiest.busy_s / step.step_time_s
    crowded = max(step.stages, key=lambda stage: stage.split.wait_memory_s)
    room = crowded.split.wait_memory_s / step.step_time_s
    if room >= MEMORY_SHARE:
        sentence = (
            f"stage {crowded.stage} waits for room for {figures.share(room)} of the step: as many micro-batches as it "
            f"may hold are in flight; a greater `pipeline.in_flight`, if its memory allows, would fill the wait"
        )
        return Diagnosis("memory", room, sentence, f"room on stage {crowded.stage} {figures.share(room)}")
    more = "a greater `pipeline.in_flight` or more" if room > 0 else "more"
    sentence = (
        f"no resource is saturated: {busiest.name}, the busiest, is busy for {figures.share(share)} of the step, "
        f"and for the rest micro-batches or the commit are in transit; {more} micro-batches per step would fill it"
    )
    return Diagnosis("latency", share, sentence, f"latency, all below {figures.share(share)}")


def _brief(name: str, share: float) -> str:
    return f"{name.partition(' (')[0].replace(',', '')} {figures.share(share)}"


# -- codecs that would help an uplink ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Choice:
    """Other codecs: their specs, and by traffic their bytes relative to the present ones."""

    specs: tuple[str, ...]
    ratios: Mapping[Traffic, float]

    def __str__(self) -> str:
        return " with ".join(f"`{spec}`" for spec in self.specs)


def codec_advice(step: StepRecord, sender: int, facts: WireFacts) -> str:
    """Which codecs of the ladders would make a stage's uplink less busy than another resource, in words."""
    flows = flows_of(step.links)
    by_size = sorted((flow for flow in flows if flow.sender == sender), key=lambda flow: flow.wire_s)
    # the largest flow of each kind of traffic, the largest of all first
    largest = sorted({flow.traffic: flow for flow in by_size}.values(), key=lambda flow: -flow.wire_s)
    ladders = {flow.traffic: cheaper_codecs(facts, flow) for flow in largest}
    alone = [Choice((spec,), {traffic: ratio}) for traffic, ladder in ladders.items() for spec, ratio in ladder]
    together = _together(ladders) if len(ladders) > 1 else []
    for choices in (alone, together):
        advice = _first_enough(choices, step, flows, sender)
        if advice is not None:
            return advice
    if not alone:
        present = " and ".join(f"`{CodecSpec.parse(facts.codec(flow)).brief()}`" for flow in largest)
        return f"no codec is cheaper than {present}, so only a higher rate would help"
    cheapest = min([*alone, *together], key=lambda choice: busiest_uplink_s(flows, choice.ratios))
    left = figures.share(busiest_uplink_s(flows, cheapest.ratios) / step.step_time_s)
    return f"even {cheapest} would leave an uplink busy for {left} of the present step; a higher rate would help"


def _together(ladders: Mapping[Traffic, Sequence[tuple[str, float]]]) -> list[Choice]:
    """A codec for each of several kinds of traffic; first those whose most reduced traffic is reduced least."""
    choices = [
        Choice(tuple(spec for spec, _ in rungs), {t: ratio for t, (_, ratio) in zip(ladders, rungs, strict=True)})
        for rungs in product(*ladders.values())
    ]
    return sorted(choices, key=lambda choice: (-min(choice.ratios.values()), -sum(choice.ratios.values())))


def _first_enough(choices: Sequence[Choice], step: StepRecord, flows: Sequence[Flow], sender: int) -> str | None:
    """The first after which no uplink is the busiest; failing that, the first after which another uplink is."""
    resources = resources_of(step)
    rest = max((r for r in resources if r.kind != "link"), key=lambda resource: resource.busy_s)
    for choice in choices:
        if busiest_uplink_s(flows, choice.ratios) <= rest.busy_s:
            return f"{choice} would make it {_BOUND[rest.kind]}"
    names = {r.flow.sender: r.name.partition(" (")[0] for r in resources if r.flow is not None}
    for choice in choices:
        busy_s = uplinks_s(flows, choice.ratios)
        own_s = busy_s.pop(sender)
        other = max(busy_s, key=busy_s.__getitem__, default=None)
        if other is not None and own_s <= busy_s[other]:
            share = figures.share(busy_s[other] / step.step_time_s)
            return f"{choice} would bring it below {names[other]}, which is then busy for {share} of the present step"
    return None


def uplinks_s(flows: Sequence[Flow], ratios: Mapping[Traffic, float]) -> dict[int, float]:
    """Each sender's seconds on the wire if traffic had these multiples of its bytes."""
    busy_s: dict[int, float] = defaultdict(float)
    for flow in flows:
        busy_s[flow.sender] += ratios.get(flow.traffic, 1.0) * flow.wire_s
    return busy_s


def busiest_uplink_s(flows: Sequence[Flow], ratios: Mapping[Traffic, float]) -> float:
    """The seconds of the busiest sender."""
    return max(uplinks_s(flows, ratios).values(), default=0.0)


def cheaper_codecs(facts: WireFacts, flow: Flow) -> list[tuple[str, float]]:
    """Codecs of the ladder with shorter frames than a flow's: spec, and bytes over present bytes; the longest first."""
    present = CodecSpec.parse(facts.codec(flow))
    family = "fixed" if present.name == "fixed" else "eden" if flow.traffic == "gradients" else "wf"
    nbytes = flow.payload_bytes / flow.frames
    ratios = ((spec, _frame_nbytes(spec, facts.shape) / nbytes) for spec in LADDERS[family])
    return [(spec, ratio) for spec, ratio in ratios if ratio < 1]


@cache
def _frame_nbytes(spec: str, shape: tuple[int, ...]) -> int:
    return get_codec(spec).encoded_nbytes(shape)


_BOUND = {"compute": "compute-bound", "codec": "bound by its codecs", "coordinator": "bound by its commits"}


# -- resources -----------------------------------------------------------------------------------


def flows_of(links: Sequence[LinkRecord]) -> list[Flow]:
    """The links' traffic by sender, receiver and kind; where a transport does not measure `wire_s`, by `sending_s`."""
    flows: dict[tuple[int, int, Traffic], Flow] = {}
    for link in links:
        key = (link.sender, link.receiver, link.direction)
        old = flows.get(key, Flow(*key, 0.0, 0, 0))
        wire_s = old.wire_s + (link.wire_s or link.sending_s)
        frames, nbytes = old.frames + link.frames, old.payload_bytes + link.payload_bytes
        flows[key] = Flow(*key, wire_s, frames, nbytes, link.codec or old.codec)
    return list(flows.values())


def resources_of(step: StepRecord) -> list[Resource]:
    """Everything that a step may wait for."""
    flows, stages = flows_of(step.links), step.stages
    units = max((flow.frames for flow in flows), default=1)
    forward_s = [stage.split.forward_s / units for stage in stages]
    backward_s = [stage.split.backward_s / units for stage in stages]
    crossing_s: dict[tuple[int, int, Traffic], float] = defaultdict(float)
    crossing_s.update({(flow.sender, flow.receiver, flow.traffic): flow.each_s for flow in flows})
    there_s = [forward_s[s] + crossing_s[s, s + 1, "activations"] for s in range(len(stages))]
    back_s = [backward_s[s] + crossing_s[s + 1, s, "gradients"] for s in range(len(stages))]
    # until the first micro-batch is at a stage, and from the end of its last backward to the last one of all
    before_s, after_s = ([sum(parts[:s]) for s in range(len(stages))] for parts in (there_s, back_s))
    # from the first stage's last activation on the wire to the end: all the way there and back
    beyond_s = sum(there_s[1:-1]) + forward_s[-1] + backward_s[-1] + after_s[-1]

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
            drain_s = after_s[number] - gradients_s if number else beyond_s
            uplinks.append(_uplink(number, sent, before_s[number] + forward_s[number], drain_s))
    commit_s = min(stage.split.commit_s for stage in stages)
    coordinator = Resource("coordinator", "the round trip to the coordinator", commit_s, commit_s)
    return [*computes, *coding, *uplinks, coordinator]


def _uplink(stage: int, flows: Sequence[Flow], fill_s: float, drain_s: float) -> Resource:
    """An uplink that these flows share, the largest first; named by that one if it takes nearly all of it."""
    busy_s = sum(flow.wire_s for flow in flows)
    parts = (f"{f.traffic} to {f.receiver} {figures.share(f.wire_s / busy_s)} of it" for f in flows)
    is_one = flows[0].wire_s >= MAIN_FLOW * busy_s
    name = flows[0].name if is_one else f"stage {stage}'s uplink ({', '.join(parts)})"
    return Resource("link", name, busy_s, fill_s + busy_s + max(0.0, drain_s), flows[0])
