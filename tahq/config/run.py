"""`run:` of cluster.yaml."""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer

from tahq.comm.config import Device, DialledHostPort, HostPort
from tahq.errors import brief
from tahq.units import Duration, Rate, Section, Size, parse_duration, write_duration

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def _folder_name(text: str) -> str:
    if _NAME.fullmatch(text) is None:
        raise ValueError(f"expected at most 100 letters, digits, dots, dashes, underscores; got {brief(repr(text))}")
    return text


def _first_and_last(value: Any) -> Any:
    """A step, or the first and the last step, counted from 1, as a pair; ValueError if it is neither."""
    steps = value if isinstance(value, list | tuple) else [value, value]
    if len(steps) != 2 or not all(type(step) is int for step in steps) or not 1 <= steps[0] <= steps[1]:
        got = str(value).lower() if isinstance(value, bool) else repr(value)
        raise ValueError(f"expected a step, such as 10, or the first and the last, such as [10, 12]; got {got}")
    return steps


def _interval(value: Any) -> Any:
    """A number of steps as an int, a duration as a float in seconds, or never; ValueError if it is none of these."""
    if value is None:  # the value that `run.snapshot_every` had
        return "never"
    if value == "never" or (type(value) is int and value >= 1):
        return value
    try:
        seconds = parse_duration(value)
    except ValueError:
        seconds = 0.0
    if not isinstance(value, str) or seconds <= 0:
        got = brief(repr(value))
        raise ValueError(f"expected a duration such as 10min, a number of steps such as 50, or never; got {got}")
    return seconds


def _listed(value: Any) -> Any:
    """A list, of one name or of none."""
    if isinstance(value, str):
        return [] if value == "none" else [value]
    return value


TracedSteps = Annotated[tuple[int, int], BeforeValidator(_first_and_last)]
Interval = Annotated[
    int | float | Literal["never"],
    BeforeValidator(_interval),
    PlainSerializer(lambda every: write_duration(every) if isinstance(every, float) else every),
]


class RunConfig(Section):
    """The run's name and folder, its checkpoints, and how long its parts wait for each other.

    Example: `run: {name: demo, seed: 0, checkpoint_every: 10min}`
    """

    name: Annotated[str, Field(coerce_numbers_to_str=True), AfterValidator(_folder_name)] = "run"
    """Folder of the run below `dir`. Not set: the file's name and the time."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Source of all randomness: weights, order of the data, dropout, randomised codecs."""
    dir: str = Field(default="runs", min_length=1)
    """Folder that runs are written to."""
    bind: HostPort = "127.0.0.1:0"
    """Where the coordinator listens; port 0 is any free one. Not set, with hosts reached over ssh: the address by
    which they see this machine."""
    advertise: DialledHostPort | None = None
    """The address that workers dial, if it differs from `bind`: a public address, a forwarded port."""
    base_port: int = Field(default=7700, ge=0, le=60_000)
    """With a list of hosts: the coordinator's port; the workers of each host have the next ones, 7701 and so on. 0:
    any free ports."""
    relay: Literal["auto", "never"] | Annotated[int, Field(ge=1, le=65_535)] = "auto"
    """Port on which the coordinator relays links whose ends cannot dial each other; auto: the one before its own."""
    device: Device = "auto"
    """`cpu`, `cuda`, `cuda:1`, or `auto` (CUDA if there is any), for hosts that set no device."""
    threads: int | None = Field(default=None, ge=1, le=1024)
    """Compute threads of a worker. Not set: the cores divided by the workers on them; elsewhere torch's choice."""
    peer_timeout: Duration = Field(default=10.0, ge=0.1)
    """Warn when a worker has been silent this long (a link: half of it)."""
    give_up: Duration = Field(default=120.0, ge=0.1)
    """End the run, resumable, when a link has been silent or a stage without a worker this long. After half of it
    the stage may be taken by a spare."""
    restarts: int = Field(default=10, ge=0)
    """How often the launcher restarts the killed worker of a stage."""
    frame_log: Size = Field(default=10 * 1024**3, ge=0)
    """Largest log, on a stage's disk, of frames sent since the last checkpoint, from which a lost neighbour returns
    alone. Past it all stages return to the checkpoint. 0: no log."""
    join_timeout: Duration = Field(default=600.0, gt=0)
    """How long the coordinator waits for all stages to join."""
    grace: Duration = Field(default=25.0, gt=0)
    """Time for the current step and its checkpoint after SIGTERM."""
    checkpoint_every: Interval = 600.0
    """Time or steps between checkpoints: `10min`, `50`, or `never`. One is always written at the end, on Ctrl-C and
    on SIGTERM."""
    checkpoint_buffers: int = Field(default=2, ge=0, le=2)
    """Copies of a stage that may wait in memory for the disk while training goes on, 12 bytes per parameter each
    with AdamW. 0: training waits."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Newest checkpoints that are kept."""
    keep_best: bool = True
    """Keep that with the lowest validation loss, too; not with `checkpoint_every: never`."""
    copies: int = Field(default=1, ge=0, le=1)
    """Copies of each stage's checkpoint on other hosts, from which a lost host is replaced: 0 or 1."""
    copies_within_host: bool = False
    """Whether a worker on the same host may hold the copy, for workers that share no disk."""
    copy_rate: Rate | None = Field(default=None, ge=1e4)
    """How fast a host fetches copies. Not set: 5 % of its configured downlink, else 10mbit."""
    log_level: Literal["debug", "info", "warning"] = "info"
    """Least severe message that is written to the run's logs."""
    trace_steps: TracedSteps | None = None
    """A step, or the first and the last, of which every action is recorded as a picture: `10` or `[10, 12]`."""
    trackers: Annotated[list[Literal["tensorboard", "wandb", "prometheus"]], BeforeValidator(_listed)] = Field(
        default_factory=list
    )
    """Programs that get the figures of metrics.jsonl, too."""
    prometheus: DialledHostPort = "127.0.0.1:9464"
    """Where Prometheus finds them."""

    def is_traced(self, step: int) -> bool:
        """Whether this step, from 0, is one of `trace_steps`."""
        return self.trace_steps is not None and self.trace_steps[0] <= step + 1 <= self.trace_steps[1]
