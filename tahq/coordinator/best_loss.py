"""The lowest validation loss of a run so far, and whether the run stops because no later one is lower.

Pure. The loss is the one without codecs, since the exported model has none.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from tahq.pipeline.config import EarlyStopping

BEST_LOSS = "best_loss"
"""The key of `saved` in a checkpoint's state of codecs and schedule."""


@dataclass(frozen=True, slots=True)
class BestLoss:
    """The lowest loss, in nats per token, and the steps behind it (0: there is none yet)."""

    loss: float = math.inf
    step: int = 0
    num_worse: int = 0
    """Evaluations since the last one that was lower than all before it, by more than `min_delta`."""

    def after(self, step: int, loss: float, rule: EarlyStopping | None) -> Self:
        """With another evaluation; NaN is never lower."""
        is_lower = loss < self.loss
        improves = loss < self.loss - (0.0 if rule is None else rule.min_delta)
        best = (loss, step) if is_lower else (self.loss, self.step)
        return type(self)(*best, 0 if improves else self.num_worse + 1)

    def saved(self) -> dict[str, Any]:
        """In plain values, for a checkpoint; {}: there was no evaluation."""
        return {BEST_LOSS: [self.loss, self.step, self.num_worse]} if self != type(self)() else {}

    @classmethod
    def restored(cls, saved: Mapping[str, Any]) -> Self:
        """From what `saved` has returned."""
        match saved.get(BEST_LOSS):
            case [float(loss), int(step), int(num_worse)]:
                return cls(loss, step, num_worse)
        return cls()

    def why_over(self, rule: EarlyStopping | None) -> str:
        """Why training should stop; empty: it should not."""
        if rule is None or self.num_worse < rule.patience:
            return ""
        by = f" by more than {rule.min_delta:g}" if rule.min_delta else ""
        lowest = f"; the lowest is {self.loss:.4f}, after step {self.step}" if self.step else ""
        return f"no validation loss was lower{by} in {self.num_worse} evaluations (training.early_stopping){lowest}"
