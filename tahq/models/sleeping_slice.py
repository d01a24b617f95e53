"""A stage that sleeps instead of computing, for measuring networks on few cores.

Four stages of real compute on two cores get half a core each, and measurements then show the machine. A sleeping slice
takes the time that its stage would take alone and leaves the cores to codecs, transport and schedule, all of them real.
Its outputs have the shape of activations and a similar distribution (normal, no two channels alike); gradients come
from a real loss at the last stage. It learns nothing.

Shapes: B samples, S positions, C hidden channels, V vocabulary.
"""

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from tahq.models.keyed_dropout import RandomContext
from tahq.models.model_spec import ModelSpec
from tahq.models.partition import BlockRange
from tahq.models.slice import ModelSlice

INPUT_GRADIENT_SHARE = 0.5
"""Share of a split backward: its two matrix products, for the input and for the weights, have equal size."""

_NUM_ROWS = 257  # Rows of the table that replaces the embedding


class SleepingSlice(ModelSlice):
    """A model slice whose forward and backward end a fixed time after they began, in seconds of a micro-batch.

    The seed of `random` fills the table.
    """

    def __init__(
        self,
        spec: ModelSpec,
        blocks: BlockRange,
        forward_s: float,
        backward_s: float,
        *,
        device: torch.device | str,
        random: RandomContext,
    ) -> None:
        super().__init__(spec, blocks, random)
        self.table: torch.Tensor
        self.forward_s, self.backward_s = forward_s, backward_s
        self.materialise(torch.device(device))

    def forward(self, x: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Int64 tokens [B, S] or hidden states [B, S, C] to hidden states [B, S, C] or logits [B, S, V], in time."""
        end_s = time.perf_counter() + self.forward_s
        hidden = self.table[x % _NUM_ROWS] if self.parts.embedding else x
        factors = self.scale.view_as(self.scale)
        hidden = hidden * factors
        if self.parts.head:
            hidden = _resized(hidden, self.spec.vocab_size)
        if hidden.requires_grad:
            self._time_backward(hidden, factors)
        time.sleep(max(0.0, end_s - time.perf_counter()))
        return hidden

    def _time_backward(self, first: torch.Tensor, last: torch.Tensor) -> None:
        """Make the backward last its time, from `first`'s gradient to `last`'s; its second part is deferred."""
        lasts_s, begun_s = self.backward_s, list[float]()
        if self.deferred is not None:
            lasts_s = INPUT_GRADIENT_SHARE * self.backward_s
            self.deferred.add(partial(time.sleep, self.backward_s - lasts_s))

        def rest(gradient: torch.Tensor) -> None:
            time.sleep(max(0.0, begun_s[0] + lasts_s - time.perf_counter()))

        first.register_hook(lambda gradient: begun_s.append(time.perf_counter()))  # type: ignore[no-untyped-call]
        last.register_hook(rest)  # type: ignore[no-untyped-call]

    def materialise(self, device: torch.device, placed: Callable[[nn.Module], None] = lambda block: None) -> None:
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

    def is_trained(self, name: str) -> bool:
        """Whether its stage has anything that is trained."""
        return self.parts.head or self.num_frozen_blocks < len(self.parts.blocks)

    def canonical_parameters(self) -> dict[str, nn.Parameter]:
        """The factors, under a name unique to the stage."""
        return {f"sleep.{self.parts.blocks.start}.scale": self.scale}


def _resized(hidden: torch.Tensor, num_channels: int) -> torch.Tensor:
    """[B, S, C] as [B, S, num_channels], channels repeated, or surplus ones added to the first; all get gradients."""
    repeats = -(-num_channels // hidden.shape[-1])
    if repeats > 1:
        return hidden.repeat(1, 1, repeats)[..., :num_channels]
    folds = torch.split(hidden, num_channels, dim=-1)
    return sum((nn.functional.pad(part, (0, num_channels - part.shape[-1])) for part in folds[1:]), folds[0])
