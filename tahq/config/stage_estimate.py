"""The memory of a configuration's stages, by `memory/estimate.py`, and changes that would save some."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import get_args

import torch

from tahq.config.cluster import ClusterConfig
from tahq.errors import ModelError, UserError
from tahq.memory.config import COAT_FAMILIES, EXACTLY_STORED, Offload, Shard
from tahq.memory.estimate import StageMemory, StepNumbers, combined, stage_memory
from tahq.memory.saved_tensors import MicroBatchShape
from tahq.memory.small_floats.block_codes import FORMATS
from tahq.models.costs import step_costs
from tahq.models.experts.load_balance import router_loss_of
from tahq.models.families import FAMILIES
from tahq.models.model_spec import ModelSpec
from tahq.models.partition import BlockRange, divide
from tahq.models.slice import slice_parameters
from tahq.pipeline.optimizer import low_rank_settings, optimizer_nbytes
from tahq.pipeline.schedule.schedule import Action, ActionKind, Schedule
from tahq.quant import get_codec

FIRST_WITH_BF16 = (8, 0)
"""Compute capability of GPUs, Ampere's."""
MOST_LOGITS_NBYTES = 2**31
"""Of a chunk of the loss, in fp32, where `memory.loss_chunks` is open; on CUDA they are in bf16, half as large."""


def autocast_dtype(config: ClusterConfig, device: torch.device | str) -> torch.dtype | None:
    """The type of a stage's products under autocast (`training.precision`; bf16 under fp8); None: they are in fp32.

    A GPU is asked for bf16 only if `device` has a number: that makes a CUDA context.
    """
    precision, device = config.training.precision, torch.device(device)
    if precision == "auto":
        precision = "bf16" if device.type == "cuda" else "fp32"
        if device.index is not None and lacks_bf16(device) and not config.fp16_conflict:
            precision = "fp16"
    return {"fp32": None, "fp16": torch.float16}.get(precision, torch.bfloat16)


def lacks_bf16(device: torch.device) -> bool:
    """Whether a device is a GPU that only emulates bf16."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) < FIRST_WITH_BF16


def block_ranges(config: ClusterConfig, spec: ModelSpec) -> tuple[BlockRange, ...]:
    """The blocks of every chunk; a resolved configuration lists them, another is divided by counted cost."""
    return divide(step_costs(spec, config.data.seq_len), config.pipeline.num_chunks, config.pipeline.layers)


def frozen_chunks(config: ClusterConfig, spec: ModelSpec) -> int:
    """Chunks, from the first on, in which nothing is trained, so that they have no backward."""
    return sum(blocks.is_frozen(spec.first_trainable) for blocks in block_ranges(config, spec))


def schedule_of(config: ClusterConfig, spec: ModelSpec) -> Schedule:
    """The schedule of a replica's first step."""
    return config.pipeline.actions(config.training.num_micro_batches, frozen_chunks(config, spec))


def matrix_dtype(config: ClusterConfig, device: torch.device | str) -> torch.dtype:
    """The type of weights with two dimensions, apart from adapters': bf16 as `training` says, or, beside adapters, that
    of products."""
    if config.training.has_bf16_weights:
        return torch.bfloat16
    return (autocast_dtype(config, device) if config.adapter is not None else None) or torch.float32


def stage_estimate(config: ClusterConfig, spec: ModelSpec, stage: int, *, device: str) -> StageMemory:
    """Peak memory of a stage: of all its chunks together, each of which reaches its own peak at another time.

    Layers of a configuration that is not resolved are divided by counted cost. `device`: its type, cpu or cuda.
    """
    ranges = block_ranges(config, spec)
    schedule = schedule_of(config, spec)
    row, frozen = schedule.actions[stage % config.pipeline.stages], schedule.num_frozen

    def memory(chunk: int, in_flight: int = 0, put_off: int = 0) -> StageMemory:
        numbers = _step_numbers(config, spec, schedule, chunk, device)
        return stage_memory(spec, ranges[chunk], replace(numbers, in_flight=in_flight, put_off=put_off))

    def one(chunk: int, is_put_off: bool) -> StageMemory:
        """The memory that each micro-batch in flight adds."""
        return combined([(memory(chunk, in_flight=1, put_off=int(is_put_off)), 1), (idle[chunk], -1)])

    idle = {chunk: memory(chunk) for chunk in chunks_of(config, stage)}
    added = {kind: one(*kind) for kind in set().union(*_held(row, frozen))}
    # one chunk computes at a time
    workspace = max(each.workspace for each in idle.values())
    always = replace(combined((each, 1) for each in idle.values()), workspace=workspace)
    moments = (
        combined([(always, 1), *((added[kind], num) for kind, num in held.items())]) for held in _held(row, frozen)
    )
    return max(moments, key=lambda moment: moment.total)


