"""Sections of `training:` that belong to one optimizer each."""

from typing import Literal

from pydantic import Field

from tahq.memory.adam.adamw8bit import MIN_ELEMENTS
from tahq.units import Section


class Fp8AdamWConfig(Section):
    """How `fp8_adamw` keeps AdamW's two moments (COAT §4)."""

    first: Literal["e4m3", "e5m2"] = "e4m3"
    """Format of the first moment, m."""
    second: Literal["e4m3", "e5m2"] = "e4m3"
    """Format of the second moment, v."""
    expand_first: bool = True
    """Whether groups of m are raised to the power at which they fill the format's range."""
    expand_second: bool = True
    """The same for v."""


class AdamW8bitConfig(Section):
    """How `adamw8bit` lays out its moments."""

    block: Literal[64, 128, 256, 512, 1024, 2048] = 256
    """Elements that share a scale."""
    min_elements: int = Field(default=MIN_ELEMENTS, ge=0)
    """Parameters with fewer elements keep fp32 moments."""
