"""`training.qgalore` of cluster.yaml."""

from typing import Literal

from pydantic import Field, model_validator

from tahq.units import Section


class QGaLoreConfig(Section):
    """What `training.optimizer: qgalore`, and `galore`, do with the matrices of attention and MLP.

    Three types and `lazy` follow from the optimizer where they are not set: int8, int4, int8 and true under `qgalore`,
    fp32, fp32, fp32 and false under `galore`.
    """

    rank: int | None = Field(default=None, ge=1)
    """Of the subspace; None: a quarter of a matrix's smaller dimension. From that dimension on nothing is projected."""
    scale: float = Field(default=0.25, gt=0)
    """What an update is multiplied by when it is projected back."""
    gap: int = Field(default=200, ge=1)
    """Steps from one search for a subspace to the next."""
    max_gap: int | None = Field(default=None, ge=1)
    """At most so many, however stable the subspace; None: 16 times `gap`."""
    queue: int = Field(default=5, ge=1)
    """So many similarities in a row ..."""
    threshold: float = Field(default=0.4, gt=0, le=1)
    """... of at least this double the gap."""
    lazy: bool | None = None
    """Whether it is ever doubled."""
    weights: Literal["int8", "bf16", "fp32"] | None = None
    projections: Literal["int4", "bf16", "fp32"] | None = None
    states: Literal["int8", "fp32"] | None = None
    """Adam's, those of all other parameters included."""
    ends: Literal["int8", "bf16", "fp32"] | None = None
    """What embedding and head are kept in. They are not projected; None: see `pipeline/low_rank.py`."""
    rounding: Literal["stochastic", "nearest"] = "stochastic"
    """Of updated int8 weights, and of ends in bf16."""
    svd: Literal["exact", "randomised"] = "exact"
    fused: bool = False
    """Update each weight within the backward pass."""

    @model_validator(mode="after")
    def _consistent(self) -> "QGaLoreConfig":
        if self.max_gap is not None and self.max_gap < self.gap:
            raise ValueError(f"max_gap {self.max_gap} is below gap {self.gap}")
        return self
