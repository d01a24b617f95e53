"""The error of a worker whose device is out of memory: the failed allocation, the stage's needs, and helpful changes.

The needs are those of `stage_estimate`, so a lower bound; the saving of a change is the difference of two estimates.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tahq.config.cluster import ClusterConfig
from tahq.config.stage_estimate import chunks_of, stage_estimate
from tahq.errors import OutOfMemoryError, UserError
from tahq.memory.config import COAT_FAMILIES
from tahq.memory.free_memory import free_bytes
from tahq.models.model_spec import ModelSpec
from tahq.worker.assembly import computes_in_bf16, resolved_spec

_WANTED = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_GENERAL = (
    "use a smaller training.micro_batch, training.activation_checkpointing: block, more stages, or fewer layers on "
    "this stage (pipeline.layers)"
)


@dataclass(frozen=True, slots=True)
class Relief:
    """A change of the configuration, and the bytes that it would save on this stage."""

    change: str
    saved_nbytes: int


def out_of_memory(
    error: BaseException, stage: int, config: ClusterConfig | None = None, device: torch.device | None = None
) -> OutOfMemoryError:
    """The error that a worker ends with, in one line.

    Args:
        error: raised by the allocation.
        stage: the worker's.
        config: resolved; None if it was not known yet.
        device: where the stage computes; None if it was not known yet.
    """
    parts = [f"stage {stage} is out of memory: {_wanted(error, device)}"]
    parts += _estimate(config, stage, device) if config is not None and device is not None else [_GENERAL]
    return OutOfMemoryError("; ".join([*parts, "`tahq-launch --dry-run` shows the estimate of every stage"]))


def wanted_bytes(error: BaseException) -> int | None:
    """The size of the failed allocation according to torch's message; None if it does not say."""
    match = _WANTED.search(str(error))
    return int(float(match[1]) * _UNITS[match[2]]) if match else None


def reliefs(config: ClusterConfig, spec: ModelSpec, stage: int, *, bf16: bool, on_cpu: bool) -> list[Relief]:
    """Changes that would make this stage smaller, the largest saving first.

    Args:
        config: resolved.
        spec: its model.
        stage: the one that is out of memory.
        bf16: whether it computes under bf16 autocast.
        on_cpu: whether copies for checkpoints are in the memory that is full.
    """
    now = stage_estimate(config, spec, stage, bf16=bf16)
    found: list[Relief] = []
    if on_cpu and config.run.snapshot_every is not None:
        found.append(Relief("run.snapshot_buffers: 0", config.run.snapshot_buffers * now.snapshot))
    for change, changed in _changes(config, spec, stage):
        try:
            ClusterConfig.model_validate(changed.model_dump(mode="json"))
            # more stages: the largest of them, wherever that will be
            stages = range(changed.pipeline.stages) if changed.pipeline.stages != config.pipeline.stages else (stage,)
            then = max(stage_estimate(changed, spec, number, bf16=bf16).total for number in stages)
        except (UserError, ValueError):
            continue  # the rest of the configuration forbids it
        found.append(Relief(change, now.total - then))
    return sorted((relief for relief in found if relief.saved_nbytes > 0), key=lambda relief: -relief.saved_nbytes)


def _estimate(config: ClusterConfig, stage: int, device: torch.device) -> list[str]:
    """The needs and the advice; if they cannot be estimated, the advice without numbers."""
    bf16 = computes_in_bf16(config, device)
    try:
        spec = resolved_spec(config, None)
        memory = stage_estimate(config, spec, stage, bf16=bf16)
        helpful = reliefs(config, spec, stage, bf16=bf16, on_cpu=device.type == "cpu")
        depth = config.pipeline.actions(config.training.num_micro_batches).max_in_flight(stage)
    except (UserError, ValueError, MemoryError, RuntimeError):
        return [_GENERAL]
    kinds = memory.kinds()
    activations = kinds.pop("activations")
    rest = ", ".join(f"{kind} {size(nbytes)}" for kind, nbytes in kinds.items() if nbytes)
    held = f"activations {size(activations)} ({depth} micro-batches in flight, {size(activations / depth)} each)"
    advice = ", ".join(f"{relief.change} ({size(relief.saved_nbytes)} less)" for relief in helpful)
    return [
        f"it needs {size(memory.total)} or more: {held}, {rest}",
        f"what would help, by that estimate: {advice}" if advice else _GENERAL,
    ]


def _wanted(error: BaseException, device: torch.device | None) -> str:
    wanted = wanted_bytes(error)
    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    text = f"{size(wanted)} more were wanted" if wanted is not None else first
    if device is None:
        return text
    try:
        free = free_bytes(device)
    except RuntimeError:  # a CUDA context that cannot be used any more
        free = 0
    return f"{text}, {size(free)} are free on {device}" if free else f"{text} on {device}"


def _changes(config: ClusterConfig, spec: ModelSpec, stage: int) -> Iterator[tuple[str, ClusterConfig]]:
    """Changes that may help, each with the configuration that has it and need not be valid."""

    def changed(section: str, **values: object) -> tuple[str, ClusterConfig]:
        keys = ", ".join(f"{section}.{key}: {'null' if value is None else value}" for key, value in values.items())
        return keys, config.model_copy(update={section: getattr(config, section).model_copy(update=values)})

    training, pipeline = config.training, config.pipeline
    smaller = next((n for n in range(training.micro_batch // 2, 0, -1) if training.micro_batch % n == 0), None)
    if smaller is not None:
        yield changed("training", micro_batch=smaller)
    if training.activation_checkpointing != "block":
        yield changed("training", activation_checkpointing="block")
    if config.memory.activations == "none" and spec.family in COAT_FAMILIES:
        yield changed("memory", activations="coat")
    if pipeline.schedule == "gpipe":
        yield changed("pipeline", schedule="1f1b")
    if pipeline.in_flight is not None:
        yield changed("pipeline", in_flight=None)
    more = pipeline.stages + 1
    if isinstance(pipeline.in_flight, int | None) and more * pipeline.chunks <= spec.num_layers:
        yield f"pipeline.stages: {more}", changed("pipeline", stages=more, layers=None)[1]
    if pipeline.layers is not None and pipeline.stages > 1:
        # one layer of this stage's largest chunk goes to a chunk of the stage after it, or before
        fewer = list(pipeline.layers)
        largest = max(chunks_of(config, stage), key=lambda chunk: fewer[chunk])
        other = largest + 1 if largest + 1 < len(fewer) else largest - 1
        if fewer[largest] > 1:
            fewer[largest], fewer[other] = fewer[largest] - 1, fewer[other] + 1
            change, less = changed("pipeline", layers=fewer)
            yield f"one layer less here, {change}", less


def size(nbytes: float) -> str:
    """``1.25 GiB``; below a hundredth of that in MiB."""
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 0.01 * 2**30 else f"{nbytes / 2**20:.2f} MiB"
