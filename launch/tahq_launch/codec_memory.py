"""What codecs with state will remember, and what a visit costs after the first: known before a run begins.

The number of samples is the data's, so the data is read (or taken from the cache of tokens) where a codec needs it.
"""

import math

from tahq.config.cluster import ClusterConfig
from tahq.data.dataset import load_dataset
from tahq.data.tokenizer import load_tokenizer
from tahq.models.model_spec import ModelSpec
from tahq.quant import get_codec
from tahq.quant.aqsgd.codec import AqsgdCodec
from tahq.units import format_size
from tahq_launch.tables import plain_table


def codec_memory(config: ClusterConfig, spec: ModelSpec) -> str:
    """The part of a dry run about codecs that remember samples; empty if there is none.

    Raises:
        DataError: the data cannot be read here.
    """
    codec, stages = get_codec(config.wire.activations), config.pipeline.stages
    if not isinstance(codec, AqsgdCodec) or not codec.is_stateful or stages == 1:
        return ""
    shape = (config.training.micro_batch, config.data.seq_len, spec.hidden_size)
    num_samples = seen_samples(config)
    rows = []
    last = config.pipeline.num_chunks - 1
    for stage in range(stages):
        chunks = range(stage, last + 1, stages)
        num_ends = sum((chunk > 0) + (chunk < last) for chunk in chunks)
        nbytes = num_ends * codec.predicted_state_nbytes(shape, num_samples)
        rows.append([str(stage), str(num_ends), f"{nbytes:,}", format_size(nbytes)])
    a_sample, later = codec.predicted_state_nbytes(shape, 1), codec.revisit_nbytes(shape)
    return "\n".join(
        [
            f"What {codec.spec} remembers at the ends of the cuts, on each host, and in every snapshot",
            plain_table(["stage", "ends of cuts", "bytes", ""], rows),
            f"  {num_samples:,} samples of {format_size(a_sample)}, once all have been seen",
            f"  the payloads above are of first visits; a later one takes {later:,} bytes each, "
            f"{8 * later / math.prod(shape):.3f} bits/element",
        ]
    )


def seen_samples(config: ClusterConfig) -> int:
    """Training samples that a run comes to see: an epoch's, or fewer in a run that is shorter than an epoch."""
    num_samples = load_dataset(config.data, load_tokenizer(config.data)).num_train_samples
    steps, epochs = config.training.steps, config.training.epochs
    if steps is not None:
        return min(num_samples, steps * config.training.global_batch)
    return min(num_samples, math.ceil((epochs or 0.0) * num_samples))
