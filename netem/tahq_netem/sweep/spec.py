"""sweep.yaml: the points of a sweep, as the product of lists; docs/dev/netem.md has an example.

Everything but `runtimes` holds for all runtimes; each runtime has its own schedules and wires. `sweep.points` makes
the product.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from tahq.comm.config import Device
from tahq.comm.network_config import BackendName, CongestionControl, Speed
from tahq.data.config import DataConfig
from tahq.errors import ConfigError
from tahq.models.config import ModelConfig, SleepConfig
from tahq.quant.spec import CodecSpec
from tahq.typed_yaml.mistakes import read_section
from tahq.units import Duration, Section, Size
from tahq_netem.network.faults import NetworkFault, Timeline

UNSHAPED = "unshaped"
PLAIN_WIRE = "raw:dtype=fp32"
HALF_WIRE = "raw:dtype=bf16"
_ALWAYS_SAID = ("bits", "dtype")
RuntimeName = Literal["tahq", "torch", "bare"]
AUTO: Final = "auto"
ScheduleName = Literal["auto", "gpipe", "1f1b", "zero-bubble", "1f1b-deep", "1f1b-runtime"]
SCHEDULES: dict[RuntimeName, tuple[ScheduleName, ...]] = {
    "tahq": (AUTO, "gpipe", "1f1b", "zero-bubble"),
    "torch": ("gpipe", "1f1b", "1f1b-runtime"),
    "bare": ("gpipe", "1f1b", "1f1b-deep"),
}
"""The schedules of each runtime. `auto` is tahq with default settings, which plans by itself; `1f1b-deep` keeps
2(P − r) − 1 micro-batches in flight on stage r; `1f1b-runtime` is 1F1B in torch's `_PipelineScheduleRuntime`, which
does not wait for sends."""
WIRES: dict[RuntimeName, tuple[str, ...] | None] = {
    "tahq": None,
    "torch": (PLAIN_WIRE, HALF_WIRE),
    "bare": (PLAIN_WIRE,),
}
"""The wires of each runtime; None: any pair of codecs."""


def _all_different(values: list[Any]) -> list[Any]:
    for index, value in enumerate(values):
        if value in values[:index]:
            raise ValueError(f"{value!r} is listed twice")
    return values


def _written(spec: CodecSpec) -> str:
    """The parameters that differ from the defaults, and always bits and dtype."""
    usual = type(spec)().parameters()
    said = {key: value for key, value in spec.parameters().items() if key in _ALWAYS_SAID or value != usual[key]}
    return ":".join(filter(None, (spec.name, ",".join(f"{key}={value}" for key, value in said.items()))))


def split_wire(text: str) -> tuple[str, str]:
    """(activations, gradients) of `tah / fixed:bits=6`; a single codec is for both directions, `auto` the planner's."""
    if text == AUTO:
        return AUTO, AUTO
    parts = [part.strip() for part in text.split("/")]
    if len(parts) > 2:
        raise ValueError(f"expected one codec, or two with / between them; got {text!r}")
    try:
        specs = [_written(CodecSpec.parse(part)) for part in parts]
    except ConfigError as error:
        raise ValueError(str(error)) from error
    return specs[0], specs[-1]


def _known_wire(text: str) -> str:
    split_wire(text)
    return text


Axis = (
    BeforeValidator(lambda value: value if isinstance(value, list) else [value]),
    AfterValidator(_all_different),
    Field(min_length=1),
)
MaybeRate = Annotated[Speed | None, BeforeValidator(lambda value: None if value == UNSHAPED else value)]
Count = Annotated[int, Field(ge=1)]
InFlight = Count | Annotated[tuple[Count, ...], Field(min_length=2)]
Compute = Literal["real", "calibrated"] | SleepConfig
"""Stages compute, sleep as long as their compute takes here, or sleep for given durations."""


class RuntimeConfig(Section):
    """One runtime with its schedules and wires."""

    name: RuntimeName
    schedules: Annotated[list[ScheduleName], *Axis] = Field(default=["1f1b"])
    wires: Annotated[list[Annotated[str, AfterValidator(_known_wire)]], *Axis] = Field(default=[PLAIN_WIRE])
    """`activations / gradients`, or one codec for both. torch takes raw fp32 or bf16, the bare loop raw fp32; tahq's
    schedule `auto` also takes `auto`."""
    in_flight: Annotated[list[InFlight | None], *Axis] = Field(default=[None])
    """Micro-batches in flight, for all stages or by stage; None: the schedule's own number. tahq only."""

    @model_validator(mode="after")
    def _can_do_that(self) -> "RuntimeConfig":
        unknown = [name for name in self.schedules if name not in SCHEDULES[self.name]]
        if unknown:
            raise ValueError(f"{self.name} has the schedules {', '.join(SCHEDULES[self.name])}; got {unknown[0]}")
        sendable = WIRES[self.name] or self.wires
        known = [split_wire(wire) for wire in sendable]
        packed = [wire for wire in self.wires if split_wire(wire) not in known]
        if packed:
            raise ValueError(f"{self.name} sends only {' or '.join(sendable)}; got {packed[0]}")
        if AUTO in self.wires and self.schedules != [AUTO]:
            raise ValueError("wire auto is chosen under schedule auto only; list a further runtime for other schedules")
        if AUTO in self.schedules and self.in_flight != [None]:
            raise ValueError("in_flight is chosen under schedule auto; list a further runtime for fixed numbers")
        if self.in_flight != [None] and self.name != "tahq":
            raise ValueError(f"in_flight is for tahq only; {self.name} has its schedule's own number")
        return self