def with_memory_choices(config: ClusterConfig, spec: ModelSpec, spare_nbytes: Sequence[float] = ()) -> ClusterConfig:
    """The configuration with what is open under `memory` replaced: gradients by fp32, `recompute` by none,
    `offload` by nothing, `agoq.bits` by each stage's, and `loss_chunks`.

    With N micro-batches in flight times their layers at the moment when a stage holds most, a stage's bits are
    4·max N/N, rounded as `memory.agoq.rounding` says (AGoQ Eq. 22, where all stages have as many layers). Those of the
    first schedule: a run keeps its bits. `spare_nbytes`: by stage, memory that 4 bits leave free; empty: not known.
    """
    chunks = loss_chunks(config, spec, config.training.micro_batch)
    memory = config.memory.model_copy(update={"loss_chunks": chunks})
    if config.memory.gradients == "auto":
        memory = memory.model_copy(update={"gradients": "fp32"})
    if config.memory.recompute == "auto":
        memory = memory.model_copy(update={"recompute": "none"})
    if config.memory.offload == "auto":
        memory = memory.model_copy(update={"offload": ()})
    config = config.model_copy(update={"memory": memory})
    agoq = config.memory.agoq
    if config.memory.activations != "agoq" or agoq.bits != "auto":
        return config
    ranges = block_ranges(config, spec)
    schedule, trained = schedule_of(config, spec), [each.num_trained(spec.first_trainable) for each in ranges]
    rows = schedule.actions
    held = [
        max(
            sum(num * trained[chunk] for (chunk, _), num in moment.items())
            for moment in _held(row, schedule.num_frozen)
        )
        for row in rows
    ]
    room = [4 * max(held) / max(1, each) for each in held]
    if agoq.rounding == "paper":
        chosen = [min(FORMATS, key=lambda bits: abs(bits - most)) for most in room]
    else:
        chosen = [max(bits for bits in FORMATS if bits <= most) for most in room]

    def with_bits(bits: Sequence[int]) -> ClusterConfig:
        changed = agoq.model_copy(update={"bits": list(bits)})
        return config.model_copy(update={"memory": config.memory.model_copy(update={"agoq": changed})})

    def total(stage: int, bits: int) -> int:
        return stage_estimate(with_bits([bits] * len(rows)), spec, stage, device="cpu").total

    for stage, spare in enumerate(spare_nbytes):
        fit = (bits for bits in FORMATS if total(stage, bits) - total(stage, 4) <= max(0, spare))
        chosen[stage] = min(chosen[stage], max(fit))
    return with_bits(chosen)


def memory_lines(config: ClusterConfig, given: ClusterConfig | None = None) -> Iterator[str]:
    """What was chosen under `memory`, with the keys; with `given`, only where that left it open."""
    memory, before = config.memory, given.memory if given is not None else None
    if memory.activations == "agoq" and (before is None or before.agoq != memory.agoq):
        bits = " ".join(str(memory.agoq.bits_of(stage)) for stage in range(config.pipeline.stages))
        yield f"  stored activations in {bits} bits, by stage (memory.agoq.bits)"
    if before is not None and before.recompute == "auto" and memory.recompute not in ("auto", "none"):
        yield f"  recompute {_by_stage(memory.recompute)}, since memory is what limits this run (memory.recompute)"
    if before is not None and before.offload == "auto" and memory.all_offload:
        listed = [", ".join(each) or "nothing" for each in memory.offload if isinstance(each, tuple)]
        which = _by_stage(listed) if listed else ", ".join(map(str, memory.offload))
        yield f"  in host memory: {which}, since the device has no room for it (memory.offload)"
    if (memory.loss_chunks or 1) > 1 and (before is None or before.loss_chunks is None):
        yield f"  loss of a micro-batch in {memory.loss_chunks} chunks (memory.loss_chunks)"


