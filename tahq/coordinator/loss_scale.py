"""The loss scale of a run with products in fp16, as torch.amp.GradScaler changes it; decided with each COMMIT.

Pure. Losses are multiplied by the scale, so that gradients are not lost below fp16's smallest number, and gradients
are divided by it before their norms are taken. Both are exact, since it is a power of two.

Source: Micikevicius et al. 2018, Mixed Precision Training, §3.2.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from tahq.comm.control.messages import Commit
from tahq.pipeline.config import LossScaleConfig

LOSS_SCALE: Final = "loss_scale"
"""The key of `saved` in a checkpoint's state of codecs and schedule."""
LEAST = 1.0
"""An overflow at this scale ends the run."""
MOST = 2.0**120
"""Above it the scale does not grow."""


@dataclass(frozen=True, slots=True)
class LossScale:
    """The scale of the next step."""

    scale: float
    growth_steps: int
    num_good: int = 0
    """Steps without an overflow since it was changed."""

    @classmethod
    def at_start(cls, config: LossScaleConfig, saved: Mapping[str, Any]) -> Self:
        """The configured one, or what `saved` has returned for the checkpoint."""
        match saved.get(LOSS_SCALE):
            case [float(scale), int(num_good)]:
                return cls(scale, config.growth_steps, num_good)
        return cls(config.initial, config.growth_steps)

    def saved(self) -> dict[str, Any]:
        """In plain values, for a checkpoint."""
        return {LOSS_SCALE: [self.scale, self.num_good]}

    def after(self, commit: Commit) -> Self:
        """With another step: half of it if gradients have overflowed."""
        if commit.abandoned:
            return self
        if not commit.apply:
            return replace(self, scale=max(LEAST, self.scale / 2), num_good=0)
        if self.num_good + 1 < self.growth_steps:
            return replace(self, num_good=self.num_good + 1)
        return replace(self, scale=min(MOST, self.scale * 2), num_good=0)
