"""What a step needs, and for how long: the resources that one micro-batch after the other goes through.

They are a stage's compute, the threads beside it that code, a host's uplink (which all it sends shares), and the
coordinator. A step cannot be shorter than what one of them needs alone,

    least = (until the first micro-batch gets there) + busy + (from the last one to the end of the step),

with what one micro-batch takes everywhere else as measured. Pure.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tahq.coordinator.observer import LinkRecord, StepRecord, Traffic
from tahq.observe import figures

Kind = Literal["compute", "codec", "link", "coordinator"]

MAIN_FLOW = 0.8
"""Share of an uplink's time from which on it is named by the one link and direction."""


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


def flows_of(links: Sequence[LinkRecord]) -> list[Flow]:
    """The links' traffic by sender, receiver and kind; where a transport tells no `wire_s`, by `sending_s`."""
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
