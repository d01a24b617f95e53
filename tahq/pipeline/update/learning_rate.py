"""The learning rate of each step, as a pure function of the configuration.

With s the step (from 0), T the number of steps, w that of warm-up steps, η the peak and μ the minimum:

    warm-up   s < w         η · (s + 1) / (w + 1)
    constant                η
    linear                  η + (μ − η) · p                     p = (s − w) / (T − w)
    cosine                  η + (μ − η) · (1 − cos πp) / 2      the same p
    wsd                     η until T − d, then linear with     p = (s − (T − d)) / d

p is clamped to [0, 1]. The warm-up never starts at 0 and meets η at s = w; a decay reaches μ at s = T, the first step
that is not taken, so no step is wasted on a rate of 0. Every stage computes the same doubles, so rates are never sent.
"""

import math

from tahq.pipeline.config import TrainingConfig

WSD_DECAY_SHARE = 10
"""Without `decay_steps`, the decay of `wsd` takes one in this many steps."""


def learning_rate(config: TrainingConfig, step: int, total_steps: int) -> float:
    """The rate of a step (from 0); see the module for the equations.

    `wsd` (warm-up, stable, decay) is the schedule of MiniCPM (Hu et al. 2024) with a linear decay.

    Returns:
        The rate, in (0, lr] during warm-up and in [min_lr, lr] after it; past `total_steps` it stays constant.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / (config.warmup_steps + 1)
    if config.lr_schedule == "constant":
        return config.lr
    if step >= total_steps:
        return config.min_lr
    start = config.warmup_steps
    if config.lr_schedule == "wsd":
        start = max(start, total_steps - (config.decay_steps or max(1, total_steps // WSD_DECAY_SHARE)))
    progress = max(0.0, (step - start) / (total_steps - start))
    if config.lr_schedule == "cosine":
        progress = (1 - math.cos(math.pi * progress)) / 2
    # each operation is monotone in `progress` even after rounding, which a sum of two products is not
    rate = config.lr - (config.lr - config.min_lr) * progress
    return config.min_lr if progress >= 1 else max(config.min_lr, rate)
