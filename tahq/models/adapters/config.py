"""`adapter:` of cluster.yaml."""

import math
import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from tahq.units import Section

_RANGE = re.compile(r"(\d+) *- *(\d+)")
ALL_LINEAR = "all-linear"
DOWN, UP, MAGNITUDE = "lora_A", "lora_B", "lora_magnitude_vector"
"""Names of an adapter's parts, as in peft."""
_OTHER_KINDS = {
    "dora": "dora is a switch: use kind: lora with dora: true",
    "rslora": "rslora is a switch: use kind: lora with rslora: true",
}


def _range_as_list(value: object) -> object:
    match = _RANGE.fullmatch(value) if isinstance(value, str) else None
    return value if match is None else list(range(int(match[1]), min(int(match[2]), 2**14) + 1))


def _text_as_list(value: object) -> object:
    return [value] if isinstance(value, str) and value != ALL_LINEAR else value


Layers = Annotated[list[Annotated[int, Field(ge=0)]], BeforeValidator(_range_as_list), Field(min_length=1)]
"""Numbers of blocks from 0, or the first and the last as text: `8-15`."""


class AdapterConfig(Section):
    """Low-rank adapters beside the linear layers of blocks; only they are trained. A text alone is its `kind`.

    Example: `adapter: {kind: lora, rank: 16, alpha: 32, targets: [q_proj, v_proj]}`
    """

    kind: Literal["lora", "qlora"] = "lora"
    """`qlora`: LoRA beside matrices in 4 bits (NF4)."""
    rank: int = Field(default=16, ge=1)
    """Rows of A and columns of B."""
    alpha: float | None = Field(default=None, gt=0)
    """B·A is multiplied by `alpha` / `rank`. Not set: twice `rank`."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Probability, on the input of A."""
    targets: Annotated[Literal["all-linear"] | list[str], BeforeValidator(_text_as_list)] = "all-linear"
    """Linear layers with an adapter, by the ends of their names, as peft's `target_modules`: `[q_proj, v_proj]`, for
    GPT-2 `[c_attn, mlp.c_proj]`. `all-linear`: all of each block, but not the stacked weights of experts."""
    layers: Layers | None = None
    """Blocks with adapters, from 0: a list, or `8-15`. Not set: all."""
    rslora: bool = False
    """Multiply by `alpha` / √`rank` instead (rsLoRA)."""
    dora: bool = False
    """Train the norms of weights' rows too, apart from their directions (DoRA)."""

    @model_validator(mode="before")
    @classmethod
    def _kind_alone(cls, value: Any) -> Any:
        return {"kind": value} if isinstance(value, str) else value

    @field_validator("kind", mode="before")
    @classmethod
    def _refuse_other_kinds(cls, kind: object) -> object:
        if reason := _OTHER_KINDS.get(str(kind)):
            raise ValueError(reason)
        return kind

    @model_validator(mode="after")
    def _open_alpha(self) -> "AdapterConfig":
        if "alpha" not in self.model_fields_set or self.alpha is None:
            self.set_default("alpha", 2.0 * self.rank)
        return self

    @property
    def scale(self) -> float:
        """The factor of B·A."""
        assert self.alpha is not None, "the validator has set it"
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def covers(self, path: str) -> bool:
        """Whether a target names a linear layer, by its path in a block."""
        return isinstance(self.targets, str) or any(is_end_of(path, target) for target in self.targets)


def is_adapter(name: str) -> bool:
    """Whether a parameter, by its canonical name, belongs to an adapter."""
    return name.removesuffix(".weight").rpartition(".")[2] in (DOWN, UP, MAGNITUDE)


def is_end_of(path: str, target: str) -> bool:
    """Whether the last parts of a dotted path are these, as peft compares them."""
    return f".{path}".endswith(f".{target}")
