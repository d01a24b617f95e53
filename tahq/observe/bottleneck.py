"""Which resource limits a step, and what would help, in one sentence.

The resource with the largest lower bound `least_s` (`resources.py`) is the bottleneck if that bound, together with the
work done once per step (optimizer, data), explains the step. Otherwise latency limits the step: micro-batches are in
transit, and more of them in flight would fill the wait, unless a stage has no memory for more.

The share reported is busy / step. Pure functions.
"""

from dataclasses import dataclass
from typing import Literal

from tahq.coordinator.observer import StepRecord
from tahq.observe import figures
from tahq.observe.codec_advice import WireFacts, codec_advice
from tahq.observe.resources import Kind, Resource, flows_of, resources_of

__all__ = ["Diagnosis", "WireFacts", "diagnose"]

EXPLAINS = 0.7
"""Share of a step that a resource and what is done once a step must account for."""
MEMORY_SHARE = 0.1
"""Share of a step that a stage waits for room before memory is what is named."""
EVEN = 0.9
"""Stages whose compute is this share of the longest are called even."""
WORTH_FILLING = 0.85
"""busy / least below which filling and draining the pipeline is mentioned."""


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
        return _latency_bound(step, max(resources, key=lambda resource: resource.busy_s))
    rest = max((r for r in resources if r is not top), key=lambda resource: resource.busy_s, default=None)
    advice = _advice(step, top, rest, facts)
    share = top.busy_s / step.step_time_s
    filling = _filling(top, share)
    sentence = f"{top.name} is the bottleneck: {figures.share(share)} of the step; {advice}{filling}"
    return Diagnosis(top.kind, share, sentence, _brief(top.name, share))


def _once_s(step: StepRecord) -> float:
    """What is done once a step and nothing else runs beside."""
    splits = [stage.split for stage in step.stages]
    return max(s.data_s + s.optimizer_s + s.snapshot_s + s.other_s for s in splits)


# -- what would change it ------------------------------------------------------------------------


def _advice(step: StepRecord, top: Resource, rest: Resource | None, facts: WireFacts | None) -> str:
    """What would make the busiest resource less so, and what would be next."""
    if top.kind == "link":
        if facts is None or top.flow is None:
            return "fewer bits or a higher rate would help"
        return codec_advice(resources_of(step), flows_of(step.links), top.flow.sender, facts, step.step_time_s)
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
