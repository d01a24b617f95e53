"""Stages of `torch.distributed.pipelining` that send packed activations and gradients.

::

    from tahq.integrations.torch_pipelining import compress

    stage = compress(PipelineStage(model, rank, num_stages, device), activations="tah", gradients="fixed:bits=8")
    schedule = Schedule1F1B(stage, num_micro_batches, loss_fn=loss)

A compressed stage is the same object under a class that overrides public methods only: the operations that send and
receive, what computes a micro-batch (where messages are decoded), and what begins a step (which is counted). Shapes,
buffers, autograd and the schedule stay torch's; the agreed shapes are read where torch keeps them, `_stage_meta`.
Between stages of one rank torch hands tensors over; nothing is sent there, and nothing is packed.

See docs/how-to/torchtitan.md.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import distributed
from torch.distributed.pipelining import PipelineStage

from tahq.errors import CodecError, ConfigError
from tahq.integrations.boundary_packing import ACTIVATION, GRADIENT, BoundaryPacking, Crossing, Slot
from tahq.quant import AUTO, Codec, get_codec
from tahq.quant.quality import FLOOR

SUPPORTED = ("2.13",)
"""Releases of torch whose schedules tests/integrations has tried."""

OVERRIDDEN = (
    "clear_runtime_states",
    "forward_one_chunk",
    "backward_one_chunk",
    "get_fwd_recv_ops",
    "get_fwd_send_ops",
    "get_bwd_recv_ops",
    "get_bwd_send_ops",
)

Stages = TypeVar("Stages", bound=PipelineStage | Sequence[PipelineStage])


def compress(
    stages: Stages,
    *,
    activations: str = FLOOR.activations,
    gradients: str = FLOOR.gradients,
    seed: int = 0,
    step: int = 0,
    backend: str = AUTO,
    threads: int = 1,
) -> Stages:
    """Have stages send packed tensors; call it on every rank of the pipeline, before the schedule is built.

    It is a collective call: the ranks compare their arguments, so that a difference is an error here and not a damaged
    tensor later. Each rank calls it once, with its stage or with all of its stages.

    Args:
        stages: of this rank; changed in place.
        activations: codec spec (`tahq.quant`) for what goes forward.
        gradients: codec spec for what goes backward.
        seed: of randomised codecs, equal on all ranks of the pipeline. Give every replica of data parallelism its
            own, and all ranks of tensor parallelism the same.
        step: number of the training step that comes next, for a run that is resumed.
        backend: implementation of the codecs, `auto` by device; ranks may differ.
        threads: of the codecs' CPU backend.

    Returns:
        `stages`.

    Raises:
        ConfigError: an unknown or stateful codec, a backend that does not run on a stage's device, another release of
            torch, no stages, an argument that is not a stage, a stage that is given twice or is compressed already, or
            ranks with different arguments. No stage was changed then.
    """
    check_torch(torch.__version__)
    given = _given(stages)
    seed, step, threads = _number("seed", seed, 0), _number("step", step, 0), _number("threads", threads, 1)
    specs = {"activations": activations, "gradients": gradients}
    made = [[_codec(key, spec, backend, threads, stage.device) for key, spec in specs.items()] for stage in given]
    kinds = [_compressed(type(stage)) for stage in given]
    settings = {"activations": str(made[0][0].spec), "gradients": str(made[0][1].spec), "seed": seed, "step": step}
    _agree(settings, given[0].group)
    for stage, codecs, kind in zip(given, made, kinds, strict=True):
        stage.tahq_packing = BoundaryPacking(stage.stage_index, *codecs, seed=seed, step=step)  # type: ignore[attr-defined]
        stage.__class__ = kind
    return stages


class CompressedStage(PipelineStage):
    """The class of a compressed stage. `compress` assigns it; it has no constructor of its own."""

    tahq_packing: BoundaryPacking

    def clear_runtime_states(self) -> None:
        """Called by schedules at the beginning of every step, when they have said whether there is a backward pass."""
        super().clear_runtime_states()
        self.tahq_packing.begin_step(has_backward=self.has_backward)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[distributed.P2POp]:
        """Torch's sends, of packed activations."""
        ops, meta = super().get_fwd_send_ops(fwd_chunk_id), self._stage_meta
        slots = _activations(meta.outputs or (), meta.output_grads or ())
        return self.tahq_packing.pack(ops, self._after(ACTIVATION, fwd_chunk_id), slots)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[distributed.P2POp]:
        """Torch's receives, into buffers for packed activations."""
        ops = super().get_fwd_recv_ops(fwd_chunk_id)
        slots = _activations(self._stage_meta.inputs or (), self._input_grads())
        return self.tahq_packing.expect(ops, self._before(ACTIVATION, fwd_chunk_id), slots)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[distributed.P2POp]:
        """Torch's sends, of packed gradients."""
        ops = super().get_bwd_send_ops(bwd_chunk_id)
        return self.tahq_packing.pack(ops, self._before(GRADIENT, bwd_chunk_id), _gradients(self._input_grads()))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[distributed.P2POp]:
        """Torch's receives, into buffers for packed gradients."""
        ops = super().get_bwd_recv_ops(bwd_chunk_id)
        expected = _gradients(self._stage_meta.output_grads or ())
        return self.tahq_packing.expect(ops, self._after(GRADIENT, bwd_chunk_id), expected)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        """Decode the activations, which have arrived by now, and compute."""
        self.tahq_packing.unpack(self._before(ACTIVATION, fwd_chunk_id))
        return super().forward_one_chunk(fwd_chunk_id, *args, **options)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        """Decode the gradients, which have arrived by now, and compute."""
        self.tahq_packing.unpack(self._after(GRADIENT, bwd_chunk_id))
        return super().backward_one_chunk(bwd_chunk_id, *args, **options)

    def _input_grads(self) -> list[Any]:
        """The agreed shape of each input's gradient, None where none is sent; empty before all training."""
        if self._stage_meta.input_grads is None:
            return []
        return [self._get_grad_send_meta(index) for index in range(len(self._stage_meta.inputs or ()))]

    def _before(self, kind: str, micro_batch: int) -> Crossing:
        return Crossing(kind, self.stage_index - 1, micro_batch)

    def _after(self, kind: str, micro_batch: int) -> Crossing:
        return Crossing(kind, self.stage_index, micro_batch)


