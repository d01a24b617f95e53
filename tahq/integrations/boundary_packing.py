"""Packs the tensors that one stage of torch's pipeline sends and receives, by replacing point-to-point operations.

Works on lists of `torch.distributed.P2POp` alone. Both ends of a cut take the same steps with equal numbers, and so
derive the same keys and lengths.

Packed are fp32, bf16 and fp16 tensors whose stream is shorter than they are, and for which a gradient comes back. All
others (integers, masks, constants, fp64, a loss of one element) are sent unchanged. A mask of floats differs from
a hidden state by its gradient alone. So where no tensor of a crossing is known to have one (an evaluation before all
training, frozen layers), a single tensor is packed, and several are not.

A message is a stream followed by 8 bytes, a hash of the sender's description of the tensor: gloo accepts a message that
is shorter than its buffer without an error.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import distributed

from tahq.errors import CodecError
from tahq.quant import Codec
from tahq.randomness import derive_seed

ACTIVATION, GRADIENT = "activation", "gradient"
PACKED = (torch.float32, torch.bfloat16, torch.float16)
TAG_NBYTES = 8


class Crossing(NamedTuple):
    """All tensors of one kind (ACTIVATION or GRADIENT) and micro-batch at a cut, numbered by the stage before it."""

    kind: str
    cut: int
    micro_batch: int


class Slot(NamedTuple):
    """The description of one tensor of a crossing on which both ends agree; the receiver's buffer is made from it.

    `has_gradient`: a gradient for it comes back in training, or it is a gradient; False where that is not known.
    """

    shape: torch.Size
    dtype: torch.dtype
    has_gradient: bool


class Step(NamedTuple):
    """A step of the schedule: `train` or `eval`, which are counted apart, and its number."""

    purpose: str
    number: int


class IncomingMessage(NamedTuple):
    """A message to be received, and the tensor that it fills, the `number`-th of its crossing."""

    number: int
    message: torch.Tensor
    target: torch.Tensor


def packing_key(seed: int, step: Step, crossing: Crossing, index: int) -> int:
    """The 64-bit key of a randomised codec for one tensor, equal on both ends and never sent."""
    return derive_seed(seed, *_name(step, crossing, index))


def _name(step: Step, crossing: Crossing, index: int) -> tuple[int | str, ...]:
    place = (crossing.kind, crossing.cut, crossing.micro_batch, index)
    return "torch.distributed.pipelining", step.purpose, step.number, *place


class BoundaryPacking:
    """The codecs of one stage, the steps it has taken, and the messages that it waits for.

    `seed` (of randomised codecs) and `step` (the number of the next training step) are equal on all stages.
    """

    def __init__(self, stage: int, activations: Codec, gradients: Codec, *, seed: int, step: int) -> None:
        self._stage = stage
        self._codecs = {ACTIVATION: activations, GRADIENT: gradients}
        self._seed = seed
        self._next_number = {"train": step, "eval": 0}
        self._step = Step("train", step)
        self._is_counted = False
        self._arrivals: dict[Crossing, list[IncomingMessage]] = {}
        self._prepared: set[tuple[str, torch.Size, torch.dtype, torch.device]] = set()

    def begin_step(self, *, has_backward: bool) -> None:
        """A step begins; one without a backward pass is an evaluation.

        It is counted when the first tensor crosses: a schedule may refuse its inputs, on one rank alone, before that.
        """
        purpose = "train" if has_backward else "eval"
        self._step = Step(purpose, self._next_number[purpose])
        self._is_counted = False
        self._arrivals.clear()  # of a step that failed

    def pack(
        self, ops: Sequence[distributed.P2POp], crossing: Crossing, slots: Sequence[Slot]
    ) -> list[distributed.P2POp]:
        """The sends in `ops`, one per slot, with messages in place of what can be packed.

        CodecError: a tensor is not what was agreed on, to which the peer's buffers were made.
        """
        if ops:
            self._check_agreed(ops, crossing, slots)
            self._count()
        packed = self._packed(slots, crossing.kind)
        return [self._pack(op, crossing, index) if index in packed else op for index, op in enumerate(ops)]

    def expect(
        self, ops: Sequence[distributed.P2POp], crossing: Crossing, slots: Sequence[Slot]
    ) -> list[distributed.P2POp]:
        """The receives in `ops`, into buffers for messages where tensors are packed; `unpack` fills the tensors."""
        if ops:
            self._count()
        arrivals = {
            index: IncomingMessage(index, self._room_for(ops[index].tensor, crossing.kind), ops[index].tensor)
            for index in sorted(self._packed(slots, crossing.kind) if ops else ())
        }
        self._arrivals[crossing] = list(arrivals.values())
        return [_with(op, arrivals[index].message) if index in arrivals else op for index, op in enumerate(ops)]

    def unpack(self, crossing: Crossing) -> None:
        """Decode the arrived messages into torch's own buffers; between stages of one rank there are none.

        CodecError, with stage and micro-batch: a message is damaged, or of another length or tensor.
        """
        for arrival in self._arrivals.pop(crossing, []):
            values = self._decode(arrival, crossing)
            with torch.no_grad():
                arrival.target.copy_(values)

    def _count(self) -> None:
        if not self._is_counted:
            self._next_number[self._step.purpose] += 1
            self._is_counted = True

    def _pack(self, op: distributed.P2POp, crossing: Crossing, index: int) -> distributed.P2POp:
        tensor, codec = op.tensor, self._codecs[crossing.kind]
        self._prepare(tensor, crossing.kind)
        with torch.no_grad():
            stream = codec.encode(tensor, key=self._key(codec, crossing, index))
        tag = torch.tensor(list(self._tag(codec, tensor, crossing, index)), dtype=torch.uint8, device=stream.device)
        return _with(op, torch.cat([stream, tag]))

    def _decode(self, arrival: IncomingMessage, crossing: Crossing) -> torch.Tensor:
        target, codec = arrival.target, self._codecs[crossing.kind]
        stream, tag = arrival.message[:-TAG_NBYTES], arrival.message[-TAG_NBYTES:]
        where = self._where(crossing, arrival.number)
        if bytes(tag.tolist()) != self._tag(codec, target, crossing, arrival.number):
            raise CodecError(
                f"{where} is not the {arrival.message.numel()} bytes of {codec.spec} that were expected for "
                f"{_described(target)} in {self._step.purpose} step {self._step.number}; are all stages compressed "
                "alike, do they agree on shapes (input_args, output_args), and has every rank taken as many steps? "
                "Where one left out a step that others began, start all of them again from a checkpoint"
            )
        try:
            return codec.decode(stream, target.shape, target.dtype, key=self._key(codec, crossing, arrival.number))
        except CodecError as error:
            raise CodecError(f"{where}: {error}") from error

    def _key(self, codec: Codec, crossing: Crossing, index: int) -> int:
        return packing_key(self._seed, self._step, crossing, index) if codec.is_keyed else 0

    def _tag(self, codec: Codec, tensor: torch.Tensor, crossing: Crossing, index: int) -> bytes:
        """Hash of all that both ends should know of a tensor, except for the seed, which is in the key."""
        kind = (str(codec.spec), str(tensor.dtype), *tensor.shape)
        return derive_seed("tag", *_name(self._step, crossing, index), *kind).to_bytes(TAG_NBYTES, "little")

    def _packed(self, slots: Sequence[Slot], kind: str) -> set[int]:
        """The tensors of a crossing that are packed, decided from the slots alone, which both ends have."""
        candidates = [
            index
            for index, slot in enumerate(slots)
            if slot.dtype.is_floating_point
            and len(slot.shape) > 0
            and self._message_nbytes(slot.shape, kind) < slot.shape.numel() * slot.dtype.itemsize
        ]
        if any(slot.has_gradient for slot in slots):
            candidates = [index for index in candidates if slots[index].has_gradient]
        elif len(candidates) > 1:
            return set()
        return {index for index in candidates if slots[index].dtype in PACKED}

    def _message_nbytes(self, shape: torch.Size, kind: str) -> int:
        return self._codecs[kind].encoded_nbytes(shape) + TAG_NBYTES

    def _room_for(self, target: torch.Tensor, kind: str) -> torch.Tensor:
        self._prepare(target, kind)
        return torch.empty(self._message_nbytes(target.shape, kind), dtype=torch.uint8, device=target.device)

    def _prepare(self, tensor: torch.Tensor, kind: str) -> None:
        """Have kernels compiled by one process of a machine, not by all at once."""
        needed = (kind, tensor.shape, tensor.dtype, tensor.device)
        if needed not in self._prepared:
            self._codecs[kind].prepare(tensor.shape, tensor.dtype, tensor.device)
            self._prepared.add(needed)

    def _check_agreed(self, ops: Sequence[distributed.P2POp], crossing: Crossing, slots: Sequence[Slot]) -> None:
        if len(ops) != len(slots):
            raise CodecError(
                f"{self._where(crossing)} is one of {len(ops)} tensors, {len(slots)} were agreed on; have the stage "
                "return as many of every micro-batch"
            )
        for index, (op, slot) in enumerate(zip(ops, slots, strict=True)):
            if (op.tensor.shape, op.tensor.dtype) != (slot.shape, slot.dtype):
                raise CodecError(
                    f"{self._where(crossing, index)} is {_described(op.tensor)}, agreed on was {_described(slot)}; the "
                    "peer's buffers are made once for a schedule: give every micro-batch one shape, or make a new "
                    "schedule for another"
                )

    def _where(self, crossing: Crossing, index: int = 0) -> str:
        return f"stage {self._stage}, micro-batch {crossing.micro_batch}: {crossing.kind} {index} at cut {crossing.cut}"


def _with(op: distributed.P2POp, tensor: torch.Tensor) -> distributed.P2POp:
    return distributed.P2POp(op.op, tensor, op.peer, op.group, op.tag)


def _described(tensor: torch.Tensor | Slot) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
