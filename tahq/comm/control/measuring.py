"""The control messages of `tahq measure`; `control` has the others, and what checks and packs all of them."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class MeasureCompute:
    """coordinator → worker: time your parts of the model, and these codecs, all workers at the same time."""

    micro_batches: list[int]
    codecs: list[str]


@dataclass(frozen=True, slots=True)
class ComputeMeasured:
    """worker → coordinator: what my device does.

    A row of `times` has the keys of `LayerTimes`; `codecs` has seconds per element, [encode, decode], by spec.
    `notes` are for the user: what could not be timed, and why.
    """

    stage: int
    memory_bytes: int
    """Free on my device, before anything of the measurement was allocated there."""
    times: list[dict[str, int | float | None]]
    codecs: dict[str, list[float]]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class MeasurePaths:
    """coordinator → worker: measure your ways to these peers, all at the same time.

    A row of `peers` is [stage, host, address to dial]; one that is there twice gets two connections.
    """

    order: int
    peers: list[list[str | int]]
    least_s: float
    most_s: float


@dataclass(frozen=True, slots=True)
class PathsMeasured:
    """worker → coordinator: what `MeasurePaths` of this number gave, a number for each of its peers.

    Round trips in seconds, rates in bits a second, `outward` as the peers saw what I sent. Where something went
    wrong `error` says it, and what was not measured any more is empty.
    """

    stage: int
    order: int
    round_trips: list[float]
    outward: list[float]
    inward: list[float]
    error: str = ""
