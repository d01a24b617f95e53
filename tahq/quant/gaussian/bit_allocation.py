"""How many bits each tile gets: water-filling over whole numbers, so that every backend gets the same answer.

Another bit is worth most where it reduces the squared error most: the step from b to b + 1 bits of a tile with
magnitude r saves r²·(D_b − D_{b+1}), D_b being the distortion of the Gaussian-optimal quantiser. On a logarithmic scale
with eight steps per octave of r that is level − STEPS[b − 1], level being the rounded logarithm of r. The most valuable
steps are taken until the budget is spent; since the steps of one tile fall in value, this greedy choice is the best
one (reverse water-filling, Cover & Thomas, Elements of Information Theory, §10.3).

Everything is in integers, and takes time proportional to the number of tiles: a histogram counts steps by value.
"""

import torch

STEPS = (0, 6, 13, 21, 28, 36, 44)
"""t_b for b = 1 to 7: how much less the step from b bits is worth than that from 1, in eighths of an octave of r:
round(4·log2((D_1 − D_2)/(D_b − D_{b+1})))."""
NUM_LEVELS = 512
"""Levels run from 0 to 511."""


def allocate(levels: torch.Tensor, budget: int) -> torch.Tensor:
    """Give tiles of levels int32 [T] 1 to 8 bits each, `budget` in all (T to 8·T), by falling marginal return.

    The step of a tile of level q from b to b + 1 bits has rank q − STEPS[b − 1]. All steps above a border θ are
    granted, then those on it in order of tiles until the budget is spent.
    """
    border, num_on_border = _border(levels, budget - levels.numel())
    above = levels - border
    granted, on_border = torch.ones_like(levels), torch.zeros_like(levels)
    for step in STEPS:
        granted += above > step
        on_border += above == step
    return granted + on_border * (on_border.cumsum(0) <= num_on_border)


def _border(levels: torch.Tensor, num_steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """θ, the highest rank at which the steps from above reach `num_steps`, and how many of that rank are granted.

    Both are tensors without dimensions, so that the device is not synchronised.
    """
    counts = torch.zeros(NUM_LEVELS, dtype=torch.int32, device=levels.device)
    counts.scatter_add_(0, levels.long(), torch.ones_like(levels))
    lowest, num_ranks = -STEPS[-1], NUM_LEVELS + STEPS[-1]
    by_rank = torch.zeros(num_ranks, dtype=torch.int32, device=levels.device)
    for step in STEPS:
        start = -step - lowest  # where the rank of level 0 lies
        by_rank[start : start + NUM_LEVELS] += counts
    from_above = by_rank.flip(0).cumsum(0)
    is_before = from_above < num_steps
    border = lowest + num_ranks - 1 - is_before.sum()
    return border, num_steps - (from_above * is_before).amax()
