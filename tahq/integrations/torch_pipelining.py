"""Stages of `torch.distributed.pipelining` that send packed activations and gradients.

::

    from tahq.integrations.torch_pipelining import compress

    stage = compress(PipelineStage(model, rank, num_stages, device), activations="tah", gradients="fixed:bits=8")
    schedule = Schedule1F1B(stage, num_micro_batches, loss_fn=loss)

A compressed stage is the same object, under a class that overrides what torch calls a stage by, and nothing that begins
with an underscore: the operations that send and receive, what computes a micro-batch (where messages are decoded), and
what begins a step (which is counted). Shapes, buffers, autograd and the schedule stay torch's. Between stages of one
rank torch hands tensors over; nothing is sent there, and nothing is packed.

docs/integrations.md says more.
"""

import functools
from collections.abc import Sequence
from typing import Any, TypeVar, overload

import torch
from torch import distributed
from torch.distributed.pipelining import PipelineStage

from tahq.errors import ConfigError
from tahq.integrations.boundary_packing import ACTIVATION, GRADIENT, BoundaryPacking, Crossing
from tahq.quant import AUTO, Codec, get_codec

SUPPORTED = ("2.13",)
"""Releases of torch whose schedules have been tried, by tests/integrations."""

OVERRIDDEN = (
    "clear_runtime_states",
    "forward_one_chunk",
    "backward_one_chunk",
    "get_fwd_recv_ops",
    "get_fwd_send_ops",
    "get_bwd_recv_ops",
    "get_bwd_send_ops",
)

Stages = TypeVar("Stages", bound=Sequence[PipelineStage])


@overload
def compress(
    stages: PipelineStage,
    *,
    activations: str = ...,
    gradients: str = ...,
    seed: int = ...,
    step: int = ...,
    backend: str = ...,
    threads: int = ...,
) -> PipelineStage: ...


@overload
def compress(
    stages: Stages,
    *,
    activations: str = ...,
    gradients: str = ...,
    seed: int = ...,
    step: int = ...,
    backend: str = ...,
    threads: int = ...,
) -> Stages: ...


def compress(
    stages: PipelineStage | Sequence[PipelineStage],
    *,
    activations: str = "wf",
    gradients: str = "eden",
    seed: int = 0,
    step: int = 0,
    backend: str = AUTO,
    threads: int = 1,
) -> PipelineStage | Sequence[PipelineStage]:
    """Have stages send packed tensors; call it on every rank of the pipeline, before the schedule is built.

    It is a collective call: the ranks tell each other what they were given, so that a difference is an error here and
    not a damaged tensor later. Each rank calls it once, with its stage or with all of its stages.

    Args:
        stages: of this rank; changed in place.
        activations: codec spec (`tahq.quant`) for what goes forward.
        gradients: codec spec for what goes backward.
        seed: of randomised codecs, equal on all ranks of the pipeline. Give every replica of data parallelism its
            own, and all ranks of tensor parallelism the same.
        step: number of the training step that comes next, for a run that is resumed.
        backend: which implementation of the codecs, `auto` by device; ranks may differ.
        threads: how many the codecs' CPU backend may use.

    Returns:
        What was given.

    Raises:
        ConfigError: an unknown or stateful codec, another release of torch, no stages, stages of another kind, stages
            that are compressed already, or ranks that were told different things.
    """
    check_torch(torch.__version__)
    for name, number in (("seed", seed), ("step", step)):
        if not 0 <= number < 2**63:
            raise ConfigError(f"{name} must be from 0 to 2^63 - 1; got {number}")
    specs = (activations, gradients)
    given = [stages] if isinstance(stages, PipelineStage) else list(stages)
    if not given:
        raise ConfigError("compress needs a stage: every rank of a pipeline has one, and the others wait for this call")
    for stage in given:
        _check_stage(stage)
    made = [[_codec(spec, backend, threads) for spec in specs] for _ in given]
    said = {"activations": str(made[0][0].spec), "gradients": str(made[0][1].spec), "seed": seed, "step": step}
    _agree(said, given[0].group)
    for stage, codecs in zip(given, made, strict=True):
        stage.tahq_packing = BoundaryPacking(stage.stage_index, *codecs, seed=seed, step=step)  # type: ignore[attr-defined]
        stage.__class__ = _compressed(type(stage))
    return stages


