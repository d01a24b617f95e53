"""Both sides of a cut in one thread, on a virtual clock."""

from collections.abc import Callable

import torch

from support.inproc_transport import InprocPair, VirtualClock
from tahq.comm.link.frame import Direction, Purpose
from tahq.pipeline.boundary import Boundary, CodecTable, CutIdentity
from tahq.pipeline.spans import Stopwatch
from tahq.quant.config import WireConfig

IDENTITY = CutIdentity(run=1, seed=3, cut=0)


def codec_table(activations: str, gradients: str, **keys) -> CodecTable:
    return CodecTable(WireConfig(activations=activations, gradients=gradients, **keys))


def cut_sides(make_table: Callable[[], CodecTable], identity=IDENTITY, **options) -> tuple[Boundary, Boundary]:
    """The lower and the upper stage's side, each with a codec table of its own."""
    pair = InprocPair(VirtualClock())
    lower, upper = (
        Boundary(end, identity, make_table(), torch.device("cpu"), Stopwatch(), **options) for end in pair.transports
    )
    return lower, upper


def lossless_sides(identity=IDENTITY, **options) -> tuple[Boundary, Boundary]:
    return cut_sides(lambda: codec_table("raw:dtype=fp32", "raw:dtype=fp32"), identity, **options)


def cross(
    sender: Boundary,
    receiver: Boundary,
    x: torch.Tensor,
    *,
    step: int = 0,
    purpose: Purpose = Purpose.TRAIN,
    direction: Direction = Direction.FORWARD,
    micro_batch: int = 0,
    sample_ids=None,
) -> torch.Tensor:
    """What one side receives of a tensor that the other sends."""
    id = sender.name(step, purpose, micro_batch, direction)
    receiver.post(id, tuple(x.shape))
    sender.send(id, x, sample_ids)
    return receiver.receive(id, sample_ids)
