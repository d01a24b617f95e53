"""Which replica has what of a stage's parameters: `memory.shard`.

Parameters are not divided, so that norms, blocks of 8-bit states and checkpoints are those of one replica. Of gradients
and weights only matrices of blocks are shared, as in LLMQ (§3.2): each replica has embedding, head, norms and biases.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from tahq.memory.config import Shard
from tahq.models.model_spec import ModelSpec

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, order=True)
class Share:
    """What one of the replicas has for all.

    `owner`: updates the parameter, with its optimizer states. `sums_alone`: no other replica keeps a sum of gradients.
    `keeps_alone`: no other replica keeps the weights.
    """

    owner: int
    sums_alone: bool = False
    keeps_alone: bool = False

    def is_had(self, replica: int, shard: Shard) -> bool:
        """Whether a replica keeps what the parameter has of this kind."""
        alone = {"optimizer": True, "gradients": self.sums_alone, "weights": self.keeps_alone}
        return self.owner == replica or not alone[shard]


UNSHARED = Share(-1)
"""Of what all replicas update."""


def is_block_matrix(spec: ModelSpec, name: str, shape: Sequence[int]) -> bool:
    """Whether a parameter, by its canonical name, is a matrix of a transformer block."""
    return len(shape) > 1 and name.startswith(f"{spec.layout.trunk}.{spec.layout.blocks}.")


def shares_of(
    spec: ModelSpec, shapes: Mapping[str, Shape], replicas: int, shards: Collection[Shard]
) -> dict[str, Share]:
    """The share of each parameter of a chunk, by canonical name; `shapes`: of all of them, in order.

    The largest is given first, to the replica with the least so far. An element counts 2 for its optimizer states, as
    with AdamW, and 1 each for a gradient and a weight that no other replica keeps. What is not trained has
    weights only.
    """
    loads, shares = [0] * replicas, dict.fromkeys(shapes, UNSHARED)
    parts = [shard in shards for shard in ("gradients", "weights")]
    for name in sorted(shapes, key=lambda name: -math.prod(shapes[name])):
        owner, alone = loads.index(min(loads)), is_block_matrix(spec, name, shapes[name])
        if spec.is_trained(name):
            shares[name] = Share(owner, *(part and alone for part in parts))
            loads[owner] += (2 + alone * sum(parts)) * math.prod(shapes[name])
        elif alone and "weights" in shards:
            shares[name] = Share(owner, keeps_alone=True)
            loads[owner] += math.prod(shapes[name])
    return shares
