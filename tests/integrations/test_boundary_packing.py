"""Both ends of a cut, without a wire: packed, unchanged and refused tensors."""

import itertools
from collections.abc import Collection

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
    Slot,
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


def pack(packing: BoundaryPacking, *tensors: torch.Tensor) -> list[distributed.P2POp]:
    return packing.pack(sends(*tensors), THIRD, agreed(*tensors))


def expect(packing: BoundaryPacking, *buffers: torch.Tensor) -> list[distributed.P2POp]:
    return packing.expect(receives(*buffers), THIRD, agreed(*buffers))


def agreed(*tensors: torch.Tensor, without_gradient: Collection[int] = ()) -> list[Slot]:
    """`without_gradient` are places of tensors."""
    return [Slot(x.shape, x.dtype, index not in without_gradient) for index, x in enumerate(tensors)]


def deliver(sent: list[distributed.P2POp], received: list[distributed.P2POp], nbytes: int | None = None) -> None:
    """Copy messages as a wire does; with `nbytes` only so much of each, as gloo does with a short message."""
    for source, target in zip(sent, received, strict=True):
        target.tensor.data[:nbytes].copy_(source.tensor[:nbytes])


def hidden(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_arrives_is_what_the_codec_makes_of_it(dtype: torch.dtype) -> None:
    x, buffer = hidden(2, 8, 64, dtype=dtype), torch.zeros(2, 8, 64, dtype=dtype, requires_grad=True)
    first, second = end(0), end(1)
    sent, received = pack(first, x), expect(second, buffer)
    codec = get_codec("tah", backend="reference")
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
    assert pack(first, tensor)[0].tensor is tensor
    buffer = torch.empty_like(tensor)
    assert expect(second, buffer)[0].tensor is buffer
    second.unpack(THIRD)


def packed(without_gradient: Collection[int], *tensors: torch.Tensor) -> list[bool]:
    """Which tensors the sender packs; asserts that the receiver expects the same."""
    slots = agreed(*tensors, without_gradient=without_gradient)
    sent = end(0).pack(sends(*tensors), THIRD, slots)
    received = end(1).expect(receives(*tensors), THIRD, slots)
    by_sender, by_receiver = (
        [op.tensor is not tensor for op, tensor in zip(ops, tensors, strict=True)] for ops in (sent, received)
    )
    assert by_sender == by_receiver
    return by_sender


def test_of_floats_only_tensors_with_gradients_are_packed_and_else_a_single_one() -> None:
    x, mask = hidden(2, 8, 64), torch.full((2, 8, 64), -torch.inf)
    assert packed({1}, x, mask) == [True, False]
    assert packed({0}, mask, x, hidden(2, 8, 32)) == [False, True, True]
    number, places = torch.tensor(0.5), torch.arange(4096).reshape(2, 32, 64)
    assert packed({0, 1, 2}, number, x, places) == [False, True, False]
    for other in (torch.float32, torch.float64):
        assert packed({0, 1}, x, x.to(other)) == [False, False]


BAD_MESSAGES = {
    "short": ({}, 100, False, r" is not the \d+ bytes of tah:"),
    "other step": ({"step": 1}, None, False, ".*has every rank taken as many steps"),
    "other codec": ({"activations": "tah:tau=3"}, None, False, ".*has every rank taken as many steps"),
    "damaged": ({}, None, True, ": tah:.*header byte 0"),
}


@pytest.mark.parametrize(("sender", "nbytes", "is_damaged", "says"), BAD_MESSAGES.values(), ids=BAD_MESSAGES)
def test_bad_message_is_refused_with_stage_and_micro_batch(
    sender: dict[str, object], nbytes: int | None, is_damaged: bool, says: str
) -> None:
    second = end(1)
    received = expect(second, torch.zeros(2, 8, 64))
    received[0].tensor.zero_()  # its memory may hold the message of another test
    deliver(pack(end(0, **sender), hidden(2, 8, 64)), received, nbytes)  # type: ignore[arg-type]
    if is_damaged:
        received[0].tensor[0] ^= 0xFF
    with pytest.raises(CodecError, match=f"stage 1, micro-batch 3: activation 0 at cut 0{says}"):
        second.unpack(THIRD)


def test_tensors_that_were_not_agreed_on_are_refused_where_they_are_sent() -> None:
    x = hidden(2, 8, 64)
    where = "stage 0, micro-batch 3: "
    with pytest.raises(CodecError, match=where + r"activation 0 .* \[2, 7, 64\] float32, .* \[2, 8, 64\]"):
        end(0).pack(sends(hidden(2, 7, 64)), THIRD, agreed(x))
    with pytest.raises(CodecError, match=where + ".* one of 1 tensors, 2 were agreed on"):
        end(0).pack(sends(x), THIRD, agreed(x, x))


def test_every_part_of_a_name_changes_the_key() -> None:
    steps, pair = (Step("train", 2), Step("train", 3), Step("eval", 2)), (0, 1)
    names = list(itertools.product(pair, steps, (ACTIVATION, GRADIENT), pair, pair, pair))
    keys = {
        packing_key(seed, step, Crossing(kind, cut, micro_batch), index)
        for seed, step, kind, cut, micro_batch, index in names
    }
    assert len(keys) == len(names)
