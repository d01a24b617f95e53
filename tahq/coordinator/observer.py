"""The records that the coordinator reports about a run, and the interface of their observers.

An observer shows or stores records and never answers. `step` counts from 1 here and in metrics.jsonl: it is the number
of steps committed so far. (Control messages count from 0.)
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Traffic = Literal["activations", "gradients", "all-reduce"]
"""The kind of data that a link carries in one direction."""


@dataclass(frozen=True, slots=True)
class RunHeader:
    """The run before any worker has joined."""

    name: str
    run_folder: Path
    num_stages: int
    address: str
    """host:port that workers dial."""
    start_step: int
    """Steps behind the checkpoint that it continues from; 0 for a new run."""


@dataclass(frozen=True, slots=True)
class StageStatus:
    """A stage's worker as the coordinator sees it now."""

    stage: int
    host: str
    pid: int
    device: str
    """Empty before HELLO."""
    num_parameters: int
    """0 before HELLO."""
    activity: str
    step: int
    """Index of the step that it works on, from 0; -1: none yet."""


@dataclass(frozen=True, slots=True)
class CodecChange:
    """A link and direction that gets another codec from the next step on; `detail` has the figures.

    Reasons: sending took longest, more bits fit, training quality dropped, or the recorded run changed it.
    """

    link: int
    direction: Traffic
    old: str
    new: str
    reason: Literal["bottleneck", "room", "guard", "replay"]
    detail: str = ""

    def __str__(self) -> str:
        why = f"{self.reason}: {self.detail}" if self.detail else self.reason
        return f"link {self.link}, {self.direction}: {self.old} -> {self.new} ({why})"


@dataclass(frozen=True, slots=True)
class LinkRecord:
    """The traffic of one worker on one link, in one direction, during one step.

    `codec` is the full spec of its codec, "" if unknown; `relative_error` that of one tensor, at the steps at which it
    is measured.
    """

    link: int
    sender: int
    receiver: int
    direction: Traffic
    frames: int
    payload_bytes: int
    wire_bytes: int
    elements: int
    busy_s: float
    """While anything was queued or not acknowledged."""
    sending_s: float = 0.0
    """Of that, while bytes were in transit; during the rest they waited behind other data."""
    wire_s: float = 0.0
    """Transmission time of the bytes, without propagation delay."""
    idle_s: float = 0.0
    """While there was nothing to send."""
    codec: str = ""
    relative_error: float | None = None
    round_trip_s: float = 0.0
    """The shortest so far, of a heartbeat and its answer; 0: unknown."""
    relayed_bytes: int = 0
    """That the sender has sent over the relay since the step before, encryption and acknowledgements included."""

    @property
    def queued_s(self) -> float:
        """While its data waited behind other data."""
        return max(0.0, self.busy_s - self.sending_s)

    @property
    def bits_per_element(self) -> float:
        """8 · payload_bytes / elements; 0.0 where nothing was sent."""
        return 8.0 * self.payload_bytes / self.elements if self.elements else 0.0

    @property
    def goodput_bits_per_s(self) -> float:
        """8 · payload_bytes / busy_s; 0.0 where nothing was sent."""
        return 8.0 * self.payload_bytes / self.busy_s if self.busy_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class StageSplit:
    """Seconds of one step on one stage, in parts that add up to it.

    A stage's step runs from the COMMIT before (or START) to its own COMMIT. Up to PREPARE the worker has measured it
    (`pipeline/spans.py`); for the rest it waited for the COMMIT, that is for slower stages and the coordinator. So

        step = data + forward + backward + encode + decode + waits + optimizer + norms + snapshot + other + commit

    Encode and decode are those on the compute thread; work on other threads is listed apart. On a GPU forward and
    backward are device times, which overlap with the others, and `other` is then 0 rather than negative.
    """

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
    def codec_s(self) -> float:
        """Encoding and decoding, on any thread."""
        return self.encode_s + self.decode_s + sum(self.beside_s.get(what, 0.0) for what in ("encode", "decode"))


