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
from collections.abc import Callable, Mapping

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
    return RATES[config.lr_schedule](config, step, total_steps)


def _constant(config: TrainingConfig, step: int, total_steps: int) -> float:
    return config.lr


def _linear(config: TrainingConfig, step: int, total_steps: int) -> float:
    return _interpolate(config, _progress(step, config.warmup_steps, total_steps))


def _cosine(config: TrainingConfig, step: int, total_steps: int) -> float:
    progress = _progress(step, config.warmup_steps, total_steps)
    return _interpolate(config, (1 - math.cos(math.pi * progress)) / 2)


def _warm_up_stable_decay(config: TrainingConfig, step: int, total_steps: int) -> float:
    decay_steps = config.decay_steps or max(1, total_steps // WSD_DECAY_SHARE)
    start = max(config.warmup_steps, total_steps - decay_steps)
    return _interpolate(config, _progress(step, start, total_steps))


def _progress(step: int, start: int, end: int) -> float:
    """How far a step is from `start` to `end`, in [0, 1]; 1 if the interval is empty."""
    if step >= end:
        return 1.0
    return max(0.0, (step - start) / (end - start)) if end > start else 1.0


def _interpolate(config: TrainingConfig, share: float) -> float:
    """From the peak (share 0) to the minimum (share 1), exact at both ends and never rising.

    Each operation is monotone in `share` even after rounding, which a sum of two products is not.
    """
    return config.min_lr if share >= 1 else max(config.min_lr, config.lr - (config.lr - config.min_lr) * share)


RATES: Mapping[str, Callable[[TrainingConfig, int, int], float]] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "wsd": _warm_up_stable_decay,
}
"""The rate after the warm-up, by schedule: (config, step, total steps) -> rate."""
