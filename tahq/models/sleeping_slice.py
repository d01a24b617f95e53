"""A stage that sleeps in place of computing, for measuring networks on few cores.

Four stages of real compute on two cores get half a core each, and measurements then show the machine. A sleeping slice
takes the time that its stage would take alone and leaves the cores to codecs, transport and schedule, all of them real.
Its outputs have the shape of activations and a similar distribution (normal, no two channels alike); gradients come
from a real loss at the last stage. It learns nothing.

Shapes: B samples, S positions, C hidden channels, V vocabulary.
"""

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from tahq.models.keyed_dropout import RandomContext
from tahq.models.model_spec import ModelSpec
from tahq.models.partition import BlockRange
from tahq.models.slice import ModelSlice

INPUT_GRADIENT_SHARE = 0.5
"""Share of a split backward: its two matrix products, for the input and for the weights, have equal size."""

_NUM_ROWS = 257
"""Rows of the table that replaces the embedding."""


class SleepingSlice(ModelSlice):
    """A model slice whose forward and backward end a fixed time after they began.

    Args:
        spec: the imitated model.
        blocks: of the imitated slice.
        random: its seed fills the table.
        forward_s: seconds of a micro-batch's forward.
        backward_s: seconds of its backward.
    """

    def __init__(
        self, spec: ModelSpec, blocks: BlockRange, random: RandomContext, *, forward_s: float, backward_s: float
    ) -> None:
        super().__init__(spec, blocks, random)
        self.table: torch.Tensor
        self.forward_s = forward_s
        self.backward_s = backward_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Int64 tokens [B, S] or hidden states [B, S, C] to hidden states [B, S, C] or logits [B, S, V], in time."""
        end_s = time.perf_counter() + self.forward_s
        hidden = self.table[x % _NUM_ROWS] if self.parts.embedding else x
        backward = _Backward(self._nap_in_backward())
        hidden = hidden * _LastInBackward.apply(self.scale, backward)  # type: ignore[no-untyped-call]
        if self.parts.head:
            hidden = _resized(hidden, self.spec.vocab_size)
        time.sleep(max(0.0, end_s - time.perf_counter()))
        output: torch.Tensor = _FirstInBackward.apply(hidden, backward)  # type: ignore[no-untyped-call]
        return output

    def _nap_in_backward(self) -> float:
        """Seconds of the backward, or of its first part; the second part is deferred."""
        if self.deferred is None:
            return self.backward_s
        nap_s = INPUT_GRADIENT_SHARE * self.backward_s
        self.deferred.add(partial(time.sleep, self.backward_s - nap_s))
        return nap_s

    def materialise(self, device: torch.device) -> None:
        """Allocate on `device` one factor per channel, and the table in place of an embedding."""
        self.to_empty(device=device)
        with torch.no_grad():
            self.scale.fill_(1.0)
        if self.parts.embedding:
            generator = torch.Generator("cpu").manual_seed(self.random.seed % 2**63)
            rows = torch.empty(_NUM_ROWS, self.spec.hidden_size).normal_(generator=generator)
            self.register_buffer("table", rows.to(device), persistent=False)

    def _add_modules(self) -> None:
        self.scale = nn.Parameter(torch.empty(self.spec.hidden_size))

    def canonical_parameters(self) -> dict[str, nn.Parameter]:
        """The factors, under a name unique to the stage."""
        return {f"sleep.{self.parts.blocks.start}.scale": self.scale}


@dataclass(slots=True)
class _Backward:
    """One micro-batch's backward: how long it takes, and when it began."""

    lasts_s: float
    begin_s: float = 0.0


class _InBackward(torch.autograd.Function):
    """The identity."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, backward: _Backward) -> torch.Tensor:
        ctx.backward_pass = backward
        return x.view_as(x)


class _FirstInBackward(_InBackward):
    """At the end of forward: records when the backward begins."""

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.backward_pass.begin_s = time.perf_counter()
        return gradients[0], None


class _LastInBackward(_InBackward):
    """On the factors: sleeps until the backward's time is over."""

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        backward: _Backward = ctx.backward_pass
        time.sleep(max(0.0, backward.begin_s + backward.lasts_s - time.perf_counter()))
        return gradients[0], None


def _resized(hidden: torch.Tensor, num_channels: int) -> torch.Tensor:
    """[B, S, C] as [B, S, num_channels], channels repeated, or surplus ones added to the first; all get gradients."""
    repeats = -(-num_channels // hidden.shape[-1])
    if repeats > 1:
        return hidden.repeat(1, 1, repeats)[..., :num_channels]
    folds = torch.split(hidden, num_channels, dim=-1)
    return sum((nn.functional.pad(part, (0, num_channels - part.shape[-1])) for part in folds[1:]), folds[0])


def build_sleeping_slice(
    spec: ModelSpec,
    block_range: BlockRange,
    forward_s: float,
    backward_s: float,
    *,
    device: torch.device | str,
    random: RandomContext,
) -> SleepingSlice:
    """A slice on `device` with these times per micro-batch."""
    model = SleepingSlice(spec, block_range, random, forward_s=forward_s, backward_s=backward_s)
    model.materialise(torch.device(device))
    return model
