"""What the codecs of a stage's cuts remember, as a snapshot has it.

A cut is named by its place in the model, the number of blocks before it, and never by stage:
`codec/block-0004/activations/received/ids`. So a cut that a resumed run still has finds what both of its ends
remembered, wherever the other cuts have moved; what belongs to a cut that is gone is left behind. Where nothing
is found, or samples have another length now, the codec starts with nothing, which for AQ-SGD means that each
sample is sent whole at its next visit.
"""

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch

from tahq.comm.link.frame import Direction
from tahq.pipeline.boundary import Boundary
from tahq.quant.stateful_codec import RECEIVED, SENT, StatefulCodec

PREFIX = "codec/"
_NAMES = {Direction.FORWARD: "activations", Direction.BACKWARD: "gradients"}

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CodecEnd:
    """The end that this stage is of one stateful codec.

    Attributes:
        cut: its name in a snapshot.
        end: `SENT` or `RECEIVED`.
        codec: the codec.
    """

    cut: str
    end: str
    codec: StatefulCodec

    def tensors(self) -> dict[str, torch.Tensor]:
        """What it remembers, by its names in a snapshot."""
        return {self.cut + name: tensor for name, tensor in self.codec.state_tensors().items()}

    def load(self, names: Collection[str], read: Callable[[str], torch.Tensor], sample_shape: tuple[int, ...]) -> None:
        """Remember what a snapshot says of this end; a warning if it says nothing that fits."""
        mine = [name.removeprefix(self.cut) for name in names if name.startswith(self.cut + self.end)]
        taken = self.codec.load_state(mine, lambda name: read(self.cut + name), sample_shape)
        if not taken:
            reason = "samples of another length" if mine else "nothing"
            log.warning("the snapshot has %s for %s; %s starts anew there", reason, self.cut, self.codec.spec)


def codec_ends(boundary: Boundary, block: int, *, is_incoming: bool) -> list[CodecEnd]:
    """The stateful codecs of one side of a cut.

    Args:
        boundary: the stage's side.
        block: blocks of the model before the cut.
        is_incoming: whether activations come in here, and gradients go out.
    """
    return [
        CodecEnd(
            cut=f"{PREFIX}block-{block:04d}/{_NAMES[direction]}/",
            end=RECEIVED if (direction is Direction.FORWARD) == is_incoming else SENT,
            codec=codec,
        )
        for direction, codec in boundary.codecs.stateful.items()
    ]