def _by_stage(values: str | Sequence[str]) -> str:
    return values if isinstance(values, str) else f"{'; '.join(values)}, by stage"


def _held(row: Iterable[Action], num_frozen: int) -> Iterator[dict[tuple[int, bool], int]]:
    """Micro-batches in flight during each action of a row, including those that it starts or frees.

    By chunk, and by whether I, the gradient of the input, has begun, so that only W is left. The first `num_frozen`
    chunks have no backward and keep nothing.
    """
    held: Counter[tuple[int, bool]] = Counter()
    for action in row:
        chunk = action.chunk
        starts = action.kind is ActionKind.F and chunk >= num_frozen
        held[chunk, False] += starts - (action.kind is ActionKind.I)
        held[chunk, True] += action.kind is ActionKind.I
        yield dict(+held)
        held[chunk, False] -= action.kind is ActionKind.B
        held[chunk, True] -= action.kind is ActionKind.W


def chunks_of(config: ClusterConfig, stage: int) -> range:
    """The numbers of a stage's chunks."""
    return range(stage % config.pipeline.stages, config.pipeline.num_chunks, config.pipeline.stages)


def _step_numbers(config: ClusterConfig, spec: ModelSpec, schedule: Schedule, chunk: int, device: str) -> StepNumbers:
    """The numbers of a chunk with nothing in flight."""
    training, stage = config.training, chunk % config.pipeline.stages
    splits_backward = any(action.kind is ActionKind.I for action in schedule.actions[stage])
    in_flight_nbytes, ahead_nbytes = _frames_nbytes(config, spec, schedule, chunk)
    which = config.memory.offload_of(stage)
    return StepNumbers(
        shape=micro_batch_shape(config, spec, training.micro_batch, device=device, stage=stage),
        in_flight=0,
        optimizer_nbytes=partial(optimizer_nbytes, training),
        frame_nbytes=in_flight_nbytes,
        ahead_nbytes=ahead_nbytes,
        kept_code_nbytes=kept_code_nbytes(config, device, stage),
        low_rank=low_rank_settings(training, config.run.seed),
        splits_backward=splits_backward,
        is_fused=training.is_fused,
        gradients=config.memory.gradients,
        offload=which,
        moments_nbytes=partial(optimizer_nbytes, training, moments=which),
        shards=config.shards,
        replicas=config.optimizer_shares,
        num_forwards=training.num_forwards,
    )


def check_layers(config: ClusterConfig, spec: ModelSpec) -> None:
    """Refuse what changes the layers of a block, for a family whose layers are not known; ModelError.

    Also adapters of layers that a block lacks, a loss of routers without routers, and low-rank experts.
    """
    router_loss_of(config.training.router_aux_loss, spec)
    if spec.adapter is not None:
        slice_parameters(spec, BlockRange(0, 1, spec.num_layers))  # allocates nothing
    if spec.layout.experts is not None and config.training.compile:
        raise ModelError(f"training.compile does not combine with experts ({spec.family}), whose products are tahq's")
    if spec.layout.experts is not None and config.training.is_low_rank:
        raise ModelError(
            f"training.optimizer: {config.training.optimizer} has no subspace for the stacked weights of experts "
            f"({spec.family}): use adamw, adamw8bit, fp8_adamw or adamw_bf16"
        )
    if spec.layout.layers_like is not None:
        return
    levels = config.memory.recompute if isinstance(config.memory.recompute, list) else [config.memory.recompute]
    changes = {
        "memory.activations": config.memory.activations if config.memory.activations != "none" else None,
        "memory.recompute": next((level for level in levels if level not in ("auto", "none", "block")), None),
        "training.precision": "fp8" if config.training.precision == "fp8" else None,
    }
    for key, value in changes.items():
        if value is not None:
            known = ", ".join(name for name, layout in FAMILIES.items() if layout.layers_like is not None)
            raise ModelError(
                f"{key}: {value} changes layers, and is for the families {known}; {spec.family} has other layers: "
                "leave it out"
            )