def _activations(agreed: Sequence[Any], gradients: Sequence[Any]) -> list[Slot]:
    return [
        Slot(tensor.shape, tensor.dtype, has_gradient=gradient is not None)
        for tensor, gradient in zip(agreed, (*gradients, *(None,) * len(agreed)), strict=False)
    ]


def _gradients(agreed: Sequence[Any]) -> list[Slot]:
    return [Slot(tensor.shape, tensor.dtype, has_gradient=True) for tensor in agreed if tensor is not None]


def check_torch(version: str, stage_class: type = PipelineStage) -> None:
    """Raise ConfigError for an untried release of torch, or one whose stages lack an overridden method."""
    release = ".".join(version.partition("+")[0].split(".")[:2])
    advice = f"install one of these (pip install 'torch=={SUPPORTED[-1]}.*'), or train with tahq-launch"
    if release not in SUPPORTED:
        known = ", ".join(SUPPORTED)
        raise ConfigError(
            f"torch {version}: packed stages of torch.distributed.pipelining work with torch {known}, on whose "
            f"schedules they depend; {advice}; docs/how-to/torchtitan.md says how to try another"
        )
    missing = [name for name in OVERRIDDEN if not callable(getattr(stage_class, name, None))]
    if missing:
        raise ConfigError(f"torch {version}: {stage_class.__name__} has no {', '.join(missing)}; {advice}")


def _given(stages: object) -> list[PipelineStage]:
    listed = list(stages) if isinstance(stages, Sequence) and not isinstance(stages, str) else [stages]
    if not listed:
        raise ConfigError("compress needs a stage: every rank of a pipeline has one, and the others wait for this call")
    given: list[PipelineStage] = []
    for stage in listed:
        if not isinstance(stage, PipelineStage):
            raise ConfigError(f"compress takes PipelineStage, or a list of them; got {type(stage).__name__}")
        if isinstance(stage, CompressedStage):
            raise ConfigError(f"stage {stage.stage_index} is compressed already; call compress once")
        if any(stage is other for other in given):
            raise ConfigError(f"stage {stage.stage_index} is given twice; list every stage of this rank once")
        given.append(stage)
    return given


def _number(name: str, value: object, least: int) -> int:
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if not least <= number < 2**63:
        raise ConfigError(f"{name} must be a whole number from {least} to 2^63 - 1; got {value!r}")
    return number


def _codec(key: str, spec: object, backend: str, threads: int, device: torch.device) -> Codec:
    if not isinstance(spec, str):
        raise ConfigError(f"{key} must be a codec spec, such as 'tah'; got {spec!r}")
    codec = get_codec(spec, backend=backend, threads=threads)
    try:
        codec.encode(torch.empty(0, device=device))  # raises if the backend does not support the device
    except CodecError as error:
        raise ConfigError(f"{key}: {error}") from error
    if codec.is_stateful:
        raise ConfigError(
            f"{spec} remembers samples, and torch's stages do not know which samples they compute; use "
            f"{codec.spec.name}:cache=none, another codec, or tahq-launch"
        )
    return codec


def _agree(mine: dict[str, object], group: distributed.ProcessGroup | None) -> None:
    """Raise ConfigError if another rank of the pipeline has other settings."""
    by_rank: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(by_rank, mine, group=group)
    for rank, other in enumerate(by_rank):
        differing = [f"{name} {other[name]!r} and {mine[name]!r}" for name in mine if other[name] != mine[name]]
        if differing:
            here = distributed.get_rank(group)
            raise ConfigError(f"ranks {rank} and {here} of the pipeline compress differently: {'; '.join(differing)}")


@functools.cache
def _compressed(kind: type[PipelineStage]) -> type[PipelineStage]:
    """The class of compressed stages for a class of stages, which may be the user's own."""
    if kind is PipelineStage:
        return CompressedStage
    return type(f"Compressed{kind.__name__}", (CompressedStage, kind), {})
