"""`data:` of cluster.yaml."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from tahq.units import Section


def _not_empty(paths: str | list[str]) -> str | list[str]:
    if not paths or (isinstance(paths, list) and not all(paths)):
        raise ValueError(f"expected a path or a list of paths and globs; got {paths!r}")
    return paths


Paths = Annotated[str | list[str], AfterValidator(_not_empty)]
"""A path, or a list of paths and globs."""


class DataConfig(Section):
    """The training data: one of text, tokens or jsonl, cut into samples of `seq_len` tokens.

    `text: stdlib` is the source of the running Python's standard library. A path may be a file, a
    folder or a glob. `tokens` are flat files of uint16 or uint32, memory-mapped. `jsonl` has one object per line with
    `prompt` and `response`; the loss is on the response.
    """

    text: Paths | None = None
    tokens: Paths | None = None
    tokens_dtype: Literal["uint16", "uint32"] = "uint16"
    """Item of the token files, little-endian."""
    jsonl: Paths | None = None
    tokenizer: str = Field(default="bytes", min_length=1)
    """`bytes` (one token per byte, 0 after each document), a local Hugging Face folder, or a tokenizer.json. Not set:
    `model.path`, or bytes without it."""
    seq_len: int = Field(default=256, ge=1, le=2**24)
    """Tokens per sample."""
    validation: float = Field(default=0.05, ge=0.0, lt=1.0)
    """Share of the data held out for validation; which part depends on the data alone."""
    shuffle: bool = True
    """False: samples in the order of the data, every epoch."""

    @model_validator(mode="after")
    def _one_source(self) -> "DataConfig":
        given = [name for name in ("text", "tokens", "jsonl") if getattr(self, name) is not None]
        if len(given) != 1:
            got = f"{' and '.join(given)}; null takes one away" if given else "none"
            raise ValueError(f"needs exactly one of text, tokens, jsonl; got {got}")
        return self
