"""`wire:` of cluster.yaml."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from tahq.errors import ConfigError
from tahq.quant.spec import AqsgdSpec, CodecSpec
from tahq.units import Section

PAPER_WORD = "paper"
PAPER: Mapping[str, str] = MappingProxyType({"activations": "tah", "gradients": "fixed:bits=8"})
"""What the word stands for: TAH-Quant's pair."""


class WireConfig(Section):
    """Which codec packs what crosses a cut, by direction, and what computes it; docs/wire-format.md has the specs.

    In place of the section the word `paper` may stand: TAH activations, gradients in 8 bits of fixed point.
    """

    activations: str = "wf"
    gradients: str = "eden"
    backend: Literal["auto", "reference", "cpu", "triton"] = "auto"
    threads: int = Field(default=1, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _keys_of_the_word(cls, value: Any) -> Any:
        if value == PAPER_WORD:
            return dict(PAPER)
        if isinstance(value, str):
            raise ValueError(f"expected keys and values, or the word {PAPER_WORD}; got {value!r}")
        return value

    @field_validator("activations", "gradients")
    @classmethod
    def _known_codec(cls, text: str) -> str:
        try:
            CodecSpec.parse(text)
        except ConfigError as error:
            # A ValueError is what pydantic collects, so that the message gets its file and line.
            raise ValueError(str(error)) from error
        return text

    @field_validator("gradients")
    @classmethod
    def _gradients_are_not_remembered(cls, text: str) -> str:
        spec = CodecSpec.parse(text)
        if isinstance(spec, AqsgdSpec) and spec.has_cache:
            raise ValueError(
                f"AQ-SGD remembers activations, not gradients; got {text!r}: take fixed:bits=8 as its authors do, or "
                f"aqsgd:bits={spec.bits},cache=none for its quantiser alone"
            )
        return text

    def resolved(self) -> "WireConfig":
        """The same with all parameters of its codecs written out."""
        specs = {name: str(CodecSpec.parse(spec)) for name, spec in self.specs().items()}
        return self.model_copy(update=specs)

    def specs(self) -> dict[str, str]:
        """The codecs by the key that names them."""
        return {"activations": self.activations, "gradients": self.gradients}
