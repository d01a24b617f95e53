"""`wire:` of cluster.yaml."""

from pydantic import field_validator

from tahq.errors import ConfigError
from tahq.quant.spec import CodecSpec
from tahq.units import Section


class WireConfig(Section):
    """Which codec packs what crosses a cut, by direction; see docs/wire-format.md for the specs."""

    activations: str = "tah"
    gradients: str = "fixed:bits=8"

    @field_validator("activations", "gradients")
    @classmethod
    def _known_codec(cls, text: str) -> str:
        try:
            CodecSpec.parse(text)
        except ConfigError as error:
            # A ValueError is what pydantic collects, so that the message gets its file and line.
            raise ValueError(str(error)) from error
        return text
