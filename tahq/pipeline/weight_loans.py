"""Matrices of blocks that one replica has, and lends to the others while they compute the block: `memory.shard`.

A block's matrices are lent together, for a forward or a backward pass, one block ahead (`memory/offload/blocks.py`).
Every replica sends every other one what it has of the block, which may be nothing. So none is more than a block ahead
of another, and little waits to be used. All do the same exchanges in the same order, evaluations included, so a worker
that computes a step again finds in its neighbours' logs what it was sent the first time.

A replica waits only for what the others send before they wait themselves at the same place of the schedule, or at an
earlier one. So they cannot wait for each other in a circle, however slow one of them is.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from tahq.comm.link.frame import Direction, LogicalId, Purpose
from tahq.memory.offload.host_memory import HostMemory
from tahq.memory.offload.host_part import HostPart
from tahq.pipeline.boundary import Boundary
from tahq.pipeline.gradient_sum import Send


class SharedBlock:
    """What products read of one block's matrices, just allocated; where another replica has them, storage is empty.

    `owners` gives those of this block's matrices, and then of later blocks'. It is the block's attribute `shared`.
    """

    loans: "WeightLoans"

    def __init__(
        self,
        block: nn.Module,
        *,
        owners: Iterator[int],
        replica: int,
        replicas: int,
        memory: HostMemory,
        copies: torch.dtype | None,
    ) -> None:
        self._replica = replica
        self._products: list[list[torch.Tensor]] = [[] for _ in range(replicas)]
        self._is_lent = False
        self._coming: Mapping[int, LogicalId] = {}
        block.shared = self  # type: ignore[assignment]
        for parameter in block.parameters():
            if parameter.ndim > 1:
                part, owner = HostPart(parameter, (), memory), next(owners)
                parameter.host = part  # type: ignore[attr-defined]
                self._products[owner].append(parameter if copies is None else part.add_copy(parameter, copies))
                part.is_here = owner == replica
                _resize(parameter, parameter.numel() * part.is_here)
        self.release()

    def fetch(self) -> None:
        """Begin to exchange the block's matrices; nothing happens if they are lent."""
        if not self._is_lent:
            self._is_lent = True
            empty = next(product for each in self._products for product in each).new_empty(0)
            mine = torch.cat([empty, *(product.data.view(-1) for product in self._products[self._replica])])
            self._coming = self.loans.begin_exchange(mine, [sum(each.numel() for each in of) for of in self._products])

    def wait(self) -> None:
        """Return when the exchange that has begun is complete."""
        coming, self._coming = self._coming, {}
        for owner, name in coming.items():
            products = self._products[owner]
            parts = torch.split(self.loans.boundaries[owner].receive(name), [each.numel() for each in products])
            for product, part in zip(products, parts, strict=True):
                _resize(product, product.numel())
                product.data.copy_(part.view(product.shape))  # `data`: for autograd the tensor has not changed

    def release(self) -> None:
        """Free what others have lent."""
        self.wait()
        self._is_lent = False
        for owner, products in enumerate(self._products):
            for product in products if owner != self._replica else ():
                _resize(product, 0)


@dataclass(slots=True)
class WeightLoans:
    """The exchanges of one replica."""

    blocks: Sequence[SharedBlock]
    """Of all chunks of its stage."""
    replica: int
    boundaries: Mapping[int, Boundary]
    """The links to the other replicas."""
    run: int
    first_cut: int
    """Logical ids of what replica j sends have the cut first_cut + j."""
    send: Send
    step: int = 0
    purpose: Purpose = Purpose.WEIGHTS
    number: int = 0
    """Of the next exchange."""

    def __post_init__(self) -> None:
        for block in self.blocks:
            block.loans = self

    def begin(self, step: int, purpose: Purpose) -> None:
        """Begin a step, or an evaluation after it, with nothing lent."""
        for block in self.blocks:
            block.release()
        self.step, self.purpose, self.number = step, purpose, 0

    def begin_exchange(self, mine: torch.Tensor, sizes: Sequence[int]) -> dict[int, LogicalId]:
        """Send all others a tensor, and post the receives of theirs, of these sizes; returns their ids by replica."""
        place = self.step, self.purpose, self.number
        names = [LogicalId(self.run, j, *place, self.first_cut + j, Direction.FORWARD) for j in range(len(sizes))]
        self.number += 1
        for other, boundary in self.boundaries.items():
            boundary.post(names[other], (sizes[other],), mine.dtype)
            self.send(boundary, names[self.replica], mine, None)
        return {other: names[other] for other in self.boundaries}


def _resize(tensor: torch.Tensor, numel: int) -> None:
    """Give a tensor memory for so many numbers, with any content."""
    storage = tensor.untyped_storage()
    if storage.resizable():  # not where numpy has seen a tensor of the CPU
        storage.resize_(numel * tensor.itemsize)
