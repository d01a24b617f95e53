"""Which codecs would make an uplink less busy than what comes next.

A codec is chosen for all links that carry the same, so all uplinks are reckoned with it. First one direction's codec is
looked at, of the largest flow of the uplink before the other, then both directions' together; of those that are
cheap enough the dearest is named. Pure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

from tahq.coordinator.observer import Traffic
from tahq.observe import figures
from tahq.observe.resources import Flow, Resource
from tahq.quant import CodecSpec, get_codec

LADDERS = {
    "eden": tuple(f"eden:bits={bits}" for bits in range(8, 0, -1)),
    "wf": tuple(f"wf:bits={bits}" for bits in range(8, 0, -1)),
    "fixed": tuple(f"fixed:bits={bits}" for bits in (12, 10, 8, 7, 6, 5, 4, 3, 2)),
}
"""Codecs from most to fewest bits; `fixed` is only offered to runs that use it."""


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
class Choice:
    """Other codecs: their specs, and by what they carry the bytes that they take over the present ones."""

    specs: tuple[str, ...]
    ratios: Mapping[Traffic, float]

    def __str__(self) -> str:
        return " with ".join(f"`{spec}`" for spec in self.specs)


def codec_advice(
    resources: Sequence[Resource], flows: Sequence[Flow], sender: int, facts: WireFacts, step_time_s: float
) -> str:
    """What of the ladders would make the uplink of one stage less busy than another resource, in words.

    Args:
        resources: all of the step.
        flows: all of the step.
        sender: the stage; it sends something.
        facts: the codecs there are now.
        step_time_s: to say shares of.
    """
    by_size = sorted((flow for flow in flows if flow.sender == sender), key=lambda flow: flow.wire_s)
    # the largest flow of each kind of traffic, the largest of all first
    largest = sorted({flow.traffic: flow for flow in by_size}.values(), key=lambda flow: -flow.wire_s)
    ladders = {flow.traffic: cheaper_codecs(facts, flow) for flow in largest}
    alone = [Choice((spec,), {traffic: ratio}) for traffic, ladder in ladders.items() for spec, ratio in ladder]
    together = _together(ladders) if len(ladders) > 1 else []
    for choices in (alone, together):
        advice = _first_enough(choices, resources, flows, sender, step_time_s)
        if advice is not None:
            return advice
    if not alone:
        present = " and ".join(f"`{CodecSpec.parse(facts.codec(flow)).brief()}`" for flow in largest)
        return f"no codec is cheaper than {present}, so only a higher rate would help"
    cheapest = min([*alone, *together], key=lambda choice: busiest_uplink_s(flows, choice.ratios))
    left = figures.share(busiest_uplink_s(flows, cheapest.ratios) / step_time_s)
    return f"even {cheapest} would leave an uplink busy for {left} of what is now a step; a higher rate would help"


def _together(ladders: Mapping[Traffic, Sequence[tuple[str, float]]]) -> list[Choice]:
    """A codec for each of several kinds of traffic; the less the one that loses most loses, the earlier."""
    choices = [
        Choice(tuple(spec for spec, _ in rungs), {t: ratio for t, (_, ratio) in zip(ladders, rungs, strict=True)})
        for rungs in product(*ladders.values())
    ]
    return sorted(choices, key=lambda choice: (-min(choice.ratios.values()), -sum(choice.ratios.values())))


def _first_enough(
    choices: Sequence[Choice], resources: Sequence[Resource], flows: Sequence[Flow], sender: int, step_time_s: float
) -> str | None:
    """The first after which no uplink is the busiest; if there is none, the first after which another one is."""
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
            share = figures.share(busy_s[other] / step_time_s)
            return f"{choice} would bring it below {names[other]}, which then has the wire for {share}"
    return None


def uplinks_s(flows: Sequence[Flow], ratios: Mapping[Traffic, float]) -> dict[int, float]:
    """Each sender's seconds on the wire if traffic had so many times its bytes."""
    busy_s: dict[int, float] = {}
    for flow in flows:
        busy_s[flow.sender] = busy_s.get(flow.sender, 0.0) + ratios.get(flow.traffic, 1.0) * flow.wire_s
    return busy_s


def busiest_uplink_s(flows: Sequence[Flow], ratios: Mapping[Traffic, float]) -> float:
    """The most of them."""
    return max(uplinks_s(flows, ratios).values(), default=0.0)


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


_BOUND = {"compute": "compute-bound", "codec": "bound by its codecs", "coordinator": "bound by its commits"}
