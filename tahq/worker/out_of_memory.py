"""What a worker says when its device's memory is full: how much was wanted, what the stage needs, and what would help.

The needs are those of `stage_estimate`, so a floor; what a change would save is the difference of two such estimates.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tahq.config.cluster import ClusterConfig
from tahq.config.stage_estimate import chunks_of, stage_estimate
from tahq.errors import OutOfMemoryError, UserError
from tahq.memory.config import COAT_FAMILIES
from tahq.memory.estimate import StageMemory
from tahq.memory.free_memory import free_bytes
from tahq.models.model_spec import ModelSpec
from tahq.worker.assembly import computes_in_bf16, resolved_spec

_WANTED_CPU = re.compile(r"tried to allocate (\d+) bytes")
_WANTED_CUDA = re.compile(r"Tried to allocate ([\d.]+) (KiB|MiB|GiB)")
_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_GENERAL = (
    "use a smaller training.micro_batch, training.activation_checkpointing: block, more stages, or fewer layers on "
    "this stage (pipeline.layers)"
)


@dataclass(frozen=True, slots=True)
class Relief:
    """A change of the configuration, and the bytes that this stage would then need less."""

    change: str
    saved_nbytes: int


def out_of_memory(
    error: BaseException, stage: int, config: ClusterConfig | None = None, device: torch.device | None = None
) -> OutOfMemoryError:
    """The error that a worker ends with, in one line.

    Args:
        error: what the allocation raised.
        stage: whose.
        config: resolved; None if it was not known yet.
        device: where the stage computes; None if it was not known yet.
    """
    parts = [f"stage {stage} is out of memory: {_wanted(error, device)}"]
    if config is not None and device is not None:
        parts += _estimate(config, stage, computes_in_bf16(config, device), device)
    else:
        parts.append(_GENERAL)
    return OutOfMemoryError("; ".join([*parts, "`tahq-launch --dry-run` shows the estimate of every stage"]))


def wanted_bytes(error: BaseException) -> int | None:
    """How much the allocation that failed asked for, as torch's message says; None if it does not."""
    text = str(error)
    if match := _WANTED_CPU.search(text):
        return int(match[1])
    if match := _WANTED_CUDA.search(text):
        return int(float(match[1]) * _UNITS[match[2]])
    return None


def reliefs(config: ClusterConfig, spec: ModelSpec, stage: int, *, bf16: bool, on_cpu: bool) -> tuple[Relief, ...]:
    """What would make this stage smaller, and by how much; what saves most comes first.

    Args:
        config: resolved.
        spec: its model.
        stage: which.
        bf16: whether it computes under bf16 autocast.
        on_cpu: whether copies for snapshots lie in the memory that is full.
    """
    now = stage_estimate(config, spec, stage, bf16=bf16)
    found = [_snapshot_relief(config, now)] if on_cpu and config.run.snapshot_every is not None else []
    for change, changed in _changes(config, spec, stage):
        try:
            ClusterConfig.model_validate(changed.model_dump(mode="json"))
            # more stages: the largest of them, wherever that will be
            stages = range(changed.pipeline.stages) if changed.pipeline.stages != config.pipeline.stages else (stage,)
            then = max(stage_estimate(changed, spec, number, bf16=bf16).total for number in stages)
        except (UserError, ValueError):
            continue  # this run, its model or its schedule cannot be changed so
        found.append(Relief(change, now.total - then))
    useful = [relief for relief in found if relief.saved_nbytes > 0]
    return tuple(sorted(useful, key=lambda relief: -relief.saved_nbytes))


