"""The planner's problem, from a cluster.yaml, numbers of hosts and the options of `tahq plan`."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, get_args

from tahq.comm.link.spec import First
from tahq.config.cluster import ClusterConfig
from tahq.config.stage_estimate import attached_nbytes, autocast_dtype, kept_code_nbytes, micro_batch_shape
from tahq.errors import ConfigError, UserError, brief
from tahq.memory.config import Offload, Recompute
from tahq.memory.estimate import StepNumbers, divided_nbytes, fp32_gradient, keeps_copies, on_host, stage_memory
from tahq.memory.galore.qgalore import divided_parameters
from tahq.memory.saved_tensors import (
    MicroBatchShape,
    attention_masks,
    copied_by_block,
    copied_by_head,
    deferred_by_block,
    deferred_by_head,
    head_workspace,
    recomputed_by_block,
    rotary_tables,
    saved_by_block,
    saved_by_embedding,
    saved_by_head,
)
from tahq.memory.stored_slice import decoded_nbytes
from tahq.models.model_spec import ModelSpec
from tahq.models.partition import BlockRange
from tahq.models.slice import HEAD_WEIGHT, slice_parameters
from tahq.pipeline.optimizer import low_rank_settings, optimizer_nbytes
from tahq.pipeline.schedule.generators import GENERATORS
from tahq.plan.cluster_numbers import ClusterNumbers, host_labels
from tahq.plan.problem import HeldBytes, MemoryOption, ModelNumbers, PipelinePlan, PlanProblem, divisors
from tahq.plan.search.codecs import LADDER
from tahq.quant import CodecSpec
from tahq.quant.spec import AqsgdSpec
from tahq_launch.plan.numbers import stage_device

_FP32 = 4
REPEATED: Mapping[str, Mapping[Recompute, float]] = {
    "cpu": {"none": 0.0, "norm": 0.4, "ffn": 0.8, "block": 1.0},
    "cuda": {"none": 0.0, "norm": 0.05, "ffn": 0.5, "block": 1.0},
}
"""Levels of `memory.recompute` that a plan may choose, and the share of a block's forward that its backward is taken to
repeat, by type of device. It is not measured at start; with a forward as a third of the time without recomputation it
was 0.2 to 0.3, 0.6 and 0.6 to 0.7 on two CPU cores, and 0, 0.4 to 0.5 and 0.8 to 0.9 on an H200 (bench_recompute)."""
OFFLOADED: tuple[tuple[Offload, ...], ...] = (
    (),
    ("m", "v"),
    ("m", "v", "master"),
    ("m", "v", "weights"),
    ("m", "v", "master", "weights"),
    ("m", "v", "master", "weights", "gradients"),
    ("m", "v", "weights", "gradients"),
)
"""What a plan may choose for `memory.offload`; the residual stream, too, where blocks are recomputed."""


@dataclass(frozen=True, slots=True)
class PlanChoices:
    """What the planner may choose; empty or None: as `tahq plan --help` says, but of replicas one."""

    codecs: tuple[str, ...] = ()
    schedules: tuple[str, ...] = ()
    num_stages: int | None = None
    max_replicas: int | None = None


def problem_of(
    config: ClusterConfig, spec: ModelSpec, cluster: ClusterNumbers, choices: PlanChoices, shares: int = 1
) -> PlanProblem:
    """The planner's problem of a resolved configuration; UserError for an unknown codec or schedule.

    `shares`: replicas of this plan that divide the optimizer states (`ClusterConfig.optimizer_shares`); above 1 no
    offload is chosen.
    """
    schedules = _schedules(config, choices.schedules)
    splits, may_offload = "zero-bubble" in schedules, shares == 1 and offloads(config, cluster)
    model = model_numbers(config, spec, splits_backward=splits, shares=shares, offloads=may_offload)
    most = choices.max_replicas or 1
    if most > 1:  # replicas sum gradients on the device
        kept = tuple(each for each in model.options if "gradients" not in each.offload)
        model = replace(model, options=kept or model.options)
    return PlanProblem(
        model=model,
        cluster=cluster,
        activations=_codecs(choices.codecs, "activations", config.wire.activations),
        gradients=_codecs(choices.codecs, "gradients", config.wire.gradients),
        schedules=schedules,
        num_stages=choices.num_stages,
        max_replicas=most,
        all_reduce=config.wire.all_reduce,
        chunks_per_stage=max(2, config.pipeline.chunks),
        piece_nbytes=config.links.piece,
        firsts=_firsts(config),
    )


def _firsts(config: ClusterConfig) -> tuple[First, ...]:
    """Orders on an uplink that may be chosen: more than one only if every uplink is limited, so that frames queue."""
    stages, own = config.pipeline.stages, config.links.first
    shapings = [config.shaping(stage) for stage in range(stages)]
    if any(shaping.up_bits_per_s == math.inf for shaping in shapings):
        return (own,)
    return (own, *(first for first in get_args(First) if first != own))


def _schedules(config: ClusterConfig, given: tuple[str, ...]) -> tuple[str, ...]:
    """1F1B first: of equally fast plans the first is taken.

    Zero-bubble keeps most of the memory that checkpointing frees, and is refused where the backward updates.
    """
    unknown = [name for name in given if name not in GENERATORS]
    if unknown:
        raise UserError(f"--schedules: unknown schedule {brief(repr(unknown[0]))}; known: {', '.join(GENERATORS)}")
    return given or ("1f1b", "gpipe", *(["zero-bubble"] if _may_split(config) else []))


def _may_split(config: ClusterConfig) -> bool:
    can_split = not (config.training.is_fused or config.training.compile)
    return can_split and config.memory.recompute_of() in ("none", "swiglu", "norm")


def _codecs(given: tuple[str, ...], direction: str, usual: str) -> tuple[str, ...]:
    """The codecs of one direction, in the order given; `ladder` stands for the table of docs/dev/planner.md."""
    if not given:
        return (usual,)
    codecs: dict[str, None] = {}
    for text in [spec for name in given for spec in (LADDER[direction] if name == "ladder" else (name,))]:
        try:
            spec = CodecSpec.parse(text)
        except ConfigError as error:
            raise UserError(f"--codec: {error}") from error
        # AQ-SGD's caches are for activations only
        if direction == "activations" or not (isinstance(spec, AqsgdSpec) and spec.has_cache):
            codecs[str(spec)] = None
    if not codecs:
        raise UserError("--codec: none of these codecs takes gradients; add another")
    return tuple(codecs)


def model_numbers(
    config: ClusterConfig, spec: ModelSpec, *, splits_backward: bool = False, shares: int = 1, offloads: bool = False
) -> ModelNumbers:
    """The model's sizes in bytes; the largest block stands for all blocks. `shares` as of `problem_of`.

    With split backwards micro-batches count with what they hold between the gradients of inputs and of weights.
    `offloads`: whether `memory.offload` may be chosen.
    """
    is_open, first_trainable, trained = config.memory.recompute == "auto", spec.first_trainable, _trained(spec)
    spec = replace(spec, first_trainable=0)
    every = []
    for each in _memory_choices(config, spec, offloads=offloads):
        option = _memory_option(each, spec, is_open=is_open, splits_backward=splits_backward, shares=shares)
        if first_trainable:
            option = _with_frozen(option, each, spec, shares)
        every.append(replace(option, stages=_stages(config, each)))
    return ModelNumbers(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        seq_len=config.training.rows_per_sample * config.data.seq_len,
        global_batch=config.training.global_batch,
        options=tuple(every),
        first_trainable=first_trainable,
        attached_nbytes=max(attached_nbytes(config, spec)),
        trained=trained,
        num_forwards=config.training.num_forwards,
    )


def offloads(config: ClusterConfig, cluster: ClusterNumbers) -> bool:
    """Whether stages are on GPUs whose copies from and to host memory were measured."""
    return _device(config) == "cuda" and any(host.host_link for host in cluster.hosts)


def _memory_choices(config: ClusterConfig, spec: ModelSpec, *, offloads: bool) -> Iterator[ClusterConfig]:
    """The configuration with each choice of what is open of `memory.recompute` and `memory.offload`, that which
    costs no time first; of those that the rest of it allows. Of lists by stage, with each of their entries."""
    memory = config.memory
    levels: list[Any] = [*dict.fromkeys(memory.recompute)] if _is_by_stage(config)[0] else [memory.recompute]
    if memory.recompute == "auto":
        has_levels = memory.activations == "none" and spec.layout.layers_like is not None
        levels = list(REPEATED["cpu"]) if has_levels else ["none", "block"]
        levels = levels if config.emulate.sleep is None else ["none"]
    sets: list[Any] = [*dict.fromkeys(memory.offload)] if _is_by_stage(config)[1] else [memory.offload]
    if memory.offload == "auto":
        sets = list(OFFLOADED) if offloads else [()]
    for offload, level in product(sets, levels):
        of_block = offload and memory.offload == "auto" and level == "block"
        for which in (offload, ("residual", *offload)) if of_block else (offload,):
            changed = memory.model_copy(update={"recompute": level, "offload": which})
            each = config.model_copy(update={"memory": changed})
            if not which or _is_allowed(each):
                yield each


def _is_by_stage(config: ClusterConfig) -> tuple[bool, bool]:
    """Whether `memory.recompute` and `memory.offload` are lists with an entry for each stage."""
    memory = config.memory
    return isinstance(memory.recompute, list), any(isinstance(each, tuple) for each in memory.offload)


def _stages(config: ClusterConfig, choice: ClusterConfig) -> tuple[int, ...] | None:
    """Those for which lists by stage have this choice; None: there are none."""
    levels, sets = _is_by_stage(config)
    if not (levels or sets):
        return None
    return tuple(
        stage
        for stage in range(config.pipeline.stages)
        if (not levels or config.memory.recompute_of(stage) == choice.memory.recompute_of())
        and (not sets or config.memory.offload_of(stage) == choice.memory.offload_of())
    )


def _is_allowed(config: ClusterConfig) -> bool:
    try:
        ClusterConfig.model_validate(config.model_dump(mode="json"))
    except ValueError:
        return False
    return "master" not in config.memory.offload_of() or autocast_dtype(config, _device(config)) is not None


def _memory_option(
    config: ClusterConfig, spec: ModelSpec, *, is_open: bool, splits_backward: bool, shares: int
) -> MemoryOption:
    """`is_open`: the level was chosen, so that times were measured without."""
    layers, level = spec.num_layers, config.memory.recompute_of()
    first, last = BlockRange(0, 1, layers), BlockRange(layers - 1, layers, layers)
    if layers < 3:
        whole = BlockRange(0, layers, layers)
        block, ends = [nbytes / layers for nbytes in _state_nbytes(config, spec, whole, shares)], [(0.0, 0.0)] * 2
        middle, count = whole, layers
    else:
        middle, count = BlockRange(1, 2, layers), 1
        block = [*_state_nbytes(config, spec, middle, shares)]
        gradient = _fp32_gradient(config, spec, middle)
        ends = []
        for end in (first, last):
            own, own_host = _state_nbytes(config, spec, end, shares)
            ends.append((own - block[0] + _fp32_gradient(config, spec, end) - gradient, own_host - block[1]))
    shape = micro_batch_shape(config, spec, 1, device=_device(config))
    host = on_host(spec, middle, _offload_numbers(config, shape))
    may_split = _may_split(config) or not is_open
    batch = config.training.global_batch
    return MemoryOption(
        held={
            size: _held(config, spec, size, splits_backward=splits_backward and may_split) for size in divisors(batch)
        },
        block_nbytes=block[0],
        first_nbytes=ends[0][0],
        last_nbytes=ends[1][0],
        host_block_nbytes=block[1],
        host_first_nbytes=ends[0][1],
        host_last_nbytes=ends[1][1],
        fetched=(host.copies if shape.reads_copies else host.values) / count,
        exchanged=host.gradients / count,
        updated=(host.moments + host.values + max(host.copies, 2 * host.gradients)) / count,
        repeated=REPEATED[_device(config)][level] if is_open else 0.0,
        splits=may_split,
        recompute=level,
        offload=tuple(name for name in get_args(Offload) if name in config.memory.offload_of()),
    )


def _with_frozen(option: MemoryOption, config: ClusterConfig, spec: ModelSpec, shares: int) -> MemoryOption:
    """The option of a model whose embedding and first blocks are not trained."""
    layers, frozen = spec.num_layers, replace(spec, first_trainable=spec.num_layers)
    if layers < 3:  # as much as others, with the ends
        return replace(option, frozen_nbytes=option.block_nbytes, host_frozen_nbytes=option.host_block_nbytes)
    block, first = (_state_nbytes(config, frozen, BlockRange(n, n + 1, layers), shares) for n in (1, 0))
    return replace(
        option,
        first_nbytes=first[0] - block[0],
        host_first_nbytes=first[1] - block[1],
        frozen_nbytes=block[0],
        host_frozen_nbytes=block[1],
    )


def _device(config: ClusterConfig) -> str:
    return stage_device(config, 0).type


def _state_nbytes(config: ClusterConfig, spec: ModelSpec, blocks: BlockRange, shares: int) -> tuple[float, float]:
    """Bytes of weights, their copies and FP8 codes, gradients and optimizer states, on device and host.

    Without gradients where an update is fused: only one is there at a time, see `_held`.
    """
    numbers = _state_numbers(config, spec, shares)
    memory = stage_memory(spec, blocks, numbers)
    divided = memory.optimizer + divided_nbytes(spec, blocks, replace(numbers, shards=config.memory.shard))
    whole = memory.weights + memory.gradients * (not numbers.is_fused) + memory.optimizer
    return whole - divided * (1 - 1 / shares), float(memory.host_total)


def _state_numbers(config: ClusterConfig, spec: ModelSpec, shares: int) -> StepNumbers:
    device = _device(config)
    shape = micro_batch_shape(config, spec, 1, device=device)
    lends = shares > 1 and "weights" in config.memory.shard
    if shape.recompute == "block" and not (lends or keeps_copies(config.memory.offload_of())):
        shape = replace(shape, copies_weights=False, copies_head=False)  # each micro-batch makes its own, see `_held`
    return replace(
        _offload_numbers(config, shape),
        optimizer_nbytes=partial(optimizer_nbytes, config.training),
        kept_code_nbytes=kept_code_nbytes(config, device),
        gradients=config.memory.gradients,
    )


def _offload_numbers(config: ClusterConfig, shape: MicroBatchShape) -> StepNumbers:
    """With what all stages offload."""
    which = config.memory.offload_of()
    return StepNumbers(
        shape=shape,
        in_flight=0,
        optimizer_nbytes=lambda shapes: 0,
        frame_nbytes=0,
        low_rank=low_rank_settings(config.training, config.run.seed),
        is_fused=config.training.is_fused,
        offload=which,
        moments_nbytes=partial(optimizer_nbytes, config.training, moments=which),
    )


def _trained(spec: ModelSpec) -> tuple[float, float, float]:
    """See `ModelNumbers.trained`."""
    layers, within = spec.num_layers, f"{spec.layout.trunk}.{spec.layout.blocks}."

    def trained(block: int, *, of_block: bool) -> float:
        shapes = slice_parameters(spec, BlockRange(block, block + 1, layers))
        return float(
            sum(
                shapes[name].numel() for name in shapes if name.startswith(within) == of_block and spec.is_trained(name)
            )
        )

    first = trained(0, of_block=False) if layers > 1 else 0.0
    return trained(min(spec.first_trainable, layers - 1), of_block=True), first, trained(layers - 1, of_block=False)


def _decoded_elements(config: ClusterConfig, spec: ModelSpec) -> tuple[int, int]:
    """Elements of the largest low-rank matrix of the blocks, and of the head; 0: they have none."""
    settings = low_rank_settings(config.training, config.run.seed)
    if settings is None:
        return 0, 0
    _, covered = divided_parameters(spec, BlockRange(0, spec.num_layers, spec.num_layers), settings)
    largest = max((math.prod(each.shape) for each in covered.values() if not each.settings.is_end), default=0)
    return largest, math.prod(covered[HEAD_WEIGHT].shape) if HEAD_WEIGHT in covered else 0


def _held(config: ClusterConfig, spec: ModelSpec, micro_batch: int, *, splits_backward: bool) -> HeldBytes:
    shape = micro_batch_shape(config, spec, micro_batch, device=_device(config))
    tensor = _FP32 * shape.num_tokens * spec.hidden_size
    saved = max(saved_by_block(spec, block, shape) for block in range(spec.num_layers))
    copies = shape.recompute == "block"  # which nothing else shares, see `stage_memory`
    largest, head = _decoded_elements(config, spec)
    matrix = 2 * shape.element_nbytes  # decoded, and its gradient
    of_base = decoded_nbytes(spec, shape.element_nbytes, shape.weight_nbytes)
    of_reference = 4 * (config.training.num_forwards - 1) * shape.residual_nbytes * shape.num_tokens * spec.hidden_size
    deferred = (deferred_by_block(spec, shape), deferred_by_head(spec, shape)) if splits_backward else (0, 0)
    heads = copied_by_head(spec, shape) if copies and not splits_backward else 0
    head_kept = saved_by_head(spec, shape)
    logits = head_workspace(spec, shape, adds_in_place=splits_backward or config.memory.gradients == "fp8")
    some = min(1, spec.num_layers - 1)  # a block without the embedding, where there is one
    gradient = _fp32_gradient(config, spec, BlockRange(some, some + 1, spec.num_layers))
    again = max(recomputed_by_block(spec, block, shape) for block in range(spec.num_layers))
    of_one_block = copied_by_block(spec, shape) if copies and not keeps_copies(config.memory.offload_of()) else 0
    # with one end of the model, as first and last stage have
    blocks = BlockRange(0, spec.num_layers, spec.num_layers + (config.pipeline.stages > 1))
    host = on_host(spec, blocks, _offload_numbers(config, shape))
    saved -= host.stream
    if config.training.is_fused:
        gradient += stage_memory(spec, blocks, _state_numbers(config, spec, 1)).gradients

    def workspace(nbytes: int) -> int:
        return max(nbytes + gradient + host.lent_to_blocks, host.lent_to_update) + of_one_block + of_reference

    return HeldBytes(
        block=saved,
        first=saved_by_embedding(spec, shape),
        last=head_kept + heads,
        block_put_off=max(0, deferred[0] - saved),
        last_put_off=max(0, deferred[1] - head_kept),
        stage=rotary_tables(spec, shape) + attention_masks(spec, range(spec.num_layers), shape),
        tensor=tensor,
        workspace=workspace(logits + matrix * head),
        again=workspace(again + matrix * largest + of_base),
        streamed=host.stream,
    )


def _fp32_gradient(config: ClusterConfig, spec: ModelSpec, blocks: BlockRange) -> int:
    numels = {name: shape.numel() for name, shape in slice_parameters(spec, blocks).items()}
    return fp32_gradient(spec, numels, config.memory.gradients)


def given_plan(config: ClusterConfig, problem: PlanProblem) -> PipelinePlan | None:
    """The configuration as a plan, unchanged; None: it has chunks, or the numbers are of other hosts."""
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
        schedule=config.pipeline.first_schedule,
        depths=tuple(config.pipeline.first_depths or ()),
        activations=(config.wire.activations,) * cuts,
        gradients=(config.wire.gradients,) * cuts,
        first=config.links.first,
    )
