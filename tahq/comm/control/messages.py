"""Control messages between workers and the coordinator: frozen dataclasses of plain values (bytes: `encoding.py`)."""

from dataclasses import dataclass, field
from typing import Final

OWNER: Final = -1
"""The `stage` of a StopRequest that comes from the run's owner."""


@dataclass(frozen=True, slots=True)
class Redeem:
    """invited machine → coordinator, over a connection with an invite's one-time key: let my own key join from now on.

    `address` is the host name or IP address at which neighbours reach the machine.
    """

    public_key: str
    host: str
    address: str
    version: str


@dataclass(frozen=True, slots=True)
class Welcome:
    """coordinator → invited machine: your key may join from now on."""

    needs: dict[str, list[str]] = field(default_factory=dict)
    """Files that the run reads on its workers: by key of cluster.yaml, paths and globs."""


@dataclass(frozen=True, slots=True)
class Join:
    """worker → coordinator: I would like to be this stage (-1: the one kept for my key, else any that is free)."""

    stage: int
    version: str
    host: str
    pid: int
    worker_id: str = ""
    """Names the successive processes of one worker: a new one takes the old one's place."""
    takeover: bool = False
    """A person knows that the stage's holder is gone. With `spare`: I take it only from a holder with my key."""
    spare: bool = False
    """If the stage is taken, or is -1, I wait for the stage of a lost host."""


@dataclass(frozen=True, slots=True)
class Assign:
    """coordinator → worker: your stage, and the resolved configuration as JSON."""

    stage: int
    run_id: int
    config_json: str
    config_hash: str
    snapshot: str = ""
    """Folder of the checkpoint to continue from, relative to the run's; empty: start anew."""
    snapshot_files: dict[str, str] = field(default_factory=dict)
    """SHA-256 of each of its files, by name."""
    start_step: int = 0
    is_measuring: bool = False
    """Nothing is built, and after HELLO come orders to measure instead of a plan."""
    copied_step: int = -1
    """An older checkpoint to begin at if this stage's file of `snapshot` is missing; -1: none."""
    copied_snapshot: str = ""
    copied_files: dict[str, str] = field(default_factory=dict)
    sources: list[list[str | int]] = field(default_factory=list)
    """Who else has this stage's file: rows of [steps behind the checkpoint, host:port, public key or ""]."""


@dataclass(frozen=True, slots=True)
class StandBy:
    """coordinator → spare: no stage needs you now; wait. I may be silent for `give_up_s`."""

    peer_timeout_s: float
    give_up_s: float