def loss_chunks(config: ClusterConfig, spec: ModelSpec, micro_batch: int) -> int:
    """`memory.loss_chunks`, or `open_loss_chunks`."""
    if config.memory.loss_chunks is not None:
        return config.memory.loss_chunks
    if config.training.is_low_rank:
        return 1
    return open_loss_chunks(micro_batch * config.training.rows_per_sample * config.data.seq_len, spec.vocab_size)


def open_loss_chunks(num_tokens: int, vocab_size: int) -> int:
    """As many as keep the logits of a chunk below `MOST_LOGITS_NBYTES`."""
    return -(-4 * num_tokens * vocab_size // MOST_LOGITS_NBYTES)


def micro_batch_shape(
    config: ClusterConfig, spec: ModelSpec, micro_batch: int, *, device: str, stage: int | None = None
) -> MicroBatchShape:
    """The shape of micro-batches of this many samples, and how the configuration computes them on a stage.

    Without a stage, as a plan counts all of them alike: with the lowest level of recomputation, and the first stage's
    bits.
    """
    low_rank, memory = low_rank_settings(config.training, config.run.seed), config.memory
    level, is_short = memory.recompute_of(stage), autocast_dtype(config, device) is not None
    return MicroBatchShape(
        micro_batch * config.training.rows_per_sample,
        config.data.seq_len,
        is_short,
        on_cuda=device == "cuda",
        coat=memory.activations == "coat",
        recompute=level,
        stored_bits=memory.agoq.bits_of(stage or 0) if memory.activations == "agoq" else None,
        stored_layers=memory.agoq.stored if memory.activations == "agoq" else EXACTLY_STORED.get(level, ()),
        fp8=config.training.precision == "fp8",
        codes_gradients=_codes_gradients(config),
        copies_weights=low_rank is None,
        copies_head=low_rank is None or low_rank.ends == "fp32",
        loss_chunks=loss_chunks(config, spec, micro_batch),
        has_z_loss=config.training.z_loss > 0,
        weight_nbytes=matrix_dtype(config, device).itemsize,
        residual_nbytes=2 if memory.residual == "bf16" else 4,
        packed=config.data.may_be_packed,
    )


def _codes_gradients(config: ClusterConfig) -> bool:
    if config.memory.activations == "coat":
        return config.memory.coat.backward_products != "bf16"
    return config.training.precision == "fp8"


def kept_code_nbytes(config: ClusterConfig, device: str, stage: int | None = None) -> int:
    """Bytes of FP8 codes that are kept beside each element of a block's matrix on a stage, or on all of them alike.

    FP8 units, in use where bf16 is, take two layouts. Where blocks are recomputed, `training.precision: fp8` keeps
    none.
    """
    if config.memory.activations == "coat":
        is_kept = config.memory.coat.keep_weight_codes
    else:
        is_kept = config.training.precision == "fp8" and config.memory.recompute_of(stage) != "block"
    return int(is_kept) * (2 if device == "cuda" and autocast_dtype(config, device) is not None else 1)


def _frames_nbytes(config: ClusterConfig, spec: ModelSpec, schedule: Schedule, chunk: int) -> tuple[int, int]:
    """Encoded bytes of a micro-batch in flight on the cuts before and after a chunk, both directions; and those of all
    activations of a step that come from, or leave, chunks without a backward, which compute ahead."""
    activations, gradients = map(get_codec, (config.wire.activations, config.wire.gradients))
    (to_trained, shape), attached = boundary_shapes(config, spec), attached_nbytes(config, spec)
    alone = activations.encoded_nbytes(shape) + attached[0]
    out, back = activations.encoded_nbytes(to_trained) + attached[0], gradients.encoded_nbytes(shape) + attached[1]
    frozen, last = schedule.num_frozen, schedule.num_chunks - 1
    num_cuts, num_ahead = (chunk > frozen) + (frozen <= chunk < last), (0 < chunk <= frozen) + (chunk < frozen)
    return num_cuts * (out + back), num_ahead * schedule.num_micro_batches * alone


def boundary_shapes(config: ClusterConfig, spec: ModelSpec) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Shapes of a micro-batch's activations where gradients come back, DPO's reference's included, and of any other
    tensor that crosses a cut."""
    training, rest = config.training, (config.data.seq_len, spec.hidden_size)
    return (training.num_forwards * training.rows, *rest), (training.rows, *rest)


def attached_nbytes(config: ClusterConfig, spec: ModelSpec) -> tuple[int, int]:
    """Bytes of what travels behind an activation, and behind a gradient, in training."""
    loss = router_loss_of(config.training.router_aux_loss, spec)
    forward, backward = (0, 0) if loss is None else loss.num_sent
    return 4 * forward, 4 * backward


# -- changes that would save memory ------------------------------------------------------------------


def memory_savings(config: ClusterConfig, spec: ModelSpec, stage: int, *, device: str) -> list[tuple[str, int]]:
    """Changes of a resolved configuration that would make a stage smaller, and bytes saved, the largest saving first.

    On a CPU copies for checkpoints are in the same memory.
    """

    def needed(config: ClusterConfig, stage: int) -> int:
        memory = stage_estimate(config, spec, stage, device=device)
        return memory.total + (device == "cpu") * memory.host_total

    now = needed(config, stage)
    found: list[tuple[str, int]] = []
    if device == "cpu" and config.run.checkpoint_every != "never":
        snapshot = stage_estimate(config, spec, stage, device=device).snapshot
        found.append(("run.checkpoint_buffers: 0", config.run.checkpoint_buffers * snapshot))
    for change, changed in _changes(config, spec, stage, device=device):
        try:
            ClusterConfig.model_validate(changed.model_dump(mode="json"))
            # more stages: the largest of them, wherever that will be
            stages = range(changed.pipeline.stages) if changed.pipeline.stages != config.pipeline.stages else (stage,)
            then = max(needed(changed, number) for number in stages)
        except (UserError, ValueError):
            continue  # the rest of the configuration forbids it
        found.append((change, now - then))
    return sorted(((change, saved) for change, saved in found if saved > 0), key=lambda pair: -pair[1])


def _changes(config: ClusterConfig, spec: ModelSpec, stage: int, *, device: str) -> Iterator[tuple[str, ClusterConfig]]:
    """Changes that may help, each with the changed configuration, which may be invalid."""

    def changed(section: str, **values: object) -> tuple[str, ClusterConfig]:
        keys = ", ".join(f"{section}.{key}: {'null' if value is None else value}" for key, value in values.items())
        return keys, config.model_copy(update={section: getattr(config, section).model_copy(update=values)})

    training, pipeline = config.training, config.pipeline
    smaller = next((n for n in range(training.micro_batch // 2, 0, -1) if training.micro_batch % n == 0), None)
    if smaller is not None:
        yield changed("training", micro_batch=smaller)
    for level in ("norm", "att", "block") if spec.layout.layers_like else ("block",):
        yield changed("memory", recompute=level)
    has_copies = autocast_dtype(config, device) is not None
    for which in (("m", "v"), tuple(name for name in get_args(Offload) if name != "master" or has_copies)):
        yield f"memory.offload: [{', '.join(which)}]", changed("memory", offload=which)[1]
    if config.memory.gradients != "fp8":
        yield changed("memory", gradients="fp8")
    for shard in (("optimizer",), get_args(Shard)):
        if pipeline.replicas > 1 and not config.shards.issuperset(shard):
            yield f"memory.shard: [{', '.join(shard)}]", changed("memory", shard=shard)[1]
    if config.memory.activations == "none" and spec.family in COAT_FAMILIES:
        yield changed("memory", activations="coat")
    if config.memory.activations != "agoq" and spec.layout.layers_like is not None:
        yield changed("memory", activations="agoq")
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
            yield f"one layer fewer here, {change}", less
