"""What `tahq plan` asks the planner, made of a cluster.yaml, numbers and options."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import get_args

from tahq.comm.host_shaping import host_shaping
from tahq.comm.link.sending_order import First
from tahq.config.cluster import ClusterConfig
from tahq.config.stage_estimate import kept_code_nbytes, micro_batch_shape
from tahq.errors import ConfigError, UserError, brief
from tahq.memory.estimate import StepNumbers, stage_memory
from tahq.memory.galore.qgalore import divided_parameters
from tahq.memory.saved_tensors import (
    copied_by_block,
    copied_by_head,
    deferred_by_block,
    deferred_by_head,
    rotary_tables,
    saved_by_block,
    saved_by_embedding,
    saved_by_head,
)
from tahq.models.model_spec import ModelSpec
from tahq.models.partition import BlockRange
from tahq.models.slice import HEAD_WEIGHT, slice_parameters
from tahq.pipeline.schedule.generators import GENERATORS
from tahq.pipeline.update.optimizer import low_rank_settings, optimizer_nbytes
from tahq.plan.cluster_numbers import ClusterNumbers, host_labels
from tahq.plan.problem import HeldBytes, ModelNumbers, PipelinePlan, PlanProblem, divisors
from tahq.plan.search.codecs import LADDER
from tahq.quant import CodecSpec
from tahq.quant.spec import AqsgdSpec
from tahq_launch.plan.numbers import computes_bf16

_FP32 = 4


@dataclass(frozen=True, slots=True)
class PlanChoices:
    """What may be chosen, as a person said it; empty or None: as `tahq plan --help` says."""

    codecs: tuple[str, ...] = ()
    schedules: tuple[str, ...] = ()
    num_stages: int | None = None
    max_replicas: int = 1


def problem_of(config: ClusterConfig, spec: ModelSpec, cluster: ClusterNumbers, choices: PlanChoices) -> PlanProblem:
    """The planner's question.

    Args:
        config: resolved.
        spec: its model.
        cluster: the hosts to choose from.
        choices: what is left open.

    Raises:
        UserError: a codec or a schedule that there is not.
    """
    activations, gradients = _codecs(config, choices.codecs)
    schedules = _schedules(config, choices.schedules)
    return PlanProblem(
        model=model_numbers(config, spec, splits_backward="zero-bubble" in schedules),
        cluster=cluster,
        activations=activations,
        gradients=gradients,
        schedules=schedules,
        num_stages=choices.num_stages,
        max_replicas=choices.max_replicas,
        chunks_per_stage=max(2, config.pipeline.chunks),
        piece_nbytes=config.links.piece,
        firsts=_firsts(config),
    )


def _firsts(config: ClusterConfig) -> tuple[First, ...]:
    """Orders on an uplink that may be chosen: only where every uplink is held back, so that frames wait in tahq."""
    stages = config.pipeline.stages
    shapings = [host_shaping(config.links, config.hosts, stage, stages) for stage in range(stages)]
    own = config.links.first
    if any(shaping.up_bits_per_s == math.inf for shaping in shapings):
        return (own,)
    return (own, *(first for first in get_args(First) if first != own))


def _schedules(config: ClusterConfig, named: tuple[str, ...]) -> tuple[str, ...]:
    """1F1B first: of plans that are equally fast the first is taken.

    Zero-bubble keeps most of what checkpointing frees, and is refused where the backward updates.
    """
    unknown = [name for name in named if name not in GENERATORS]
    if unknown:
        raise UserError(f"--schedules: unknown schedule {brief(repr(unknown[0]))}; known: {', '.join(GENERATORS)}")
    may_split = config.training.activation_checkpointing == "none" and not config.training.is_fused
    return named or ("1f1b", "gpipe", *(["zero-bubble"] if may_split else []))


def _codecs(config: ClusterConfig, named: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """By direction, in the order given; `ladder` stands for the table of docs/planner.md."""
    if not named:
        return (config.wire.activations,), (config.wire.gradients,)
    by_direction = []
    for direction in ("activations", "gradients"):
        specs = [spec for name in named for spec in (LADDER[direction] if name == "ladder" else (name,))]
        by_direction.append(tuple(dict.fromkeys(_resolved(spec) for spec in specs if _goes(spec, direction))))
    if not all(by_direction):
        raise UserError("--codecs: none of these codecs takes gradients; add another")
    return by_direction[0], by_direction[1]


def _resolved(spec: str) -> str:
    try:
        return str(CodecSpec.parse(spec))
    except ConfigError as error:
        raise UserError(f"--codecs: {error}") from error


def _goes(spec: str, direction: str) -> bool:
    """AQ-SGD's caches are for activations alone."""
    parsed = CodecSpec.parse(_resolved(spec))
    return direction == "activations" or not (isinstance(parsed, AqsgdSpec) and parsed.has_cache)


