"""Configuration of memory: the section `memory:`, and the sections of `training:` that belong to one optimizer."""

from typing import Literal

from pydantic import Field, model_validator

from tahq.units import Section

COAT_FAMILIES = ("llama", "qwen2", "mistral")
"""Families with Llama's block: two RMSNorms, a gated SiLU, nothing between projections and rotary embedding."""
MIN_ELEMENTS = 4096


class CoatConfig(Section):
    """`memory.coat`: options of `activations: coat`."""

    backward_products: Literal["e5m2", "e4m3", "bf16"] = "e5m2"
    """Format of an output's gradient in the backward products of a linear layer; gradients themselves stay bf16."""
    keep_weight_codes: bool = True
    """Keep the weights' FP8 codes for all micro-batches of a step; otherwise only their scales are kept, and the
    weights are coded again for every product."""


class MemoryConfig(Section):
    """Formats of what a stage keeps in memory."""

    activations: Literal["none", "coat"] = "none"
    """`none`: as torch saves them; `coat`: FP8 (COAT), for Llama and models built like it."""
    coat: CoatConfig = CoatConfig()


class Fp8AdamWConfig(Section):
    """How `fp8_adamw` stores AdamW's two moments (COAT §4)."""

    first: Literal["e4m3", "e5m2"] = "e4m3"
    """Format of the first moment, m."""
    second: Literal["e4m3", "e5m2"] = "e4m3"
    """Format of the second moment, v."""
    expand_first: bool = True
    """Raise groups of m to the power at which they fill the format's range."""
    expand_second: bool = True
    """The same for v."""


class AdamW8bitConfig(Section):
    """How `adamw8bit` stores its moments."""

    block: Literal[64, 128, 256, 512, 1024, 2048] = 256
    """Elements that share a scale."""
    min_elements: int = Field(default=MIN_ELEMENTS, ge=0)
    """Parameters with fewer elements keep fp32 moments."""


class QGaLoreConfig(Section):
    """How `training.optimizer: qgalore` and `galore` train the matrices of attention and MLP.

    The three types and `lazy` default to int8, int4, int8 and true under `qgalore`, and to fp32, fp32, fp32 and false
    under `galore`.
    """

    rank: int | None = Field(default=None, ge=1)
    """Of the subspace; None: a quarter of a matrix's smaller dimension. From that dimension on nothing is projected."""
    scale: float = Field(default=0.25, gt=0)
    """Factor of an update when it is projected back."""
    gap: int = Field(default=200, ge=1)
    """Steps from one search for a subspace to the next, except to the second (`LazyRule.spread`)."""
    max_gap: int | None = Field(default=None, ge=1)
    """Largest gap, however stable the subspace; None: 16 times `gap`."""
    queue: int = Field(default=5, ge=1)
    """The gap doubles after this many similarities in a row ..."""
    threshold: float = Field(default=0.4, gt=0, le=1)
    """... of at least this."""
    lazy: bool | None = None
    """Whether the gap ever doubles."""
    weights: Literal["int8", "bf16", "fp32"] | None = None
    projections: Literal["int4", "bf16", "fp32"] | None = None
    states: Literal["int8", "fp32"] | None = None
    """Adam's moments, those of all other parameters included."""
    ends: Literal["int8", "bf16", "fp32"] | None = None
    """Type of embedding and head, which are not projected; None: see `low_rank_settings` in `pipeline/optimizer.py`."""
    rounding: Literal["stochastic", "nearest"] = "stochastic"
    """Of updated int8 weights, and of ends in bf16."""
    svd: Literal["exact", "randomised"] = "randomised"
    """How a subspace is found; `exact` is the papers', and takes minutes for the matrices of 7B models."""
    fused: bool = False
    """Update each weight within the backward pass."""

    @model_validator(mode="after")
    def _consistent(self) -> "QGaLoreConfig":
        if self.max_gap is not None and self.max_gap < self.gap:
            raise ValueError(f"max_gap {self.max_gap} is below gap {self.gap}")
        return self
