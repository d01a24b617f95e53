"""The cost of each part of a model in multiply-adds, counted from the configuration."""

from tahq.models.families import head_dim
from tahq.models.model_spec import ModelSpec
from tahq.models.partition import LayerCosts


def counted_costs(spec: ModelSpec, seq_len: int) -> LayerCosts:
    """Multiply-adds per token of the forward pass; the backward pass has twice as many everywhere.

    A block has those of its matrices, of experts only those that a token takes, plus 2 · A · H · D for attention, A
    being the mean number of positions that a query attends to; the embedding, a look-up, has 0; the head has
    hidden · vocabulary.
    """
    config, layout = spec.hf_config, spec.layout
    width = config.num_attention_heads * head_dim(config)
    blocks = range(spec.num_layers)
    matrices = [layout.num_products(config, block) for block in blocks]
    seen = [mean_positions_seen(seq_len, layout.window(config, block)) for block in blocks]
    return LayerCosts(
        embedding=0.0,
        blocks=tuple(of + 2 * positions * width for of, positions in zip(matrices, seen, strict=True)),
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
