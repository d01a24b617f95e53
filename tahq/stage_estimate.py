"""What a stage of a configuration keeps in memory, by `memory/estimate.py`."""

from dataclasses import astuple
from functools import partial

from tahq.config import ClusterConfig
from tahq.memory.estimate import StageMemory, StepNumbers, stage_memory
from tahq.memory.saved_tensors import MicroBatchShape
from tahq.models.costs import counted_costs
from tahq.models.model_spec import ModelSpec
from tahq.models.partition import divide
from tahq.pipeline.low_rank import low_rank_settings
from tahq.pipeline.optimizer import optimizer_nbytes
from tahq.pipeline.schedule import Schedule, in_flight
from tahq.quant import get_codec


def stage_estimate(config: ClusterConfig, spec: ModelSpec, stage: int, *, bf16: bool) -> StageMemory:
    """All chunks of a stage together, each at its own peak.

    Args:
        config: resolved; of one that is not, layers are divided by counted cost.
        spec: its model.
        stage: which.
        bf16: whether it computes under bf16 autocast.

    Raises:
        ModelError: the model cannot be divided so.
    """
    ranges = divide(counted_costs(spec, config.data.seq_len), config.pipeline.num_chunks, config.pipeline.layers)
    schedule = config.pipeline.actions(config.training.num_micro_batches)
    chunks = [
        stage_memory(spec, ranges[chunk], _step_numbers(config, spec, schedule, chunk, bf16))
        for chunk in chunks_of(config, stage)
    ]
    return StageMemory(*(sum(kind) for kind in zip(*map(astuple, chunks), strict=True)))


def chunks_of(config: ClusterConfig, stage: int) -> range:
    """The pieces of the model that a stage has."""
    return range(stage, config.pipeline.num_chunks, config.pipeline.stages)


def _step_numbers(config: ClusterConfig, spec: ModelSpec, schedule: Schedule, chunk: int, bf16: bool) -> StepNumbers:
    training = config.training
    row = tuple(action for action in schedule.actions[chunk % config.pipeline.stages] if action.chunk == chunk)
    return StepNumbers(
        shape=micro_batch_shape(config, training.micro_batch, bf16=bf16),
        in_flight=max(in_flight(row)),
        optimizer_nbytes=partial(optimizer_nbytes, training),
        checkpoint_blocks=training.activation_checkpointing == "block",
        frame_nbytes=_frames_nbytes(config, spec, chunk),
        kept_code_nbytes=kept_code_nbytes(config, bf16),
        low_rank=low_rank_settings(training, config.run.seed),
    )


def micro_batch_shape(config: ClusterConfig, micro_batch: int, *, bf16: bool) -> MicroBatchShape:
    """Micro-batches of that many samples, as the configuration has them computed."""
    low_rank = low_rank_settings(config.training, config.run.seed)
    return MicroBatchShape(
        micro_batch,
        config.data.seq_len,
        bf16,
        coat=config.memory.activations == "coat",
        copies_weights=low_rank is None,
        copies_head=low_rank is None or low_rank.ends == "fp32",
    )


def kept_code_nbytes(config: ClusterConfig, bf16: bool) -> int:
    """What COAT keeps beside an element of a block's matrix; FP8 units, in use where bf16 is, take two layouts."""
    if config.memory.activations != "coat" or not config.memory.coat.keep_weight_codes:
        return 0
    return 2 if bf16 else 1


def _frames_nbytes(config: ClusterConfig, spec: ModelSpec, chunk: int) -> int:
    """Encoded bytes of a micro-batch on the cuts before and after a chunk, both directions."""
    shape = (config.training.micro_batch, config.data.seq_len, spec.hidden_size)
    codecs = (config.wire.activations, config.wire.gradients)
    num_cuts = (chunk > 0) + (chunk < config.pipeline.num_chunks - 1)
    return num_cuts * sum(get_codec(codec).encoded_nbytes(shape) for codec in codecs)
