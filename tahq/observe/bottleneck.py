"""Which resource a step waits for, and what would change it: the split of a step as one sentence.

The resource with the largest `least` (`resources.py`) is the bottleneck if it explains the step, together with what is
done once a step (optimizer, data). If nothing does, nobody is busy: micro-batches are on their way, and more of
them at a time would fill the wait, unless a stage has no room for more.

The share that is told is busy / step. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
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
    "eden": tuple(f"eden:bits={bits}" for bits in range(8, 0, -1)),
    "wf": tuple(f"wf:bits={bits}" for bits in range(8, 0, -1)),
    "fixed": tuple(f"fixed:bits={bits}" for bits in (12, 10, 8, 7, 6, 5, 4, 3, 2)),
}
"""Codecs from dear to cheap; `fixed` is only offered to those who use it."""


@dataclass(frozen=True, slots=True)
class WireFacts:
    """What the run's configuration says about the wire: codecs by direction, and the shape [B, S, C] of a frame."""

    activations: str
    gradients: str
    shape: tuple[int, int, int]

    def codec(self, flow: Flow) -> str:
        """The spec of what packs this; the configuration's where the step does not say."""
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
    once_s = _once_s(step) if top.kind != "coordinator" else 0.0
    if top.least_s + once_s < EXPLAINS * step.step_time_s:
        return _nobody_is_busy(step, max(resources, key=lambda resource: resource.busy_s))
    rest = max((r for r in resources if r is not top), key=lambda resource: resource.busy_s, default=None)
    advice = _ADVICE[top.kind](step, top, rest, facts)
    share = top.busy_s / step.step_time_s
    filling = _filling(top, share)
    sentence = f"{top.name} is the bottleneck: {figures.share(share)} of the step; {advice}{filling}"
    return Diagnosis(top.kind, share, sentence, _brief(top.name, share))


def _once_s(step: StepRecord) -> float:
    """What is done once a step and nothing else runs beside."""
    splits = [stage.split for stage in step.stages]
    return max(s.data_s + s.optimizer_s + s.snapshot_s + s.other_s for s in splits)


# -- what would change it ------------------------------------------------------------------------


def _compute_advice(step: StepRecord, top: Resource, rest: Resource | None, facts: WireFacts | None) -> str:
    times = [stage.split.compute_s for stage in step.stages]
    if len(times) > 1 and min(times) >= EVEN * max(times):
        return "all stages compute about as long, so faster machines or more of them would help"
    if len(times) == 1:
        return "a faster machine, or more stages, would help"
    return f"fewer layers there (`pipeline.layers`) would help{_until(step, rest)}"


def _codec_advice(step: StepRecord, top: Resource, rest: Resource | None, facts: WireFacts | None) -> str:
    return f"more `wire.threads`, or a codec that computes less, would help{_until(step, rest)}"


def _coordinator_advice(step: StepRecord, top: Resource, rest: Resource | None, facts: WireFacts | None) -> str:
    return f"more work a step (`training.global_batch`) or a coordinator nearer by would help{_until(step, rest)}"


def _until(step: StepRecord, rest: Resource | None) -> str:
    if rest is None or rest.busy_s <= 0:
        return ""
    return f", until {rest.name}, busy for {figures.share(rest.busy_s / step.step_time_s)}, is next"


def _link_advice(step: StepRecord, top: Resource, rest: Resource | None, facts: WireFacts | None) -> str:
    """A codec is chosen for all links that carry the same, so all of them are looked at."""
    if facts is None or top.flow is None:
        return "fewer bits or a higher rate would help"
    traffic, flows = top.flow.traffic, flows_of(step.links)
    ladder = cheaper_codecs(facts, top.flow)
    others = [resource for resource in resources_of(step) if resource.kind != "link"]
    busiest = max(others, key=lambda resource: resource.busy_s)
    for spec, ratio in ladder:
        if busiest_uplink_s(flows, traffic, ratio) <= busiest.busy_s:
            return f"`{spec}` would make it {_BOUND[busiest.kind]}"
    untouched = max((f for f in flows if f.traffic != traffic), key=lambda flow: flow.wire_s, default=None)
    for spec, ratio in ladder:
        if untouched is not None and busiest.busy_s < top.flow.wire_s * ratio <= untouched.wire_s:
            share = figures.share(untouched.wire_s / step.step_time_s)
            return f"`{spec}` would bring it below {untouched.name}, which has the wire for {share}"
    if not ladder:
        present = CodecSpec.parse(facts.codec(top.flow)).brief()
        return f"no codec is cheaper than `{present}`, so only a higher rate would help"
    spec, ratio = ladder[-1]
    left = figures.share(busiest_uplink_s(flows, traffic, ratio) / step.step_time_s)
    return f"even `{spec}` would leave an uplink busy for {left} of what is now a step; a higher rate would help"


def busiest_uplink_s(flows: Sequence[Flow], traffic: Traffic, ratio: float) -> float:
    """The busiest uplink's seconds if this traffic had `ratio` times its bytes."""
    busy_s: dict[int, float] = {}
    for flow in flows:
        factor = ratio if flow.traffic == traffic else 1.0
        busy_s[flow.sender] = busy_s.get(flow.sender, 0.0) + factor * flow.wire_s
    return max(busy_s.values(), default=0.0)


def cheaper_codecs(facts: WireFacts, flow: Flow) -> list[tuple[str, float]]:
    """Codecs of the ladder that are cheaper than what a flow was packed with: spec, and bytes over present bytes.

    Dearest first.
    """
    present = CodecSpec.parse(facts.codec(flow))
    family = "fixed" if present.name == "fixed" else "eden" if flow.traffic == "gradients" else "wf"
    nbytes = flow.payload_bytes / flow.frames
    ratios = ((spec, _frame_nbytes(spec, facts.shape) / nbytes) for spec in LADDERS[family])
    return [(spec, ratio) for spec, ratio in ratios if ratio < 1]


@cache
def _frame_nbytes(spec: str, shape: tuple[int, ...]) -> int:
    return get_codec(spec).encoded_nbytes(shape)


def _filling(top: Resource, share: float) -> str:
    if top.busy_s >= WORTH_FILLING * top.least_s:
        return ""
    rest = figures.share(share * (top.least_s / top.busy_s - 1)) if top.busy_s > 0 else ""
    return f"; filling and draining the pipeline takes {rest}: more micro-batches a step would make that less"


_BOUND = {"compute": "compute-bound", "codec": "bound by its codecs", "coordinator": "bound by its commits"}
_ADVICE = {
    "compute": _compute_advice,
    "codec": _codec_advice,
    "link": _link_advice,
    "coordinator": _coordinator_advice,
}


def _nobody_is_busy(step: StepRecord, busiest: Resource) -> Diagnosis:
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
        f"nobody is busy: {busiest.name}, the busiest, is so for {figures.share(share)} of the step, and for the rest "
        f"micro-batches or the commit are on their way; {more} micro-batches a step would fill it"
    )
    return Diagnosis("latency", share, sentence, f"latency, all below {figures.share(share)}")


def _brief(name: str, share: float) -> str:
    return f"{name.partition(' (')[0].replace(',', '')} {figures.share(share)}"
