"""Dropout whose masks have names, so that they depend neither on the cut nor on what ran before.

A mask is drawn by a generator that is seeded, for that one mask, by (seed, module path in the
whole model, step, replica, micro-batch, purpose). Computing a block again, as activation
checkpointing and replay do, draws the same mask without any saved random state.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from tahq.randomness import derive_seed


@dataclass(frozen=True, slots=True)
class DrawName:
    """Which forward pass is computing: all that a mask's seed needs beside seed and module path."""

    step: int
    replica: int
    micro_batch: int
    purpose: int | str


class RandomContext:
    """What the engine tells keyed dropout about the forward pass that is about to run."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.current = DrawName(step=0, replica=0, micro_batch=0, purpose="train")

    def at(self, step: int, replica: int, micro_batch: int, purpose: int | str) -> None:
        """Name the next forward pass."""
        self.current = DrawName(step, replica, micro_batch, purpose)

    @contextmanager
    def pinned(self, name: DrawName) -> Iterator[None]:
        """Compute under `name`, whatever pass the engine has named since: a recomputed block."""
        before, self.current = self.current, name
        try:
            yield
        finally:
            self.current = before

    def seed_of(self, module_path: str) -> int:
        """64-bit seed of the mask that `module_path` draws in the current pass."""
        name = self.current
        return derive_seed(self.seed, module_path, name.step, name.replica, name.micro_batch, name.purpose)


class KeyedDropout(nn.Module):
    """`nn.Dropout` with a named mask: y = x · m / (1 − p), m drawn Bernoulli(1 − p).

    Equal to the bit on every CPU; on CUDA the mask comes from the device's own generator, and is
    equal wherever the device is of the same kind.

    Args:
        p: probability that an element is dropped; at 0 the module is the identity.
        path: the module's path in the whole model.
        random: where the name of the current pass is read.
    """

    def __init__(self, p: float, path: str, random: RandomContext) -> None:
        super().__init__()
        self.p = p
        self.path = path
        self.random = random

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` of any shape, in training with elements dropped; unchanged in evaluation."""
        if not self.training or self.p == 0.0:
            return x
        generator = torch.Generator(x.device)
        generator.manual_seed(self.random.seed_of(self.path))
        keep = torch.rand(x.shape, generator=generator, device=x.device) >= self.p
        # The mask stays one byte an element in what autograd keeps: a scaled float mask would be four.
        return x * keep * (1.0 / (1.0 - self.p))

    def extra_repr(self) -> str:
        """What `print(module)` shows."""
        return f"p={self.p}, path={self.path}"


def key_dropout(tree: nn.Module, random: RandomContext) -> None:
    """Replace each `nn.Dropout` of a module tree whose names are those of the whole model.

    An attention that keeps its dropout as a number (`attention_dropout`, the Llama kind) gets a
    module for it, `attn_dropout`, as GPT-2's has; `tahq.models.attention` calls it.
    """
    for path, module in list(tree.named_modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Dropout):
                setattr(module, name, KeyedDropout(child.p, f"{path}.{name}", random))
        p = getattr(module, "attention_dropout", None)
        if p is not None:
            module.add_module("attn_dropout", KeyedDropout(float(p), f"{path}.attn_dropout", random))