class StepsConfig(Section):
    """How many steps a point is measured for: as many as fit into `about`, within the limits.

    A step's time is estimated by its bound. Before, `settle` steps pass: the first began under the previous network,
    and TCP has to find its window.
    """

    settle: int = Field(default=1, ge=1)
    at_least: int = Field(default=2, ge=1)
    at_most: int = Field(default=5, ge=1)
    about: Duration = 15.0

    @model_validator(mode="after")
    def _in_order(self) -> "StepsConfig":
        if self.at_most < self.at_least:
            raise ValueError(f"at_most {self.at_most} is below at_least {self.at_least}")
        return self


class SweepConfig(Section):
    """A sweep: every runtime with every network, number of stages, micro-batch size and kind of compute."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    model: ModelConfig
    data: DataConfig | None = None
    """None: one global batch of random tokens, so that every step is an epoch."""
    seq_len: int = Field(default=256, ge=1)
    """Tokens per sample, if `data` does not say."""
    global_batch: int = Field(default=32, ge=1)
    micro_batches: Annotated[list[Count], *Axis] = Field(default=[4])
    stages: Annotated[list[Annotated[int, Field(ge=2, le=64)]], *Axis] = Field(default=[4])
    compute: Annotated[list[Compute], *Axis] = Field(default=["real"])
    """Durations are for the first of `stages` and `micro_batches`, and scaled for the others."""
    rates: Annotated[list[MaybeRate], *Axis] = Field(default=[None])
    """Of each host's uplink and downlink."""
    round_trips: Annotated[list[Duration], *Axis] = Field(default=[0.0])
    """Between any two hosts, half of it each way."""
    profiles: list[str] = Field(default_factory=list)
    """More networks, by name."""
    runtimes: list[RuntimeConfig] = Field(min_length=1)
    steps: StepsConfig = StepsConfig()
    faults: list[NetworkFault] = Field(default_factory=list)
    """Faults at every point; `at` and `step` count from the first step that counts."""
    device: Device = "cpu"
    threads: int = Field(default=1, ge=1)
    """Compute threads of a worker."""
    backend: BackendName = "auto"
    congestion_control: CongestionControl = "cubic"
    tcp_slow_start_after_idle: bool | None = None
    """Whether TCP restarts slowly after a pause, on every host; None: the kernel's default."""
    piece: Size | None = Field(default=None, ge=4096, le=1024 * 1024)
    """tahq's `links.piece`; None: its default."""
    calibrate: bool = True
    """Measure every network first, and fail its points if it is off."""
    max_busy_cores: float | None = Field(default=None, gt=0)
    """Busy cores above which a point of sleeping stages fails; None: 0.6 of all cores."""
    timeout: Duration = 120.0
    """Longest wait for a start and, beyond four times its bound, for a step."""

    @model_validator(mode="after")
    def _agrees(self) -> "SweepConfig":
        for size in self.micro_batches:
            if self.global_batch % size:
                raise ValueError(f"global_batch {self.global_batch} is not divisible by micro-batches of {size}")
        layers = self.model.num_layers
        if layers is not None and max(self.stages) > layers:
            raise ValueError(f"{max(self.stages)} stages need as many layers; model.num_layers is {layers}")
        for sleep in (compute for compute in self.compute if isinstance(compute, SleepConfig)):
            if max(len(sleep.forward), len(sleep.backward)) > 1 and len(self.stages) > 1:
                raise ValueError("durations listed by stage need a single number of stages")
        return self

    @property
    def timeline(self) -> Timeline:
        """The faults as a timeline."""
        return Timeline(faults=self.faults)

    @property
    def sample_len(self) -> int:
        """Tokens of a sample."""
        return self.data.seq_len if self.data is not None else self.seq_len


def load_sweep(path: Path, changes: Sequence[tuple[str, Any]] = ()) -> SweepConfig:
    """Read and check a sweep.yaml.

    Args:
        path: the file.
        changes: (key, value) of top-level keys to replace.

    Raises:
        ConfigError: the file cannot be read or is invalid; one line that names the place.
    """
    return read_section(SweepConfig, path, "rates", "is it a sweep.yaml?", dict(changes))
