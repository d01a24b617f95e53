"""How one stage spent a step, in parts that add up to it.

A stage's step begins with the COMMIT before (or START) and ends with its own COMMIT. Up to PREPARE the worker has
measured it (`pipeline/spans.py`); the rest of the step, from commit to commit on the coordinator's clock, it waited for
the COMMIT: for slower stages to prepare, and for messages to and from the coordinator. So by construction

    step = data + forward + backward + encode + decode + waits + optimizer + norms + snapshot + other + commit

where encode and decode are those on the compute thread; work on other threads is listed apart. On a GPU forward and
backward are device times, which overlap with the others, and `other` is then 0 rather than negative.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

BACKWARD = ("backward", "input_gradient", "weight_gradient")
WAIT = "wait:"
BESIDE = "beside:"


@dataclass(frozen=True, slots=True)
class StageSplit:
    """Seconds of one step on one stage."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    """Of inputs and weights, also where they are computed apart."""
    encode_s: float = 0.0
    decode_s: float = 0.0
    wait_s: Mapping[int, float] = field(default_factory=dict)
    """For frames, by sending stage."""
    wait_codec_s: float = 0.0
    """For another thread to encode or decode."""
    wait_memory_s: float = 0.0
    """For memory: the maximum number of micro-batches was in flight."""
    data_s: float = 0.0
    optimizer_s: float = 0.0
    """Applying the previous commit, and summing the norms for this one."""
    snapshot_s: float = 0.0
    other_s: float = 0.0
    commit_s: float = 0.0
    beside_s: Mapping[str, float] = field(default_factory=dict)
    """On other threads, by activity."""

    @property
    def compute_s(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_s

    @property
    def frames_s(self) -> float:
        """Waiting for frames of any stage."""
        return sum(self.wait_s.values())

    @property
    def compute_thread_s(self) -> float:
        """Work of the compute thread, waiting left out."""
        coding_s = self.encode_s + self.decode_s
        return self.compute_s + coding_s + self.data_s + self.optimizer_s + self.snapshot_s + self.other_s

    @property
    def codec_s(self) -> float:
        """Encoding and decoding, on any thread."""
        return self.encode_s + self.decode_s + sum(self.beside_s.get(what, 0.0) for what in ("encode", "decode"))

    @property
    def total_s(self) -> float:
        """All parts on the compute thread: the step's time, but for overlaps on a GPU."""
        waits_s = self.frames_s + self.wait_codec_s + self.wait_memory_s + self.commit_s
        return self.compute_thread_s + waits_s


def stage_split(timing: Mapping[str, float], active_s: float, step_time_s: float) -> StageSplit:
    """Split a stage's step.

    Args:
        timing: seconds by activity, as `Stopwatch.take` names them.
        active_s: from the COMMIT before to PREPARE, on the worker's clock.
        step_time_s: from commit to commit, on the coordinator's.
    """

    def take(*activities: str) -> float:
        return sum(timing.get(activity, 0.0) for activity in activities)

    measured_s = sum(seconds for activity, seconds in timing.items() if not activity.startswith(BESIDE))
    return StageSplit(
        forward_s=take("forward"),
        backward_s=take(*BACKWARD),
        encode_s=take("encode"),
        decode_s=take("decode"),
        wait_s=_waits(timing),
        wait_codec_s=take("wait:codec"),
        wait_memory_s=take("wait:memory"),
        data_s=take("data"),
        optimizer_s=take("optimizer", "norms"),
        snapshot_s=take("snapshot"),
        other_s=max(0.0, active_s - measured_s),
        commit_s=max(0.0, step_time_s - max(active_s, 0.0)),
        beside_s={name.removeprefix(BESIDE): s for name, s in timing.items() if name.startswith(BESIDE)},
    )


def _waits(timing: Mapping[str, float]) -> dict[int, float]:
    """Seconds of `wait:N`, by N."""
    senders = {name: name.removeprefix(WAIT) for name in timing if name.startswith(WAIT)}
    return {int(sender): timing[name] for name, sender in senders.items() if sender.isdecimal()}
