"""The cost of each part of a model in multiply-adds, counted from the configuration."""

from tahq.models.families import head_dim
from tahq.models.model_spec import ModelSpec
from tahq.models.partition import LayerCosts


def counted_costs(spec: ModelSpec, seq_len: int) -> LayerCosts:
    """Multiply-adds per token of the forward pass; the backward pass has twice as many everywhere.

    A block has those of its matrices plus 2 · A · H · D for attention, A being the mean number of positions that a
    query attends to; the embedding, a look-up, has 0; the head has hidden · vocabulary.
    """
    config, layout = spec.hf_config, spec.layout
    matrices = layout.block_weights(config)
    width = config.num_attention_heads * head_dim(config)
    seen = [mean_positions_seen(seq_len, layout.window(config, block)) for block in range(spec.num_layers)]
    return LayerCosts(
        embedding=0.0,
        blocks=tuple(matrices + 2 * positions * width for positions in seen),
        head=float(spec.hidden_size * spec.vocab_size),
    )


def step_costs(spec: ModelSpec, seq_len: int) -> LayerCosts:
    """Multiply-adds per token of forward and backward; blocks below the first that is trained have a forward only."""
    costs = counted_costs(spec, seq_len)
    blocks = (cost * (1 if block < spec.first_trainable else 3) for block, cost in enumerate(costs.blocks))
    return LayerCosts(costs.embedding, tuple(blocks), 3 * costs.head)


def mean_positions_seen(seq_len: int, window: int | None) -> float:
    """Mean of min(q + 1, window) over the queries q of a sample: 1.75 for four tokens and a window of 2."""
    width = seq_len if window is None else min(window, seq_len)
    return (width * (width + 1) / 2 + (seq_len - width) * width) / seq_len
