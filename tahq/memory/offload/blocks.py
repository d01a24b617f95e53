"""Blocks whose weights and kept residual stream are in host memory, and on the device while they compute.

Weights arrive one block ahead, in the forward pass and in the backward pass, and leave when another block needs the
room, so two blocks' are there at a time. Other replicas may lend them instead (`pipeline/weight_loans.py`). The
residual stream leaves behind a block's forward pass and returns one block ahead of its backward pass; what refers to it
then, autograd and the stage, finds it where it was. A split backward may recompute norms from it again for the
gradients of weights, so it does not leave a second time.
"""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import nn

from tahq.memory.agoq.stored_inputs import is_norm
from tahq.memory.config import Offload
from tahq.memory.offload.host_memory import HostMemory, Offloaded
from tahq.memory.offload.host_part import HostPart, host_part
from tahq.models.slice import ModelSlice

Kept = dict[int, list[Offloaded]]
"""What blocks keep of one micro-batch, by a block's place in its slice."""


def place_on_host(
    block: nn.Module, which: Collection[Offload], memory: HostMemory, *, copies: torch.dtype | None
) -> None:
    """Give a block's matrices, just allocated, or a low-rank layer's weight, their part in host memory."""
    if (weight := getattr(block, "low_rank", None)) is not None:
        weight.host = HostPart(weight, which, memory)
        weight.host.take_states(weight.moments)
    for parameter in block.parameters():
        if parameter.ndim > 1:
            parameter.host = HostPart(parameter, which, memory, copies=copies)  # type: ignore[attr-defined]


def offload_blocks(module: ModelSlice, which: Collection[Offload], memory: HostMemory) -> None:
    """Make a slice compute with what is in host memory; call it after `recompute`.

    Of embedding and head only moments are offloaded.
    """
    if moments := frozenset(which) & {"m", "v"}:
        for parameter in module.parameters():
            if parameter.ndim > 1 and host_part(parameter) is None:
                parameter.host = HostPart(parameter, moments, memory)  # type: ignore[attr-defined]
    module.owns_products |= any(hasattr(each, "product_copy") for each in module.parameters())
    module.around_block = BlockOffload(module, which, memory)


def _lent(block: nn.Module) -> list[Any]:
    """What fetches, waits for and releases what products read of a block, if the host has it, or another replica."""
    if hasattr(block, "shared"):
        return [block.shared]
    parts = [part for each in block.parameters() if (part := host_part(each)) is not None]
    return [part.product for part in parts if part.product is not None]


class BlockOffload:
    """Computes the blocks of one slice with what is offloaded, or shared: its `around_block`."""

    def __init__(self, module: ModelSlice, which: Collection[Offload], memory: HostMemory) -> None:
        self._memory = memory
        self._first_trained = module.num_frozen_blocks
        blocks = list(module.blocks())
        self._products = list(map(_lent, blocks))
        self._keeps_stream = "residual" in which
        self._kept: Kept = {}
        self._inner: list[torch.Tensor] = []
        """The residual stream within the block that computes, if it is kept."""
        if self._keeps_stream and not module.checkpoint_blocks and module.spec.layout.layers_like is not None:
            for block in blocks:
                _, second = filter(is_norm, block.children())
                second.register_forward_hook(self._note)

    def __call__(
        self, place: int, compute: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor
    ) -> torch.Tensor:
        """The output of the block at this place in the slice."""
        if place == 0:
            self._kept = {}
        self._lend(place, place + 1)
        self._inner.clear()
        output = compute(hidden)
        if torch.is_grad_enabled():
            if self._keeps_stream:
                own = filter(_is_whole, (hidden, *self._inner))
                self._kept[place] = [*map(self._memory.place_for, own)]
                self._memory.let_go(*self._kept[place])
            output.register_hook(partial(self._before_backward, self._kept, place))  # type: ignore[no-untyped-call]
        self._inner.clear()
        return output

    def _note(self, norm: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        # a fused norm returns the stream beside its output
        self._inner.append(output[0] if isinstance(output, tuple) else inputs[0])

    def _before_backward(self, kept: Kept, place: int, gradient: torch.Tensor) -> None:
        """Called with the gradient of a block's output."""
        self._lend(place, max(place - 1, self._first_trained))
        for each in (place, place - 1):
            for item in kept.get(each, ()):
                item.fetch()
        for item in kept.pop(place, ()):
            item.wait()

    def _lend(self, place: int, ahead: int) -> None:
        """Have the weights of a block on the device, those of another on their way, and no others."""
        for number, products in enumerate(self._products):
            for item in products if number not in (place, ahead) else ():
                item.release()
        for number in (place, ahead):
            for item in self._products[number] if 0 <= number < len(self._products) else ():
                item.fetch()
        for item in self._products[place]:
            item.wait()


def _is_whole(tensor: torch.Tensor) -> bool:
    """Whether a tensor is all of its storage, which may otherwise serve others."""
    return tensor.untyped_storage().nbytes() == tensor.nbytes
