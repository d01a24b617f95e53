"""What a step needs, and for how long: the resources that one micro-batch after the other goes through.

They are a stage's compute, the threads beside it that code, a host's uplink (which all it sends shares), and the
coordinator. A step cannot be shorter than what one of them needs alone,

    least = (until the first micro-batch gets there) + busy + (from the last one to the end of the step),

with what one micro-batch takes everywhere else as measured. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tahq.coordinator.observer import LinkRecord, StageRecord, StepRecord, Traffic
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
    pipeline = _Pipeline(step)
    computes = [_compute(stage, pipeline) for stage in step.stages]
    coding = [_coding(stage, pipeline) for stage in step.stages if _beside_s(stage) > 0]
    uplinks = [_uplink(stage.stage, pipeline) for stage in step.stages if pipeline.sent_by(stage.stage)]
    commit_s = min(stage.split.commit_s for stage in step.stages)
    coordinator = Resource("coordinator", "the round trip to the coordinator", commit_s, commit_s)
    return [*computes, *coding, *uplinks, coordinator]


class _Pipeline:
    """What one micro-batch takes in every place, as measured."""

    def __init__(self, step: StepRecord) -> None:
        self.flows = flows_of(step.links)
        units = max((flow.frames for flow in self.flows), default=1)
        self._forward_s = [stage.split.forward_s / units for stage in step.stages]
        self._backward_s = [stage.split.backward_s / units for stage in step.stages]
        self._each_s = {(flow.sender, flow.receiver, flow.traffic): flow.each_s for flow in self.flows}

    def sent_by(self, stage: int) -> list[Flow]:
        """Flows that share a stage's uplink, the largest first."""
        return sorted((f for f in self.flows if f.sender == stage), key=lambda flow: -flow.wire_s)

    def forward_s(self, stage: int) -> float:
        """Of one micro-batch, there."""
        return self._forward_s[stage]

    def before_s(self, stage: int) -> float:
        """Until the first micro-batch is there."""
        return sum(self._forward_s[s] + self._crossing_s(s, s + 1, "activations") for s in range(stage))

    def after_s(self, stage: int) -> float:
        """From the end of the last backward there to the last one of all."""
        return sum(self._backward_s[s] + self._crossing_s(s + 1, s, "gradients") for s in range(stage))

    def beyond_s(self) -> float:
        """From the first stage's last activation on the wire to the end: all the way there and back."""
        last = len(self._forward_s) - 1
        there_s = self.before_s(last) - self._forward_s[0] - self._crossing_s(0, 1, "activations")
        return there_s + self._forward_s[last] + self._backward_s[last] + self.after_s(last)

    def _crossing_s(self, sender: int, receiver: int, traffic: Traffic) -> float:
        return self._each_s.get((sender, receiver, traffic), 0.0)


def _compute(stage: StageRecord, pipeline: _Pipeline) -> Resource:
    busy_s = stage.split.compute_s + stage.split.encode_s + stage.split.decode_s
    least_s = pipeline.before_s(stage.stage) + busy_s + pipeline.after_s(stage.stage)
    return Resource("compute", f"stage {stage.stage}'s compute", busy_s, least_s)


def _coding(stage: StageRecord, pipeline: _Pipeline) -> Resource:
    busy_s = _beside_s(stage)
    least_s = pipeline.before_s(stage.stage) + busy_s + pipeline.after_s(stage.stage)
    return Resource("codec", f"stage {stage.stage}'s encoding and decoding", busy_s, least_s)


def _beside_s(stage: StageRecord) -> float:
    """The busier of the threads that encode and that decode."""
    return max(stage.split.beside_s.get("encode", 0.0), stage.split.beside_s.get("decode", 0.0))


def _uplink(stage: int, pipeline: _Pipeline) -> Resource:
    flows = pipeline.sent_by(stage)
    busy_s = sum(flow.wire_s for flow in flows)
    fill_s = pipeline.before_s(stage) + pipeline.forward_s(stage)
    drain_s = pipeline.after_s(stage) - flows_each(flows, "gradients") if stage else pipeline.beyond_s()
    named = flows[0].name if flows[0].wire_s >= MAIN_FLOW * busy_s else _both(stage, flows, busy_s)
    return Resource("link", named, busy_s, fill_s + busy_s + max(0.0, drain_s), flows[0])


def flows_each(flows: Sequence[Flow], traffic: Traffic) -> float:
    """Seconds of one micro-batch on those of these flows that carry this."""
    return sum(flow.each_s for flow in flows if flow.traffic == traffic)


def _both(stage: int, flows: Sequence[Flow], busy_s: float) -> str:
    parts = ", ".join(f"{f.traffic} to {f.receiver} {figures.share(f.wire_s / busy_s)} of it" for f in flows)
    return f"stage {stage}'s uplink ({parts})"
