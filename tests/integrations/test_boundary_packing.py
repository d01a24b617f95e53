"""Both ends of a cut, without a wire: what is packed, what is refused."""

import itertools

import pytest
import torch
from torch import distributed

from tahq.errors import CodecError
from tahq.integrations.boundary_packing import (
    ACTIVATION,
    GRADIENT,
    TAG_NBYTES,
    BoundaryPacking,
    Crossing,
    Step,
    packing_key,
)
from tahq.quant import get_codec

pytestmark = pytest.mark.usefixtures("_group")
THIRD = Crossing(ACTIVATION, 0, 3)


def end(stage: int, activations: str = "tah", step: int = 0, backend: str = "reference") -> BoundaryPacking:
    codecs = (get_codec(spec, backend=backend) for spec in (activations, "fixed:bits=8"))
    packing = BoundaryPacking(stage, *codecs, seed=0, step=step)
    packing.begin_step(has_backward=True)
    return packing


def sends(*tensors: torch.Tensor) -> list[distributed.P2POp]:
    return [distributed.P2POp(distributed.isend, tensor, 0) for tensor in tensors]


def receives(*tensors: torch.Tensor) -> list[distributed.P2POp]:
    return [distributed.P2POp(distributed.irecv, tensor, 0) for tensor in tensors]


def deliver(sent: list[distributed.P2POp], received: list[distributed.P2POp], nbytes: int | None = None) -> None:
    """What a wire does; `nbytes` of every message only, as gloo does with one that is shorter than its buffer."""
    for source, target in zip(sent, received, strict=True):
        target.tensor.data[:nbytes].copy_(source.tensor[:nbytes])


def hidden(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_arrives_is_what_the_codec_makes_of_it(dtype: torch.dtype) -> None:
    x, buffer = hidden(2, 8, 64, dtype=dtype), torch.zeros(2, 8, 64, dtype=dtype, requires_grad=True)
    first, second = end(0), end(1)
    sent, received = first.pack(sends(x), THIRD), second.expect(receives(buffer), THIRD)
    codec = get_codec("tah")
    assert sent[0].tensor.numel() == received[0].tensor.numel() == codec.encoded_nbytes(x.shape) + TAG_NBYTES
    deliver(sent, received)
    second.unpack(THIRD)
    assert torch.equal(buffer, codec.decode(codec.encode(x), x.shape, dtype))
    assert buffer.is_leaf
    assert buffer.requires_grad


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(4096).reshape(2, 32, 64),
        torch.ones(2, 32, 64, dtype=torch.bool),
        torch.ones(2, 32, 64, dtype=torch.float64),
        torch.tensor(0.5),
        torch.ones(2, 1),
        torch.ones(0, 64),
    ],
    ids=["integers", "mask", "fp64", "no dimension", "too small", "empty"],
)
def test_what_no_codec_takes_or_shortens_goes_as_it_is(tensor: torch.Tensor) -> None:
    first, second = end(0), end(1)
    assert first.pack(sends(tensor), THIRD)[0].tensor is tensor
    buffer = torch.empty_like(tensor)
    assert second.expect(receives(buffer), THIRD)[0].tensor is buffer
    second.unpack(THIRD)


def test_tensors_that_cross_together_keep_their_places() -> None:
    mask, x, y = torch.ones(2, 8, dtype=torch.int64), hidden(2, 8, 64), hidden(2, 8, 32)
    buffers = [torch.zeros_like(tensor) for tensor in (mask, x, y)]
    first, second = end(0), end(1)
    deliver(first.pack(sends(mask, x, y), THIRD), second.expect(receives(*buffers), THIRD))
    second.unpack(THIRD)
    assert torch.equal(buffers[0], mask)
    assert (buffers[1] - x).abs().max() < 1
    assert (buffers[2] - y).abs().max() < 1


def test_short_message_is_refused_with_stage_and_micro_batch() -> None:
    x = hidden(2, 8, 64)
    second = end(1)
    received = second.expect(receives(torch.zeros(2, 8, 64)), THIRD)
    deliver(end(0).pack(sends(x), THIRD), received, nbytes=100)
    with pytest.raises(CodecError, match=r"stage 1, micro-batch 3: activation 0 at cut 0 is not the \d+ bytes of tah:"):
        second.unpack(THIRD)


@pytest.mark.parametrize("other", [{"step": 1}, {"activations": "tah:tau=3"}], ids=["step", "codec"])
def test_message_of_another_step_or_codec_is_refused(other: dict[str, object]) -> None:
    second = end(1)
    received = second.expect(receives(torch.zeros(2, 8, 64)), THIRD)
    deliver(end(0, **other).pack(sends(hidden(2, 8, 64)), THIRD), received)  # type: ignore[arg-type]
    with pytest.raises(CodecError, match="stage 1, micro-batch 3"):
        second.unpack(THIRD)


def test_damaged_stream_is_refused_with_stage_and_micro_batch() -> None:
    second = end(1)
    received = second.expect(receives(torch.zeros(2, 8, 64)), THIRD)
    deliver(end(0).pack(sends(hidden(2, 8, 64)), THIRD), received)
    received[0].tensor[0] ^= 0xFF
    with pytest.raises(CodecError, match=r"stage 1, micro-batch 3: activation 0 at cut 0: tah:.*header byte 0"):
        second.unpack(THIRD)


def test_shape_that_changes_is_refused_where_it_is_sent() -> None:
    first = end(0)
    first.pack(sends(hidden(2, 8, 64)), Crossing(ACTIVATION, 0, 2))
    with pytest.raises(
        CodecError, match=r"stage 0, micro-batch 3: activation 0 .* \[2, 7, 64\] float32, .* \[2, 8, 64\]"
    ):
        first.pack(sends(hidden(2, 7, 64)), THIRD)


def test_evaluation_may_have_another_shape() -> None:
    first = end(0)
    first.pack(sends(hidden(2, 8, 64)), THIRD)
    first.begin_step(has_backward=False)
    first.pack(sends(hidden(2, 7, 64)), THIRD)


def test_evaluations_do_not_count_as_steps_of_training() -> None:
    evaluated, other = end(0, "fixed:bits=4,round=stochastic"), end(0, "fixed:bits=4,round=stochastic")
    evaluated.begin_step(has_backward=False)
    for packing in (evaluated, other):
        packing.begin_step(has_backward=True)
    x = hidden(2, 8, 64)
    messages = [packing.pack(sends(x), THIRD)[0].tensor for packing in (evaluated, other)]
    assert torch.equal(*messages)


def test_every_part_of_a_name_changes_the_key() -> None:
    seeds, steps, kinds, numbers = (
        (0, 1),
        (Step("train", 2), Step("train", 3), Step("eval", 2)),
        (ACTIVATION, GRADIENT),
        (0, 1),
    )
    names = list(itertools.product(seeds, steps, kinds, numbers, numbers, numbers))
    keys = {
        packing_key(seed, step, Crossing(kind, cut, micro_batch), index)
        for seed, step, kind, cut, micro_batch, index in names
    }
    assert len(keys) == len(names)
