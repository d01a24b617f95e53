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


TracedSteps = Annotated[tuple[int, int], BeforeValidator(_first_and_last)]
Interval = Annotated[
    int | float | Literal["never"],
    BeforeValidator(_interval),
    PlainSerializer(lambda every: write_duration(every) if isinstance(every, float) else every),
]


class RunConfig(Section):
    """A run's name and folder, and how long its parts wait for each other."""

    name: Annotated[str, AfterValidator(_folder_name)] = "run"
    seed: int = Field(default=0, ge=0, lt=2**63)
    dir: str = Field(default="runs", min_length=1)
    bind: HostPort = "127.0.0.1:0"
    """Where the coordinator listens; port 0: any free one."""
    advertise: DialledHostPort | None = None
    """host:port that workers dial, if it differs from what is bound."""
    base_port: int = Field(default=7700, ge=0, le=60_000)
    """Of machines in a list, the coordinator's port and the one before their workers'; 0: any free ones."""
    device: Device = "auto"
    """auto, cpu, cuda or cuda:N, for hosts that set no device."""
    threads: int | None = Field(default=None, ge=1, le=1024)
    """Compute threads per worker; None: the cores divided among the workers on them."""
    peer_timeout: Duration = Field(default=10.0, ge=0.1)
    """Warn about a peer that has been silent this long; heartbeats are sent five times as often."""
    give_up: Duration = Field(default=120.0, ge=0.1)
    """End the run when a link has been silent, or a stage without a worker, this long."""
    restarts: int = Field(default=10, ge=0)
    """How often the launcher restarts the killed worker of a stage."""
    frame_log: Size = Field(default=10 * 1024**3, ge=0)
    """Largest size of a stage's log, on its disk, of frames sent since the last checkpoint; 0: no log."""
    join_timeout: Duration = Field(default=600.0, gt=0)
    """How long the coordinator waits for all stages to join."""
    grace: Duration = Field(default=25.0, gt=0)
    """Time for the current step and its checkpoint after SIGTERM."""
    checkpoint_every: Interval = 600.0
    """Steps (int) or seconds (float) between checkpoints; one is always written at the end and on interruption."""
    checkpoint_buffers: int = Field(default=2, ge=0, le=2)
    """Copies of a stage that may be waiting for the disk while training goes on; 0: training waits for the disk."""
    keep_checkpoints: int = Field(default=2, ge=1)
    copies: int = Field(default=1, ge=0, le=1)
    """Copies of each stage's checkpoint on other hosts."""
    copies_within_host: bool = False
    """Whether copies may lie on the same host, for workers that do not share a disk."""
    copy_rate: Rate | None = Field(default=None, ge=1e4)
    """How fast a host fetches copies; None: 5 % of what it is configured to receive at, else 10 mbit/s."""
    log_level: Literal["debug", "info", "warning"] = "info"
    trace_steps: TracedSteps | None = None
    """First and last step, from 1, of which every action of every worker is recorded, as a picture."""

    def is_traced(self, step: int) -> bool:
        """Whether this step, from 0, is one of `trace_steps`."""
        return self.trace_steps is not None and self.trace_steps[0] <= step + 1 <= self.trace_steps[1]