@dataclass(frozen=True, slots=True)
class StageRecord:
    """How one stage spent one step: seconds by activity as measured, and split; the size of its codecs' state."""

    stage: int
    timing: Mapping[str, float]
    codec_state_bytes: int = 0
    split: StageSplit = field(default_factory=StageSplit)
    memory_bytes: int = 0
    """Memory of its device that it may use; 0: unknown."""
    peak_bytes: int = 0
    """Most memory that it has held there so far; 0: unknown."""

    @property
    def waiting_share(self) -> float:
        """Share of the measured time in activities whose name starts with `wait`; in [0, 1]."""
        own = {name: seconds for name, seconds in self.timing.items() if not name.startswith("beside")}
        total_s = sum(own.values())
        waiting_s = sum(seconds for name, seconds in own.items() if name.startswith("wait"))
        return waiting_s / total_s if total_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One committed step.

    `loss` is a mean over the tokens whose loss counts, see `loss_unit`; NaN if there are none. `step_time_s` runs from
    commit to commit, evaluations left out. A skipped step changed no weight.
    """

    step: int
    loss: float
    tokens: int
    """Whose loss counts: of pairs, those of the responses."""
    step_time_s: float
    grad_norm: float
    """Global gradient norm before clipping."""
    clip_factor: float
    skipped: bool
    evaluating: bool
    """Whether a `ValidationRecord` of this step will follow."""
    stages: Sequence[StageRecord] = ()
    links: Sequence[LinkRecord] = ()
    codec_changes: Sequence[CodecChange] = ()
    """Decided with this step; they hold from the next step on."""
    schedule_change: str = ""
    """Another schedule, or other depths, from the next step on, and why; empty: no change."""
    lr: float = 0.0
    """The learning rate that the step was taken with; a skipped step used none."""
    schedule: str = ""
    """The schedule of this step; empty: unknown."""
    in_flight: Sequence[int] = ()
    """Its depths by stage; empty: the schedule's own."""
    computing: Sequence[int] = ()
    """The replicas that shared the batch; empty: unknown."""
    abandoned: bool = False
    """Whether it was skipped because a replica lost a worker."""
    computed_tokens: int = 0
    """Tokens of all samples, prompts and padding included; 0: unknown."""
    router_loss: float | None = None
    """The load-balancing loss of experts, times its coefficient, which `loss` leaves out; None: there is none."""
    sampling: bool = False
    """Whether a `SamplesRecord` of this step will follow."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Of DPO, whose `loss` is a mean over pairs: mean rewards of `chosen` and `rejected` answers, their `margin`, and
    `accuracy`, the share of pairs where it is above 0; else empty."""
    loss_scale: float = 0.0
    """The factor of its gradients where products are in fp16; 0: there is none."""

    @property
    def loss_unit(self) -> str:
        """What `loss` counts."""
        return "nats per pair" if self.rewards else "nats per token"

    @property
    def skipped_for(self) -> str:
        """Why it was skipped, if it was."""
        if self.abandoned:
            return "a replica lost a worker"
        return "overflow in fp16" if self.has_overflowed else "NaN or infinity"

    @property
    def has_overflowed(self) -> bool:
        """Whether it was skipped because gradients were too large for fp16, as happens while the scale is found."""
        return self.skipped and not self.abandoned and self.loss_scale > 0 and math.isfinite(self.loss)

    @property
    def relayed_bytes(self) -> int:
        """Bytes that the relay's host has received, and sent on."""
        return sum(link.relayed_bytes for link in self.links)

    @property
    def tokens_per_s(self) -> float:
        """Computed tokens per second; where their number is unknown, tokens whose loss counts."""
        return (self.computed_tokens or self.tokens) / self.step_time_s if self.step_time_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class TracedSpan:
    """One span of a traced step, by the coordinator's clock.

    `frame` names the frame that it handled (empty: none), equally at both ends of the link.
    """

    lane: str
    category: str
    name: str
    begin_s: float
    end_s: float
    frame: str = ""
    nbytes: int = 0
    queued_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StageTrace:
    """The spans of one stage in a traced step.

    Its clock was `offset_s` ahead of the coordinator's, within `clock_error_s` (NaN: unknown).
    """

    stage: int
    name: str
    offset_s: float
    clock_error_s: float
    spans: tuple[TracedSpan, ...]


