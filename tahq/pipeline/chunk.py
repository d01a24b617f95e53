"""One piece of the model on a stage: its module, the cuts on either side, and how it is computed.

Shapes: B samples per micro-batch, S tokens, C channels, V words of the vocabulary.
"""

from dataclasses import dataclass

import torch

from tahq.memory.galore.qgalore import low_rank_weights
from tahq.models.slice import ModelSlice
from tahq.pipeline.boundary import Boundary
from tahq.pipeline.gradients import HoldsGradient, gradient_scale


@dataclass(frozen=True, slots=True)
class Chunk:
    """One piece of the model with the cuts on either side; None at the ends of the model."""

    module: ModelSlice
    incoming: Boundary | None
    outgoing: Boundary | None

    def gradient_holders(self) -> list[HoldsGradient]:
        """Everything that a backward accumulates gradients in: parameters and low-rank weights."""
        return [*self.module.parameters(), *low_rank_weights(self.module).values()]

    def compute(self, x: torch.Tensor, *, bf16: bool) -> torch.Tensor:
        """Tokens [B, S] or activations [B, S, C] -> logits [B, S, V], or activations in fp32 where they cross a cut.

        With `bf16` the module computes under autocast.
        """
        y: torch.Tensor
        if bf16:
            with torch.autocast(x.device.type, torch.bfloat16):
                y = self.module(x)
        else:
            y = self.module(x)
        return y if self.outgoing is None else y.float()


@dataclass(frozen=True, slots=True)
class StepShape:
    """The sizes that all steps have in common."""

    num_micro_batches: int
    micro_batch: int
    seq_len: int
    hidden_size: int

    @property
    def boundary(self) -> tuple[int, int, int]:
        """[B, S, C] of what crosses a cut."""
        return (self.micro_batch, self.seq_len, self.hidden_size)

    @property
    def gradient_scale(self) -> float:
        """See `gradients.gradient_scale`; all tokens count, labelled or not, because every stage knows their number."""
        return gradient_scale(self.num_micro_batches * self.micro_batch * self.seq_len)
