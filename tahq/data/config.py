"""`data:` of cluster.yaml."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from tahq.hub import DATA_FILES, is_hub_name
from tahq.units import Section


def _not_empty(paths: str | list[str]) -> str | list[str]:
    if not paths or (isinstance(paths, list) and not all(paths)):
        raise ValueError(f"expected a path or a list of paths and globs; got {paths!r}")
    return paths


Paths = Annotated[str | list[str], AfterValidator(_not_empty)]
"""A path, or a list of paths and globs."""
Share = Annotated[float, Field(ge=0.0, lt=1.0)]
SetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$", max_length=40)]
Kind = Literal["text", "tokens", "records"]


class DataConfig(Section):
    """The training data: one of `text`, `tokens` and `records`, cut into samples of `seq_len` tokens.

    The first and the last stage read it, so both machines need it.

    Example: `data: {text: [books/*.txt, notes], tokenizer: models/gpt2, seq_len: 512}`
    """

    text: Paths | None = None
    """Files, folders and globs of UTF-8 text, or `stdlib`: the source of Python's standard library."""
    tokens: Paths | None = None
    """Flat files of token ids, memory-mapped."""
    tokens_dtype: Literal["uint16", "uint32"] = "uint16"
    """Type of an id in the token files, little-endian."""
    records: Paths | None = None
    """Files of records (.jsonl, .json, .parquet, .arrow), or datasets on the Hub (`OWNER/NAME`, `OWNER/NAME@REVISION`).
    A record has prompt and response, instruction, input and output, messages, or text; the loss is on responses. Also
    called `jsonl`."""
    split: str | None = Field(default=None, min_length=1)
    """Part of datasets on the Hub. Not set: `train`."""
    subset: str | None = Field(default=None, min_length=1)
    """Configuration of datasets on the Hub that have several."""
    packing: Literal["auto"] | bool = "auto"
    """Several `records` in a row of `seq_len` tokens, which do not see each other; a row then counts as a
    sample. `auto`: if an epoch still has 100 steps. `false`: each record is padded to `seq_len`."""
    truncation: Literal["end", "start", "drop", "error"] = "end"
    """Of a record that is longer than `seq_len`: cut its `end`, or its `start`; `drop` it; or end with an `error`."""
    tokenizer: str = Field(default="bytes", min_length=1)
    """`bytes` (one token per byte), a local Hugging Face folder, a tokenizer.json, or a name on the Hub. Not set
    beside `model.path`: that model's."""
    seq_len: int = Field(default=256, ge=1, le=2**24)
    """Tokens per sample. Not set: less where the model has fewer positions."""
    validation: Share | Paths | dict[SetName, Share | Paths] = 0.05
    """Share of the data that is held out; which part depends on the data alone. Or files: text, `.bin`, or those of
    `records` (on the Hub, the split `validation`). Or sets by name, one of them a share at most: `{books: held-out.txt,
    own: 0.02}`."""
    shuffle: bool = True
    """Another order in each epoch, from `run.seed`. `false`: the order of the data."""

    @model_validator(mode="after")
    def _one_source(self) -> "DataConfig":
        given = [name for name in ("text", "tokens", "records") if getattr(self, name) is not None]
        if len(given) != 1:
            got = f"{' and '.join(given)}; null takes one away" if given else "none"
            raise ValueError(f"needs exactly one of text, tokens, records; got {got}")
        shares = [name for name, named in self.validation_sets.items() if isinstance(named, float)]
        if len(shares) > 1:
            raise ValueError(f"validation: {' and '.join(shares)} are shares of the data; give files to all but one")
        return self

    @property
    def may_be_packed(self) -> bool:
        """Whether rows may hold several records, in training and, then, in validation."""
        return self.records is not None and self.packing is not False

    @property
    def validation_sets(self) -> Mapping[str, float | Paths]:
        """The validation sets by name, each a share of the data or files; "" names one that has no name.

        The share comes first, then others by name: a configuration that was sent has lost the order of its keys.
        """
        named = self.validation if isinstance(self.validation, dict) else {"": self.validation}
        ordered = sorted(named.items(), key=lambda item: (not isinstance(item[1], float), item[0]))
        return {name: each for name, each in ordered if each}

    @property
    def held_out(self) -> float:
        """Share of the data that is held out."""
        return next((each for each in self.validation_sets.values() if isinstance(each, float)), 0.0)

    @property
    def files(self) -> dict[str, tuple[Kind, Paths]]:
        """All files that are named here, by key, with what is in them."""
        kinds: tuple[Kind, ...] = ("text", "tokens", "records")
        named = {f"data.{kind}": (kind, paths) for kind in kinds if (paths := getattr(self, kind)) is not None}
        for name, each in self.validation_sets.items():
            if not isinstance(each, float):
                named[f"data.validation{'.' * bool(name)}{name}"] = (_kind_of(each), each)
        return named


def _kind_of(paths: Paths) -> Kind:
    """By the endings that all of these have; what is on the Hub is records."""
    patterns = [paths] if isinstance(paths, str) else paths
    if all(is_hub_name(pattern) or pattern.endswith(DATA_FILES) for pattern in patterns):
        return "records"
    return "tokens" if all(pattern.endswith(".bin") for pattern in patterns) else "text"