@dataclass(frozen=True, slots=True)
class StepTrace:
    """A traced step of all stages, from commit to commit, by the coordinator's clock."""

    step: int
    begin_s: float
    end_s: float
    stages: tuple[StageTrace, ...]


@dataclass(frozen=True, slots=True)
class ValidationRecord:
    """Loss of a validation set after `step` steps, in nats per token: with the wire's codecs, and without (`raw`).

    With DPO it is per pair, `tokens` are pairs, and `accuracy`, without codecs, is as in `StepRecord.rewards`.
    """

    step: int
    tokens: int
    loss: float
    loss_raw: float
    name: str = ""
    """The set's; empty: it has none."""
    others: tuple["ValidationRecord", ...] = ()
    """Those of the other sets, beside the first one's."""
    accuracy: float | None = None

    @property
    def sets(self) -> tuple["ValidationRecord", ...]:
        """The records of all sets."""
        return (self, *self.others)


@dataclass(frozen=True, slots=True)
class SamplesRecord:
    """Prompts, each with the text that the model has written behind it, after `step` steps."""

    step: int
    texts: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class SnapshotRecord:
    """A complete checkpoint after `step` steps, or `error` says why it failed."""

    step: int
    nbytes: int
    error: str = ""
    is_best: bool = False
    """Whether its validation loss is the lowest so far."""


@dataclass(frozen=True, slots=True)
class RunEnd:
    """How a run ended. `message` is empty if it reached its last step."""

    exit_status: int
    message: str
    steps_done: int
    total_steps: int
    """0: not known yet."""
    last_snapshot: int | None = None
    """Steps behind the newest complete checkpoint; None: there is none."""


class RunObserver:
    """Called by the coordinator's thread as things happen; methods must return quickly.

    This base class ignores everything; an observer overrides the methods that it needs.
    """

    def opened(self, header: RunHeader) -> None:
        """The coordinator listens."""

    def phase_changed(self, phase: str, detail: str) -> None:
        """The run is now `phase` (joining, connecting, training, finishing, over) and waits for `detail`."""

    def stage_changed(self, status: StageStatus) -> None:
        """A worker joined, sent HELLO, or reported its activity."""

    def stage_left(self, stage: int) -> None:
        """This stage has lost its worker."""

    def stage_returned(self, stage: int, lasted_s: float) -> None:
        """This stage, lost for so many seconds, has a worker that is where the run is."""

    def link_changed(self, stage: int, link: int, reason: str) -> None:
        """This stage's end of a link is degraded, and why; empty: it works again."""

    def planned(self, start_step: int, total_steps: int) -> None:
        """All stages have joined, and the length of the run is known."""

    def step_committed(self, record: StepRecord) -> None:
        """A step was committed (applied or skipped) by all stages."""

    def turned_back(self, step: int) -> None:
        """All stages go back to the checkpoint after this many steps: later ones are taken again."""

    def step_traced(self, trace: StepTrace) -> None:
        """All stages have reported a traced step, some time after its commit."""

    def validated(self, record: ValidationRecord) -> None:
        """The validation loss of the step committed last has come in."""

    def sampled(self, record: SamplesRecord) -> None:
        """The samples of the step committed last have come in."""

    def snapshot_written(self, record: SnapshotRecord) -> None:
        """A checkpoint is complete, or has failed (`record.error`); training goes on either way."""

    def warned(self, text: str) -> None:
        """A line for the user."""

    def ended(self, end: RunEnd) -> None:
        """The run is over; nothing follows."""
