"""What `training:` says about low-rank weights, with its defaults filled in."""

from tahq.memory.galore.lazy_subspace import LazyRule
from tahq.memory.galore.low_rank_weight import LowRankSettings
from tahq.pipeline.config import TrainingConfig

DEFAULT_DOUBLINGS = 16
"""`max_gap` over `gap`, if it is not set."""


def low_rank_settings(config: TrainingConfig, seed: int) -> LowRankSettings | None:
    """How this run keeps and trains the matrices of blocks; None: like any other parameter.

    Args:
        config: `training:`.
        seed: the run's.
    """
    if not config.is_low_rank:
        return None
    keys, is_quantised = config.qgalore, config.optimizer == "qgalore"
    rule = LazyRule(
        gap=keys.gap,
        max_gap=keys.max_gap or DEFAULT_DOUBLINGS * keys.gap,
        queue=keys.queue,
        threshold=keys.threshold,
        is_lazy=is_quantised if keys.lazy is None else keys.lazy,
    )
    return LowRankSettings(
        rank=keys.rank,
        scale=keys.scale,
        rule=rule,
        weights=keys.weights or ("int8" if is_quantised else "fp32"),
        projections=keys.projections or ("int4" if is_quantised else "fp32"),
        states="int8" if config.has_small_states else "fp32",
        is_stochastic=keys.rounding == "stochastic",
        svd=keys.svd,
        betas=config.betas,
        epsilon=config.epsilon,
        seed=seed,
        ends=keys.ends or ("bf16" if is_quantised else "fp32"),
    )