def _estimate(config: ClusterConfig, stage: int, bf16: bool, device: torch.device) -> list[str]:
    """The needs and the advice; where they cannot be told, the advice without numbers."""
    try:
        spec = resolved_spec(config, None)
        memory = stage_estimate(config, spec, stage, bf16=bf16)
        helpful = reliefs(config, spec, stage, bf16=bf16, on_cpu=device.type == "cpu")
        depth = config.pipeline.actions(config.training.num_micro_batches).max_in_flight(stage)
    except (UserError, ValueError, MemoryError, RuntimeError):
        return [_GENERAL]
    advice = ", ".join(f"{relief.change} ({size(relief.saved_nbytes)} less)" for relief in helpful)
    return [_needs(memory, depth), f"what would help, by that estimate: {advice}" if advice else _GENERAL]


def _needs(memory: StageMemory, depth: int) -> str:
    kinds = memory.kinds()
    activations = kinds.pop("activations")
    rest = ", ".join(f"{kind} {size(nbytes)}" for kind, nbytes in kinds.items() if nbytes)
    held = f"activations {size(activations)} ({depth} micro-batches in flight, {size(activations / depth)} each)"
    return f"it needs {size(memory.total)} or more: {held}, {rest}"


def _wanted(error: BaseException, device: torch.device | None) -> str:
    wanted = wanted_bytes(error)
    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    text = f"{size(wanted)} more were wanted" if wanted is not None else first
    try:
        free = free_bytes(device) if device is not None else 0
    except RuntimeError:  # a CUDA context that is not usable any more
        free = 0
    where = f" on {device}" if device is not None else ""
    return f"{text}, {size(free)} are free{where}" if free else f"{text}{where}"


def _changes(config: ClusterConfig, spec: ModelSpec, stage: int) -> Iterator[tuple[str, ClusterConfig]]:
    training, pipeline = config.training, config.pipeline
    smaller = next((n for n in range(training.micro_batch // 2, 0, -1) if training.micro_batch % n == 0), None)
    if smaller is not None:
        yield f"training.micro_batch: {smaller}", _changed(config, "training", micro_batch=smaller)
    if training.activation_checkpointing != "block":
        yield "training.activation_checkpointing: block", _changed(config, "training", activation_checkpointing="block")
    if config.memory.activations == "none" and spec.family in COAT_FAMILIES:
        yield "memory.activations: coat", _changed(config, "memory", activations="coat")
    if pipeline.schedule == "gpipe":
        yield "pipeline.schedule: 1f1b", _changed(config, "pipeline", schedule="1f1b")
    if pipeline.in_flight is not None:
        yield "pipeline.in_flight: null", _changed(config, "pipeline", in_flight=None)
    more = pipeline.stages + 1
    if isinstance(pipeline.in_flight, int | None) and more * pipeline.chunks <= spec.num_layers:
        yield f"pipeline.stages: {more}", _changed(config, "pipeline", stages=more, layers=None)
    layers = pipeline.layers
    if layers is not None and pipeline.stages > 1:
        yield from _one_layer_less(config, layers, stage)


def _one_layer_less(config: ClusterConfig, layers: list[int], stage: int) -> Iterator[tuple[str, ClusterConfig]]:
    """One layer of this stage's largest chunk goes to a chunk of the stage after it, or before."""
    fewer = list(layers)
    largest = max(chunks_of(config, stage), key=lambda chunk: fewer[chunk])
    other = largest + 1 if largest + 1 < len(fewer) else largest - 1
    if fewer[largest] > 1:
        fewer[largest], fewer[other] = fewer[largest] - 1, fewer[other] + 1
        yield f"one layer less here, pipeline.layers: {fewer}", _changed(config, "pipeline", layers=fewer)


def _snapshot_relief(config: ClusterConfig, now: StageMemory) -> Relief:
    return Relief("run.snapshot_buffers: 0", config.run.snapshot_buffers * now.snapshot)


def _changed(config: ClusterConfig, section: str, **values: object) -> ClusterConfig:
    """A copy with other values, which may not go with the rest."""
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})


def size(nbytes: float) -> str:
    """``1.25 GiB``; below a hundredth of that in MiB."""
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 0.01 * 2**30 else f"{nbytes / 2**20:.2f} MiB"
