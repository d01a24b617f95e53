"""Sections of `training:` for the optimizers that keep little."""

from typing import Literal

from pydantic import Field

from tahq.memory.adamw8bit import MIN_ELEMENTS
from tahq.units import Section


class AdamW8bitConfig(Section):
    """`training.adamw8bit`: how `adamw8bit` lays out its moments."""

    block: Literal[64, 128, 256, 512, 1024, 2048] = 256
    """Elements that share a scale."""
    min_elements: int = Field(default=MIN_ELEMENTS, ge=0)
    """Parameters with fewer elements keep fp32 moments."""
