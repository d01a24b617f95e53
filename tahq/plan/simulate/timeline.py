"""What a simulated step looks like: when each action and transfer began and ended.

Times are seconds from the start of the step.
"""

from dataclasses import dataclass

from tahq.comm.link.frame import Direction
from tahq.pipeline.schedule.schedule import Action


@dataclass(frozen=True, slots=True)
class ActionSpan:
    """An action on its stage's compute loop; encoding and decoding included where they run there."""

    stage: int
    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class TransferSpan:
    """A frame on its way across a cut.

    queued_s: encoded and given to the sender's uplink. start_s, sent_s: first byte into, last byte out of
    the uplink. delivered_s: last byte out of the receiver's downlink.
    """

    cut: int
    direction: Direction
    micro_batch: int
    source: int
    target: int
    nbytes: float
    queued_s: float
    start_s: float
    sent_s: float
    delivered_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """One step, simulated.

    Attributes:
        actions: in order of their end.
        transfers: in order of delivery.
        step_time_s: from the start of the step to the commit's arrival.
        num_stages: rows of the picture.
        peak_in_flight: most (chunk, micro-batch) pairs held at once, by stage.
        peak_activation_nbytes: most bytes they took, by stage; None where the costs did not say.
    """

    actions: tuple[ActionSpan, ...]
    transfers: tuple[TransferSpan, ...]
    step_time_s: float
    num_stages: int
    peak_in_flight: tuple[int, ...]
    peak_activation_nbytes: tuple[float, ...] | None

    def span(self, action: Action) -> ActionSpan:
        """When an action was computed; KeyError if it never was."""
        for span in self.actions:
            if span.action == action:
                return span
        raise KeyError(str(action))

    def busy_s(self, stage: int) -> float:
        """Seconds that a stage computes."""
        return sum(span.end_s - span.start_s for span in self.actions if span.stage == stage)

    def idle_share(self) -> tuple[float, ...]:
        """Share of the step that each stage does not compute, in [0, 1]."""
        if self.step_time_s == 0:
            return (0.0,) * self.num_stages
        return tuple(1 - self.busy_s(stage) / self.step_time_s for stage in range(self.num_stages))
