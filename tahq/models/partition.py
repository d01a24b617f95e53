"""The division of a model's blocks over stages: contiguous ranges whose largest cost is minimal.

Exact: costs become integers with a common denominator, so sums of equal blocks are equal and no tie is decided by
rounding. Among divisions with the smallest largest stage, the most even one (least sum of squares) is taken; remaining
ties give more blocks to later stages, which hold fewer activations in flight under 1F1B.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise

from tahq.errors import ModelError


@dataclass(frozen=True, slots=True)
class BlockRange:
    """Blocks [start, stop) of a model of `num_layers` blocks, with the ends that belong to them."""

    start: int
    stop: int
    num_layers: int

    @property
    def first(self) -> bool:
        """Whether the embedding belongs to this range."""
        return self.start == 0

    @property
    def last(self) -> bool:
        """Whether the final norm and the head belong to this range."""
        return self.stop == self.num_layers

    def __len__(self) -> int:
        return self.stop - self.start

    def is_frozen(self, first_trainable: int) -> bool:
        """Whether it has a forward pass only; `first_trainable`: the first block that is trained."""
        return self.stop <= first_trainable and not self.last

    def num_trained(self, first_trainable: int) -> int:
        """Blocks from the first that is trained on, which have a backward pass."""
        return min(len(self), max(0, self.stop - first_trainable))

    def sends_gradient(self, first_trainable: int) -> bool:
        """Whether anything before it is trained, and so needs the gradient of its input."""
        return self.start > first_trainable


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """The cost of each part of a model, in one unit: multiply-adds per token, or seconds."""

    embedding: float
    blocks: tuple[float, ...]
    head: float


def divide(costs: LayerCosts, num_stages: int, listed: Sequence[int] | None = None) -> tuple[BlockRange, ...]:
    """Divide a model's blocks over stages, embedding and head included in the first and the last.

    Minimises max_s cost(s), then Σ_s cost(s)², by dynamic programming over suffixes in O(num_stages · num_layers²).
    Each stage gets at least one block. `listed`: blocks of each stage set by the user (`pipeline.layers`). ModelError
    if there are more stages than blocks, or the list does not fit the model.
    """
    num_layers = len(costs.blocks)
    if num_stages > num_layers:
        raise ModelError(
            f"{num_stages} stages need at least {num_stages} blocks, the model has {num_layers}; "
            "lower pipeline.stages or raise model.num_layers"
        )
    sizes = _cheapest_sizes(costs, num_stages) if listed is None else _checked(listed, num_stages, num_layers)
    bounds = accumulate(sizes, initial=0)
    return tuple(BlockRange(start, stop, num_layers) for start, stop in pairwise(bounds))


def _checked(listed: Sequence[int], num_stages: int, num_layers: int) -> list[int]:
    sizes = list(listed)
    if len(sizes) != num_stages:
        raise ModelError(f"pipeline.layers {sizes} lists {len(sizes)} stages, pipeline.stages is {num_stages}")
    if min(sizes) < 1:
        raise ModelError(f"pipeline.layers {sizes}: each stage needs at least one block")
    if sum(sizes) != num_layers:
        raise ModelError(f"pipeline.layers {sizes} adds up to {sum(sizes)} blocks, the model has {num_layers}")
    return sizes


def _cheapest_sizes(costs: LayerCosts, num_stages: int) -> list[int]:
    embedding, *blocks, head = _as_integers([costs.embedding, *costs.blocks, costs.head])
    num_layers = len(blocks)
    prefix = list(accumulate(blocks, initial=0))

    def stage_cost(start: int, stop: int) -> int:
        ends = (embedding if start == 0 else 0) + (head if stop == num_layers else 0)
        return prefix[stop] - prefix[start] + ends

    def stops(start: int, stages: int) -> range:
        return range(start + 1, num_layers - stages + 2) if stages > 1 else range(num_layers, num_layers + 1)

    @cache
    def smallest_largest(start: int, stages: int) -> int:
        if stages == 0:
            return 0
        return min(max(stage_cost(start, stop), smallest_largest(stop, stages - 1)) for stop in stops(start, stages))

    limit = smallest_largest(0, num_stages)

    @cache
    def most_even(start: int, stages: int) -> tuple[int, tuple[int, ...]] | None:
        """Least sum of squares under the limit, then fewest blocks first; None if no division stays under it."""
        if stages == 0:
            return 0, ()
        divisions = []
        for stop in stops(start, stages):
            cost, rest = stage_cost(start, stop), most_even(stop, stages - 1)
            if cost <= limit and rest is not None:
                divisions.append((cost**2 + rest[0], (stop - start, *rest[1])))
        return min(divisions, default=None)

    division = most_even(0, num_stages)
    assert division is not None, "the limit was reached by a division"
    return list(division[1])


def _as_integers(costs: Sequence[float]) -> list[int]:
    """Costs, finite and not negative, over their common denominator."""
    ratios = [float(cost).as_integer_ratio() for cost in costs]
    common = math.lcm(*(denominator for _, denominator in ratios))
    return [numerator * (common // denominator) for numerator, denominator in ratios]
