"""Which resource limits a step, and what would help, in one sentence.

The resource with the largest lower bound `least_s` (`resources.py`) is the bottleneck if that bound, together with the
work done once per step (optimizer, data), explains the step. Otherwise latency limits the step: micro-batches are in
transit, and more of them in flight would fill the wait, unless a stage has no memory for more. The share reported is
busy / step.

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

from tahq.coordinator.observer import StepRecord, Traffic
from tahq.observe import figures
from tahq.observe.resources import Flow, Kind, Resource, flows_of, resources_of
from tahq.quant import CodecSpec, get_codec

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
    """Why a step takes as long as it does.

    Attributes:
        kind: of what it waits for.
        share: of the step, for which that is busy.
        sentence: for people, with what would change it.
        brief: for a table: ``link 2→1 gradients 71 %``.
    """

    kind: Kind | Literal["memory", "latency"]
    share: float
    sentence: str
    brief: str


def diagnose(step: StepRecord, facts: WireFacts | None = None) -> Diagnosis | None:
    """What a step waits for; None where its stages have not measured anything.

    Args:
        step: one, or the medians of several (`step_split.median_step`).
        facts: to say which codec would do; None: none is named.
    """
    if step.step_time_s <= 0 or not any(stage.split.compute_s > 0 for stage in step.stages):
        return None
    resources = sorted(resources_of(step), key=lambda resource: resource.least_s, reverse=True)
    top = resources[0]
    # the work that is done once per step, beside nothing else
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
    """What would make the busiest resource less so, and what would be next."""
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
        f"and for the rest micro-batches or the commit are on their way; {more} micro-batches per step would fill it"
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
    return f"even {cheapest} would leave an uplink busy for {left} of what is now a step; a higher rate would help"


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
            return f"{choice} would bring it below {names[other]}, which then has the wire for {share}"
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