class CompressedStage(PipelineStage):
    """What `compress` makes of a stage's class; not to be made directly."""

    tahq_packing: BoundaryPacking

    def clear_runtime_states(self) -> None:
        """Called by schedules at the beginning of every step, when they have said whether there is a backward pass."""
        super().clear_runtime_states()
        self.tahq_packing.begin_step(has_backward=self.has_backward)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[distributed.P2POp]:
        """Torch's, of packed activations."""
        return self.tahq_packing.pack(super().get_fwd_send_ops(fwd_chunk_id), self._after(ACTIVATION, fwd_chunk_id))

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[distributed.P2POp]:
        """Torch's, into buffers for packed activations."""
        return self.tahq_packing.expect(super().get_fwd_recv_ops(fwd_chunk_id), self._before(ACTIVATION, fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[distributed.P2POp]:
        """Torch's, of packed gradients."""
        return self.tahq_packing.pack(super().get_bwd_send_ops(bwd_chunk_id), self._before(GRADIENT, bwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[distributed.P2POp]:
        """Torch's, into buffers for packed gradients."""
        return self.tahq_packing.expect(super().get_bwd_recv_ops(bwd_chunk_id), self._after(GRADIENT, bwd_chunk_id))

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        """Decode the activations, which have arrived by now, and compute."""
        self.tahq_packing.unpack(self._before(ACTIVATION, fwd_chunk_id))
        return super().forward_one_chunk(fwd_chunk_id, *args, **options)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        """Decode the gradients, which have arrived by now, and compute."""
        self.tahq_packing.unpack(self._after(GRADIENT, bwd_chunk_id))
        return super().backward_one_chunk(bwd_chunk_id, *args, **options)

    def _before(self, kind: str, micro_batch: int) -> Crossing:
        return Crossing(kind, self.stage_index - 1, micro_batch)

    def _after(self, kind: str, micro_batch: int) -> Crossing:
        return Crossing(kind, self.stage_index, micro_batch)


def check_torch(version: str, stage_class: type = PipelineStage) -> None:
    """Refuse a torch that nobody has tried this with, or whose stages are built otherwise.

    Raises:
        ConfigError: which release it is, which there may be, what to do.
    """
    release = ".".join(version.partition("+")[0].split(".")[:2])
    advice = f"install one of these (pip install 'torch=={SUPPORTED[-1]}.*'), or train with tahq-launch"
    if release not in SUPPORTED:
        known = ", ".join(SUPPORTED)
        raise ConfigError(
            f"torch {version}: packed stages of torch.distributed.pipelining work with torch {known}, whose schedules "
            f"they rest on; {advice}; docs/integrations.md says how to try another"
        )
    missing = [name for name in OVERRIDDEN if not callable(getattr(stage_class, name, None))]
    if missing:
        raise ConfigError(f"torch {version}: {stage_class.__name__} has no {', '.join(missing)}; {advice}")


def _check_stage(stage: object) -> None:
    if not isinstance(stage, PipelineStage):
        raise ConfigError(f"compress takes PipelineStage, or a list of them; got {type(stage).__name__}")
    if isinstance(stage, CompressedStage):
        raise ConfigError(f"stage {stage.stage_index} is compressed already; call compress once")


def _codec(spec: str, backend: str, threads: int) -> Codec:
    codec = get_codec(spec, backend=backend, threads=threads)
    if codec.is_stateful:
        raise ConfigError(
            f"{spec} remembers samples, and torch's stages do not know which samples they compute; use "
            f"{codec.spec.name}:cache=none, another codec, or tahq-launch"
        )
    return codec


def _agree(said: dict[str, object], group: distributed.ProcessGroup | None) -> None:
    """Compare what every rank of the pipeline was given."""
    everybody: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(everybody, said, group=group)
    for rank, other in enumerate(everybody):
        differing = [f"{name} {other[name]!r} and {said[name]!r}" for name in said if other[name] != said[name]]
        if differing:
            here = distributed.get_rank(group)
            raise ConfigError(f"ranks {rank} and {here} of the pipeline compress differently: {'; '.join(differing)}")


@functools.cache
def _compressed(kind: type[PipelineStage]) -> type[PipelineStage]:
    """The class of compressed stages for a class of stages, which may be the user's own."""
    if kind is PipelineStage:
        return CompressedStage
    return type(f"Compressed{kind.__name__}", (CompressedStage, kind), {})