def model_numbers(config: ClusterConfig, spec: ModelSpec, *, splits_backward: bool = False) -> ModelNumbers:
    """The model's sizes in bytes; blocks are taken to be alike, the largest standing for all.

    With split backwards each micro-batch in flight is taken to keep what it does at most, up to W.
    """
    training = config.training
    block, first, last = _parts(spec, partial(_kept, config, spec))
    held = partial(_held, config, spec, _decoded(config, spec))
    block_weights, _, _ = _parts(spec, partial(_weights, spec))
    return ModelNumbers(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        seq_len=config.data.seq_len,
        global_batch=training.global_batch,
        held={size: held(size, splits_backward=splits_backward) for size in divisors(training.global_batch)},
        block_nbytes=block,
        first_nbytes=first,
        last_nbytes=last,
        num_states=block / block_weights,
    )


def _parts(spec: ModelSpec, nbytes: Callable[[BlockRange], float]) -> tuple[float, float, float]:
    """What a block's parameters come to, and what the two ends add to theirs."""
    layers = spec.num_layers

    def of(start: int, stop: int) -> float:
        return float(nbytes(BlockRange(start, stop, layers)))

    if layers < 3:
        return of(0, layers) / layers, 0.0, 0.0
    block = of(1, 2)
    return block, of(0, 1) - block, of(layers - 1, layers) - block


def _kept(config: ClusterConfig, spec: ModelSpec, blocks: BlockRange) -> float:
    """Bytes of weights, copies and FP8 codes of them that are kept, gradients and what the optimizer keeps."""
    keeps_copies = config.training.activation_checkpointing == "none" and computes_bf16(config)
    numbers = StepNumbers(
        shape=micro_batch_shape(config, 1, bf16=keeps_copies),
        in_flight=0,
        optimizer_nbytes=partial(optimizer_nbytes, config.training),
        checkpoint_blocks=False,
        frame_nbytes=0,
        kept_code_nbytes=kept_code_nbytes(config, computes_bf16(config)),
        low_rank=low_rank_settings(config.training, config.run.seed),
    )
    memory = stage_memory(spec, blocks, numbers)
    return memory.weights + memory.gradients + memory.optimizer


def _weights(spec: ModelSpec, blocks: BlockRange) -> float:
    """Bytes of parameters in fp32."""
    return _FP32 * sum(map(math.prod, slice_parameters(spec, blocks).values()))


def _decoded(config: ClusterConfig, spec: ModelSpec) -> tuple[int, int]:
    """Elements of the largest low-rank matrix of the blocks, and of the head; 0: they have none."""
    settings = low_rank_settings(config.training, config.run.seed)
    if settings is None:
        return 0, 0
    _, covered = divided_parameters(spec, BlockRange(0, spec.num_layers, spec.num_layers), settings)
    largest = max((math.prod(each.shape) for each in covered.values() if not each.settings.is_end), default=0)
    return largest, math.prod(covered[HEAD_WEIGHT].shape) if HEAD_WEIGHT in covered else 0


def _held(
    config: ClusterConfig, spec: ModelSpec, decoded: tuple[int, int], micro_batch: int, *, splits_backward: bool
) -> HeldBytes:
    shape = micro_batch_shape(config, micro_batch, bf16=computes_bf16(config))
    tensor = _FP32 * shape.num_tokens * spec.hidden_size
    saved = max(saved_by_block(spec, block, shape) for block in range(spec.num_layers))
    again = config.training.activation_checkpointing == "block"
    element = _FP32 + (shape.element_nbytes if shape.bf16 else 0)
    (largest, head), matrix = decoded, 2 * shape.element_nbytes  # decoded, and its gradient
    put_off = (deferred_by_block(spec, shape), deferred_by_head(spec, shape)) if splits_backward else (0, 0)
    heads = copied_by_head(spec, shape) if again and not splits_backward else 0  # see `stage_memory`
    return HeldBytes(
        block=max(tensor if again else saved, put_off[0]),
        first=saved_by_embedding(spec, shape),
        last=max(saved_by_head(spec, shape), put_off[1]) + heads,
        stage=rotary_tables(spec, shape),
        tensor=tensor,
        workspace=element * shape.num_tokens * spec.vocab_size + matrix * head,
        again=(saved + copied_by_block(spec, shape) if again else 0) + matrix * largest,
    )


def given_plan(config: ClusterConfig, problem: PlanProblem) -> PipelinePlan | None:
    """The plan that the configuration is without any planning; None: the numbers are of other hosts, or it has chunks.

    Args:
        config: resolved.
        problem: for which hosts there are.
    """
    names = [host.name for host in problem.cluster.hosts]
    labels = host_labels(config.hosts, config.pipeline.stages)
    if config.pipeline.chunks > 1 or config.pipeline.layers is None or not set(labels) <= set(names):
        return None
    cuts = config.pipeline.stages - 1
    return PipelinePlan(
        hosts=tuple(names.index(label) for label in labels),
        layers=tuple(config.pipeline.layers),
        micro_batch=config.training.micro_batch,
        num_micro_batches=config.training.num_micro_batches,
        schedule=config.pipeline.schedule,
        depths=tuple(config.pipeline.depths or ()),
        activations=(config.wire.activations,) * cuts,
        gradients=(config.wire.gradients,) * cuts,
        first=config.links.first,
    )
