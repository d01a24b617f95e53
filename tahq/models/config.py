"""`model:` of cluster.yaml."""

import math
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from tahq.units import Duration, Section

Family = Literal["gpt2", "llama", "qwen2", "qwen3", "mistral"]


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

    `forward` and `backward` are the times of a micro-batch, on every stage or listed by stage.
    """

    forward: Durations
    backward: Durations

    def of(self, stage: int) -> tuple[float, float]:
        """Seconds of a stage's forward and backward."""
        forward, backward = (row[stage if len(row) > 1 else 0] for row in (self.forward, self.backward))
        return forward, backward


class ModelConfig(Section):
    """The model: a family with sizes (random weights), or a local folder.

    `path` names a folder with a Hugging Face config.json and safetensors, which give the sizes below. `overrides` are
    further keys of the transformers configuration.
    """

    path: str | None = None
    family: Family | None = None
    num_layers: int | None = Field(default=None, ge=1)
    hidden_size: int | None = Field(default=None, ge=1)
    num_heads: int | None = Field(default=None, ge=1)
    num_kv_heads: int | None = Field(default=None, ge=1)
    intermediate_size: int | None = Field(default=None, ge=1)
    vocab_size: int | None = Field(default=None, ge=1)
    """None: the tokenizer's."""
    max_seq_len: int | None = Field(default=None, ge=1)
    """Longest sequence that the model can take; None: data.seq_len."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    tie: Literal["untied", "sync"] = "untied"
    """`untied`: embedding and head are two parameters at every number of stages. `sync`: their
    gradients are exchanged and summed each step, which promises a tolerance, not equal bits."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    sleep: SleepConfig | None = None
    """Stages sleep instead of computing; tensors between them have the model's shapes but meaningless values."""

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
        if self.sleep is not None and self.tie == "sync":
            raise ValueError("sleep leaves no embedding whose gradients tie: sync could exchange; remove one of them")
        return self