@dataclass(frozen=True, slots=True)
class Hello:
    """worker → coordinator: my data, model and device under this configuration; hashes are empty without data."""

    stage: int
    version: str
    config_hash: str
    tokenizer_hash: str
    data_hash: str
    address: str
    """host:port that others can dial, for links and checkpoint files; empty: I only dial out."""
    device: str
    torch_version: str
    num_parameters: int
    num_train_samples: int
    """Samples of an epoch; 0 where I need no data."""
    next_sample: int = 0
    """Number of the first sample that I would train on, over all epochs; 0 for a new run, or without data."""
    arithmetic_changes: list[str] = field(default_factory=list)
    """How this machine's arithmetic differs from the checkpoint's; with any, the run is no longer exact."""
    data_notes: list[str] = field(default_factory=list)
    """What the user should know of the data, such as how many samples are cut."""
    start_step: int = 0
    """Steps behind the checkpoint that I begin at."""
    memory_nbytes: int = 0
    """Bytes that my device has free or I use there; 0: unknown."""
    products: str = ""
    """Type of my matrix products: fp32, bf16 or fp16; under fp16 all stages need a loss scale."""
    emulates_bf16: bool = False
    """Whether my GPU has no bf16 of its own, and computes in it nevertheless."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """coordinator → worker: you cannot join; `differences` has rows of (field, yours, expected)."""

    reason: str
    differences: list[list[str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TryPeers:
    """coordinator → worker: find out whether these peers can be dialled, all at the same time.

    A row of `peers` is [stage, host:port, public key or "" without CURVE]. Each is answered with TRIED.
    """

    peers: list[list[str | int]]


@dataclass(frozen=True, slots=True)
class Tried:
    """worker → coordinator: a peer of `TryPeers` can be dialled at this address, or `failure` says why not."""

    stage: int
    peer_stage: int
    address: str
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """coordinator → worker: all have joined; these are your links.

    A row of `links` is [link, peer stage, peer's host, address to dial or "" to be dialled, transport of its frames
    (zmq, gloo or nccl), the peer's public key or "" without CURVE]. The address of a link over the relay is
    "PORT/TICKET": the port is of the coordinator's host, and both ends dial it (`tahq/comm/relay`).
    """

    epoch: int
    start_step: int
    total_steps: int
    links: list[list[str | int]]
    num_train_samples: int = 0
    """Samples of an epoch."""
    next_sample: int = 0
    """Number of the training sample that `start_step` begins with, over all epochs."""
    live_step: int = 0
    """The step that the run is at; steps before it were committed already, and are computed again."""
    wanted: list[list[int]] = field(default_factory=list)
    """Which frames the peer of a link wants, as rows of `Relink`, where it does not want all."""


@dataclass(frozen=True, slots=True)
class Relink:
    """coordinator → worker: the processes at the other ends of these links are new.

    Rows of `links` are as in PLAN. A row of `wanted` is [link, first step whose training frames the peer lacks, first
    step whose evaluation it takes part in, last step whose frames it takes for now (-1: no end)].
    """

    epoch: int
    links: list[list[str | int]]
    wanted: list[list[int]]


@dataclass(frozen=True, slots=True)
class Relinked:
    """worker → coordinator: done, the new processes may dial; `lacking` are the links of which I have not kept all."""

    stage: int
    epoch: int
    lacking: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Widen:
    """coordinator → worker: the peer of this link takes frames through this step now (-1: no end)."""

    link: int
    through: int


@dataclass(frozen=True, slots=True)
class Hold:
    """coordinator → worker: the peers of these links are lost; wait, however long, until they are replaced."""

    links: list[int]


@dataclass(frozen=True, slots=True)
class Abandon:
    """coordinator → worker: give up this step, to which the peers of these links will send nothing more."""

    step: int
    links: list[int]


@dataclass(frozen=True, slots=True)
class Published:
    """coordinator → worker: the checkpoint after `step` steps is complete; forget frames and copies before `base`."""

    step: int
    base: int


@dataclass(frozen=True, slots=True)
class Copy:
    """coordinator → worker: keep a copy of this stage's file of the checkpoint after `step` steps."""

    step: int
    stage: int
    file: str
    sha256: str
    address: str
    """host:port of its holder; empty: only answer whether you have it."""
    public_key: str = ""
    """The holder's; empty without CURVE."""


@dataclass(frozen=True, slots=True)
class Admit:
    """coordinator → worker: the owners of these public keys will ask for your files."""

    public_keys: list[str]


@dataclass(frozen=True, slots=True)
class Copied:
    """worker → coordinator: stage `holder` has a copy of that file, or `error` says why not."""

    step: int
    stage: int
    holder: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class Rejoin:
    """worker → coordinator that was started again: I hold this stage, and have the decisions on this many steps."""

    stage: int
    run_id: int
    step: int


@dataclass(frozen=True, slots=True)
class NoCheckpoint:
    """worker → coordinator: I can begin at no checkpoint that ASSIGN names, and wait to start over at an older one."""

    stage: int
    step: int
    """Of the newest of them."""
    reason: str


@dataclass(frozen=True, slots=True)
class StartOver:
    """coordinator → worker: forget what you have, and join again."""

    reason: str


@dataclass(frozen=True, slots=True)
class Ready:
    """worker → coordinator: model built, links up."""

    stage: int


@dataclass(frozen=True, slots=True)
class Start:
    """coordinator → worker: all are ready, begin with this step.

    `codecs` has a row for each link and direction whose codec is not the configured one: [link, direction, index into
    the plan's table of codecs]. `schedule` and `depths` (most micro-batches in flight, by stage; empty: the schedule's
    own) are in force instead of the configured ones; "": those are. Replicas `computing` share the batch; empty: all.
    `loss_scale` is the factor of gradients; 0: there is no loss scale.
    """

    step: int
    codecs: list[list[int]] = field(default_factory=list)
    schedule: str = ""
    depths: list[int] = field(default_factory=list)
    computing: list[int] = field(default_factory=list)
    loss_scale: float = 0.0


@dataclass(frozen=True, slots=True)
class Prepare:
    """worker → coordinator: my part of this step is computed, nothing is applied yet.

    `norm2` has one fp64 squared gradient norm per parameter that the worker updates. Loss sum, token count and batch
    digest are set by the stages that know them (None, None and "" elsewhere). `timing` holds seconds by activity
    (forward, wait:1, beside:encode, …; see `pipeline/spans.py`), out of the `active_s` from the COMMIT before (or
    START) to this message. A row of `links` is [link, direction, frames, payload bytes, wire bytes, elements; seconds:
    busy, sending, on the wire, shortest round trip so far (0: unknown)] of sent data, a row of `codec_errors` [link,
    direction, ‖x̂ − x‖/‖x‖] of a sent tensor, where it was measured.
    """

    step: int
    stage: int
    norm2: list[float]
    finite: bool
    loss_sum: float | None
    tokens: int | None
    batch_digest: str
    timing: dict[str, float]
    links: list[list[float]]
    codec_state_bytes: int = 0
    active_s: float = 0.0
    codec_errors: list[list[float]] = field(default_factory=list)
    weights_digest: str = ""
    """Of this stage's weights before this step; empty except every few steps of a run with replicas."""
    abandoned: bool = False
    """Whether the step was given up here, so that the rest says nothing."""
    peak_bytes: int = 0
    """Most memory that I have held on my device so far; 0: unknown."""
    router_loss: float | None = None
    """My part of the load-balancing loss of experts; the parts of all stages add up to it."""
    rewards: list[float] = field(default_factory=list)
    """Of DPO, from the last stage: pairs, over which the loss is summed, sums of the rewards of their chosen and
    rejected answers, and how often the first was higher. Empty: the loss is summed over tokens."""


@dataclass(frozen=True, slots=True)
class Commit:
    """coordinator → worker: apply (or skip) this step with this clip factor, then evaluate, write, stop as told.

    `codecs` has a row (as in START) for each link and direction with another codec from the next step on, `schedule`
    and `depths` are as in START from then on ("": nothing changes), as is `computing` (empty: nothing changes). A step
    that was `abandoned` is not applied.
    `complete_snapshot` is the number of steps behind the newest complete checkpoint (0: none): older ones may go, but
    that after `best_snapshot` steps. `snapshot_before`: first write the checkpoint after the step before, as the state
    still is. `sample`: continue the prompts of `training.samples`, as a part of the evaluation. `loss_scale`: as in
    START, of the next step.
    """

    step: int
    apply: bool
    clip_factor: float
    evaluate: bool
    snapshot: bool
    stop: bool
    codecs: list[list[int]] = field(default_factory=list)
    complete_snapshot: int = 0
    schedule: str = ""
    depths: list[int] = field(default_factory=list)
    computing: list[int] = field(default_factory=list)
    abandoned: bool = False
    best_snapshot: int = 0
    snapshot_before: bool = False
    sample: bool = False
    loss_scale: float = 0.0


@dataclass(frozen=True, slots=True)
class Evaluated:
    """worker → coordinator (last stage): for each validation set, tokens and loss sums in nats, with the codec and
    without; and the text behind each prompt. Empty: not asked for. With DPO tokens are pairs, of which `num_right` have
    the chosen answer's reward above the other's."""

    step: int
    tokens: list[int]
    loss_sum: list[float]
    raw_loss_sum: list[float]
    samples: list[str] = field(default_factory=list)
    num_right: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Snapshotted:
    """worker → coordinator: my part of the checkpoint after this many steps is durable, or `error` says why not."""

    step: int
    stage: int
    file: str
    sha256: str
    nbytes: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class Traced:
    """worker → coordinator: a part (from 0) of my spans in a traced step, column by column, by my clock.

    `frames` names the frame that a span handled (empty: none), `nbytes` the bytes sent and `queued_s` how long they had
    waited (0: nothing was sent).
    """

    step: int
    stage: int
    part: int
    num_parts: int
    lanes: list[str]
    categories: list[str]
    names: list[str]
    frames: list[str]
    begins_s: list[float]
    ends_s: list[float]
    nbytes: list[int]
    queued_s: list[float]


@dataclass(frozen=True, slots=True)
class LinkState:
    """worker → coordinator: a link of mine is degraded, and why; or, if `reason` is empty, works again.

    `lasted_s` is how long it was degraded, `num_sent_again` how many pieces I have sent again on it so far.
    """

    stage: int
    link: int
    peer_stage: int
    reason: str
    lasted_s: float = 0.0
    num_sent_again: int = 0


@dataclass(frozen=True, slots=True)
class NotKept:
    """worker → coordinator: frames that I send on a link are not kept until the next checkpoint, and why."""

    stage: int
    link: int
    reason: str


@dataclass(frozen=True, slots=True)
class StopRequest:
    """worker → coordinator: the person at this worker asked the run to stop in order.

    With stage `OWNER` it comes from the run's owner; a second one stops the run at once.
    """

    stage: int
    signal_number: int


@dataclass(frozen=True, slots=True)
class Failed:
    """worker → coordinator: I cannot go on; the message is for the user."""

    stage: int
    message: str
    exit_status: int


@dataclass(frozen=True, slots=True)
class Abort:
    """coordinator → worker: the run ends here, now, with this message and exit status."""

    message: str
    exit_status: int


@dataclass(frozen=True, slots=True)
class Bye:
    """coordinator → worker: all done, leave with status 0 (or 130/143 after a signal)."""

    exit_status: int = 0


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """worker → coordinator: my current activity and step; sent at regular intervals."""

    stage: int = -1
    step: int = -1
    activity: str = ""


# Messages of the run's owner, a process with the coordinator's own key


@dataclass(frozen=True, slots=True)
class ReadRun:
    """owner → coordinator: send me lines of this file of the run's folder, from this byte on.

    A negative `offset` means so many last bytes.
    """

    file: str
    offset: int


@dataclass(frozen=True, slots=True)
class RunLines:
    """coordinator → owner: whole lines, the byte behind them, and the file's size (-1: it may not or cannot be read).

    `next_offset` is smaller than the offset that was asked for if the file was cut meanwhile.
    """

    file: str
    text: str
    next_offset: int
    size: int


@dataclass(frozen=True, slots=True)
class FindFiles:
    """owner → coordinator: where can I fetch the checkpoint files of this stage, directly or over the relay?"""

    stage: int
    is_relayed: bool = False


@dataclass(frozen=True, slots=True)
class FilePlaces:
    """coordinator → owner: of this run, rows of [address, public key] of workers that have the files or copies.

    The address is host:port, or the relay's "PORT/TICKET" as in PLAN.
    """

    run_id: int
    config_hash: str
    places: list[list[str]]


@dataclass(frozen=True, slots=True)
class ServeFiles:
    """coordinator → worker: the owner of this key will ask for your files over the relay, "PORT/TICKET"."""

    ticket: str
    public_key: str


# Messages of `tahq measure`


@dataclass(frozen=True, slots=True)
class MeasureCompute:
    """coordinator → worker: time your parts of the model, and these codecs, while others do; on a shared GPU only one.

    After `limit_s` seconds (0: no limit), or where more samples take as long each, no larger micro-batch is begun; if
    none is listed, only free memory is read.
    """

    micro_batches: list[int]
    codecs: list[str]
    limit_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ComputeMeasured:
    """worker → coordinator: the speed of my device.

    A row of `times` has the keys of `LayerTimes`; `codecs` has seconds per element, [encode, decode], by spec; `notes`
    tell the user what could not be timed, and why.
    """

    stage: int
    memory_bytes: int
    """Free on my device, before anything of the measurement was allocated there."""
    times: list[dict[str, int | float | None]]
    codecs: dict[str, list[float]]
    notes: list[str] = field(default_factory=list)
    host_memory_bytes: int = 0
    """Free in my machine's memory, if my device is a GPU; 0: it is not, or unknown."""
    host_link: float = 0.0
    """Bits per second of copies between pinned memory and my GPU, each way while both are busy; 0: no GPU."""


@dataclass(frozen=True, slots=True)
class MeasurePaths:
    """coordinator → worker: measure the paths to these peers, all at the same time.

    A row of `peers` is [stage, host, address to dial]; one that is there twice gets two connections. An address
    ":PORT" is of the coordinator's machine, as the worker reaches it.
    """

    order: int
    peers: list[list[str | int]]
    least_s: float
    most_s: float


@dataclass(frozen=True, slots=True)
class PathsMeasured:
    """worker → coordinator: the figures of `MeasurePaths` number `order`, one for each of its peers.

    Round trips in seconds, rates in bits per second, `outward` as the peers saw what I sent. Where something went
    wrong, `error` says what, and the lists of figures not measured are empty.
    """

    stage: int
    order: int
    round_trips: list[float]
    outward: list[float]
    inward: list[float]
    error: str = ""


Message = (
    Redeem | Welcome | Join | Assign | Hello | Refuse | Plan | Ready | Start | Prepare | Commit | Evaluated
    | Snapshotted | Traced | StopRequest | Failed | Abort | Bye | Heartbeat
    | MeasureCompute | ComputeMeasured | MeasurePaths | PathsMeasured
    | LinkState | Relink | Relinked | Widen | Published | StartOver | Rejoin | StandBy | Copy | Copied | Hold
    | Abandon | Admit | NotKept | NoCheckpoint | ReadRun | RunLines | TryPeers | Tried
    | FindFiles | FilePlaces | ServeFiles
)  # fmt: skip

Order = Relink | Widen | Hold | Abandon | Published | Copy | Admit | TryPeers | ServeFiles
"""Messages that may come at any time, which a worker carries out beside its work."""
