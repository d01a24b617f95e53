"""`model:` of cluster.yaml."""

import math
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from tahq.units import Duration, Section

Family = Literal[
    "gpt2",
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "smollm3",
    "olmo2",
    "phi3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "qwen2_moe",
    "qwen3_moe",
    "mixtral",
]

RouterLossKey = Literal["auto", "pooled", "per_layer", "none"]


def _refuse_non_finite(value: object) -> None:
    """JSON has no NaN, and a configuration is hashed as JSON."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"numbers must be finite; got {value!r}")
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            _refuse_non_finite(part)


def _one_for_all(value: object) -> object:
    return value if isinstance(value, list) else [value]


Durations = Annotated[list[Duration], BeforeValidator(_one_for_all), Field(min_length=1)]
"""A duration for every stage, or one for all of them."""


class SleepConfig(Section):
    """Imitated compute, for measuring networks with fewer cores than stages.

    Example: `emulate.sleep: {forward: 73ms, backward: 152ms}`
    """

    forward: Durations
    """Forward of a micro-batch: one duration for all stages, or a list."""
    backward: Durations
    """Backward of a micro-batch."""

    def of(self, stage: int) -> tuple[float, float]:
        """Seconds of a stage's forward and backward."""
        forward, backward = (row[stage if len(row) > 1 else 0] for row in (self.forward, self.backward))
        return forward, backward


class ModelConfig(Section):
    """The model: a local folder, a name on the Hugging Face Hub, or a family with sizes, whose weights are random. A
    text alone is its `path`.

    Example: `model: {path: Qwen/Qwen3-0.6B}` or `model: {family: gpt2, num_layers: 8, hidden_size: 256, num_heads: 8}`
    """

    path: str | None = None
    """Folder with a Hugging Face config.json and safetensors, or a model on the Hub, `OWNER/NAME` or
    `OWNER/NAME@REVISION`, of which each worker fetches what it needs. It gives the sizes, so the keys from `family` to
    `vocab_size` are then refused."""
    family: Family | None = None
    """Architecture. Required without `path`, as are the next three."""
    num_layers: int | None = Field(default=None, ge=1)
    """Transformer blocks."""
    hidden_size: int | None = Field(default=None, ge=1)
    """Channels of the residual stream, which crosses the wire."""
    num_heads: int | None = Field(default=None, ge=1)
    """Attention heads."""
    num_kv_heads: int | None = Field(default=None, ge=1)
    """Heads of keys and values (not gpt2). Not set: as `num_heads`."""
    intermediate_size: int | None = Field(default=None, ge=1)
    """Inner channels of the MLP. Not set: 4 times `hidden_size` (gpt2), or 8/3 of it, rounded up to a multiple of
    64."""
    vocab_size: int | None = Field(default=None, ge=1)
    """Rows of embedding and head. Not set: the tokenizer's."""
    max_seq_len: int | None = Field(default=None, ge=1)
    """Longest sequence that the model can take, in tokens. Not set: `data.seq_len`, or the folder's."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Probability, wherever the architecture has dropout."""
    tie: Literal["untied", "sync"] = "untied"
    """`untied`: embedding and head are two parameters. `sync`: their gradients are summed each step, exact up to
    rounding."""
    frozen_layers: int = Field(default=0, ge=0)
    """The embedding and so many blocks from the first on keep their weights; as many as the model has: only the last
    norm and the head are trained. Nothing is sent back to stages below the first trained block."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Further keys of the transformers configuration, such as `{activation_function: gelu_pytorch_tanh}`."""

    @model_validator(mode="before")
    @classmethod
    def _path_alone(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value

    @field_validator("overrides")
    @classmethod
    def _finite_overrides(cls, overrides: dict[str, Any]) -> dict[str, Any]:
        _refuse_non_finite(overrides)
        return overrides

    @model_validator(mode="after")
    def _folder_or_sizes(self) -> "ModelConfig":
        sizes = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "intermediate_size", "vocab_size")
        if self.path is not None:
            given = [name for name in ("family", *sizes) if getattr(self, name) is not None]
            if given:
                raise ValueError(f"with a path the folder's config.json gives {', '.join(given)}; remove them")
        else:
            missing = [n for n in ("family", "num_layers", "hidden_size", "num_heads") if getattr(self, n) is None]
            if missing:
                raise ValueError(f"needs {', '.join(missing)}, or a path to a folder with config.json and safetensors")
            check_frozen_layers(self, self.num_layers or 0)
        if self.frozen_layers and self.tie == "sync":
            raise ValueError(
                "frozen_layers does not train the embedding, and under tie: sync the head would have to equal it; "
                "use tie: untied"
            )
        return self


def check_frozen_layers(config: ModelConfig, num_layers: int) -> None:
    """Raise ValueError if more blocks are to be frozen than the model has."""
    if config.frozen_layers > num_layers:
        raise ValueError(f"frozen_layers {config.frozen_layers} is above the model's {num_layers} blocks")
