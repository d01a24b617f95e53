"""One cut of the model, seen from one of its two sides: tensors become frames, frames become tensors.

This is the only module that knows both codecs and transports. A tensor is named by its logical id, from which both
sides also derive the codec's key. Receives are posted ahead with the planned codec and shape, and each frame is checked
against them.
"""

import logging
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tahq.comm.link.frame import VOID, Direction, Frame, LogicalId, Purpose, void_frame
from tahq.comm.transport import Transport
from tahq.errors import LocalProtocolError, RemoteProtocolError
from tahq.pipeline.spans import Stopwatch
from tahq.quant import CodecSpec, get_codec
from tahq.quant.aqsgd.codec import RECEIVED, SENT, AqsgdCodec
from tahq.quant.codec import Codec
from tahq.quant.config import WireConfig
from tahq.quant.spec import RawSpec
from tahq.randomness import derive_seed

BOUNDARY_DTYPE = torch.float32
"""Type of the tensors at a cut, before encoding and after decoding."""
CARRIED = {Direction.FORWARD: "activations", Direction.BACKWARD: "gradients"}
"""The tensors that cross a cut in each direction."""

log = logging.getLogger(__name__)


class StepAbandonedError(Exception):
    """A tensor will not come: its sender has abandoned the step, or is lost, and the run goes on without the step."""


class CodecTable:
    """The codecs of one cut; a frame names its codec by the index here.

    Index 0 is raw, then come the codecs that activations may use, then those of gradients. `use` changes the codec in
    force from a step on; both ends of a cut do the same. Codecs with state belong to one cut, so every cut has its own
    table.

    Args:
        wire: the codecs that each direction starts with and may change to, their backend and threads. The backends of
            a link's ends may differ.
    """

    def __init__(self, wire: WireConfig) -> None:
        first, rungs = wire.specs(), wire.rungs()
        specs: list[CodecSpec] = [RawSpec("fp32")]
        self._choices: dict[Direction, range] = {}
        # By direction: (first step, index), newest last. Replaced as a whole, because other threads read it.
        self._in_force: dict[Direction, tuple[tuple[int, int], ...]] = {}
        for direction, name in CARRIED.items():
            choice = [CodecSpec.parse(text) for text in rungs[name]]
            self._choices[direction] = range(len(specs), len(specs) + len(choice))
            self._in_force[direction] = ((0, len(specs) + choice.index(CodecSpec.parse(first[name]))),)
            specs += choice
        self.codecs: tuple[Codec, ...] = tuple(
            get_codec(spec, backend=wire.backend, threads=wire.threads) for spec in specs
        )

    @property
    def stateful(self) -> dict[Direction, AqsgdCodec]:
        """By direction, the codec that remembers samples, where there is one."""
        by_direction = {d: [self.codecs[index] for index in choice] for d, choice in self._choices.items()}
        return {d: c for d, cs in by_direction.items() for c in cs if isinstance(c, AqsgdCodec) and c.is_stateful}

    def use(self, step: int, direction: Direction, index: int) -> None:
        """Encode this direction with the codec of this index from `step` on; LocalProtocolError if it has none."""
        choice = self._choices[direction]
        if index not in choice:
            raise LocalProtocolError(
                f"no codec {index} for {direction.name.lower()}; expected {choice.start} to {choice.stop - 1}"
            )
        before = [entry for entry in self._in_force[direction] if entry[0] < step]
        self._in_force[direction] = (*before[-1:], (step, index))

    def index(self, purpose: Purpose, direction: Direction, step: int) -> int:
        """Index of the codec for tensors of this purpose and direction in this step."""
        if purpose in (Purpose.EVAL_RAW, Purpose.TIE):
            return 0
        entries = self._in_force[direction]
        return next((index for since, index in reversed(entries) if since <= step), entries[0][1])


@dataclass(frozen=True, slots=True)
class ErrorSample:
    """‖x̂ − x‖/‖x‖ of one tensor that was sent, where x̂ is what its receiver decodes."""

    link: int
    direction: Direction
    relative_error: float


def codec_key(id: LogicalId, seed: int) -> int:
    """The 64-bit key of a randomised codec for one tensor, equal on both ends and never sent.

    The run's number is left out, so that a continued or repeated run with the same seed draws the same signs.
    """
    return derive_seed(seed, "codec", id.replica, id.step, int(id.purpose), id.micro_batch, id.cut, int(id.direction))


@dataclass(frozen=True, slots=True)
class CutIdentity:
    """The part that the logical ids of all tensors at one cut share."""

    run: int
    seed: int
    cut: int
    replica: int = 0

    def name(self, step: int, purpose: Purpose, micro_batch: int, direction: Direction) -> LogicalId:
        """The logical id of one tensor on this cut."""
        return LogicalId(self.run, self.replica, step, purpose, micro_batch, self.cut, direction)


@dataclass(frozen=True, slots=True)
class CodecEnd:
    """One end (`SENT` or `RECEIVED`) of a codec that remembers samples; `cut` prefixes its names in a checkpoint.

    A cut is named by the number of blocks before it, never by stage: `codec/block-0004/activations/received/ids`. So a
    cut that a resumed run still has finds the state of both its ends, wherever the other cuts have moved. Where
    nothing is found, or samples have another length, the codec starts empty: AQ-SGD then sends each sample whole at
    its next visit.
    """

    cut: str
    end: str
    codec: AqsgdCodec

    def tensors(self) -> dict[str, torch.Tensor]:
        """The codec's state, by name in a checkpoint."""
        return {self.cut + name: tensor for name, tensor in self.codec.state_tensors().items()}

    def load(self, names: Collection[str], read: Callable[[str], torch.Tensor], sample_shape: tuple[int, ...]) -> None:
        """Take this end's state from a checkpoint; warns if nothing fits."""
        mine = [name.removeprefix(self.cut) for name in names if name.startswith(self.cut + self.end)]
        if not self.codec.load_state(mine, lambda name: read(self.cut + name), sample_shape):
            found = "samples of another length" if mine else "nothing"
            log.warning("the checkpoint has %s for %s; %s starts empty there", found, self.cut, self.codec.spec)


class Boundary:
    """One side of a cut.

    Args:
        transport: the link that crosses it.
        identity: names the tensors that cross it.
        codecs: the cut's codecs.
        device: of tensors before encoding and after decoding.
        stopwatch: measures encoding, decoding and waiting.
        peer: stage at the other end, for the name of the waiting time (`wait:2`).
        measure_every: steps between measurements of the codec's error on the first micro-batch sent; None: never.
    """

    def __init__(
        self,
        transport: Transport,
        identity: CutIdentity,
        codecs: CodecTable,
        device: torch.device,
        stopwatch: Stopwatch,
        peer: int | None = None,
        measure_every: int | None = None,
    ) -> None:
        self.transport = transport
        self.codecs = codecs
        self.name = identity.name
        """The logical id of a tensor that crosses here; see `CutIdentity.name`."""
        self.waiting = "wait" if peer is None else f"wait:{peer}"
        """The activity of waiting for a frame from the other end."""
        self._seed = identity.seed
        self._device = device
        self._stopwatch = stopwatch
        self._measure_every = measure_every
        self._errors: list[ErrorSample] = []
        self._posted: dict[LogicalId, tuple[tuple[int, tuple[int, ...], torch.dtype], int]] = {}
        self._arrived: dict[LogicalId, Frame] = {}
        self._attached: dict[LogicalId, list[torch.Tensor]] = {}
        """What goes with a tensor: to be sent, or arrived and not taken yet."""

    def take_errors(self) -> list[ErrorSample]:
        """Errors measured since the last call."""
        errors, self._errors = self._errors, []
        return errors

    def attach(self, id: LogicalId, numbers: torch.Tensor) -> None:
        """Send these numbers, on any device, as they are behind the tensor of this id, and what was attached before."""
        self._attached.setdefault(id, []).append(numbers)

    def take_attached(self, id: LogicalId) -> torch.Tensor:
        """The bytes that came behind a decoded tensor, uint8 on the CPU."""
        return torch.cat(self._attached.pop(id, [torch.empty(0, dtype=torch.uint8)]))

    def send(self, id: LogicalId, tensor: torch.Tensor, sample_ids: Sequence[int] | None = None) -> bool:
        """Encode a tensor, [B, S, C] or a tied gradient, and queue it for sending; returns whether all of it is finite.

        `sample_ids` name the B samples; codecs that remember samples need them in training.
        """
        frame, finite = self.encoded(id, tensor, sample_ids)
        self.transport.send(self._with_attached(frame))
        every = self._measure_every
        if every and id.micro_batch == 0 and id.step % every == 0 and id.purpose is Purpose.TRAIN:
            with self._stopwatch.measure("guard"):
                error = _relative_error(self.decoded(frame), tensor)
                self._errors.append(ErrorSample(self.transport.link, id.direction, error))
        return finite

    def send_void(self, id: LogicalId) -> None:
        """Send what raises `StepAbandonedError` at the receiver, in the place of a tensor."""
        frame = void_frame(id)
        self.transport.send(replace(frame, payload=frame.payload.to(self.transport.payload_device)))

    def encoded(
        self, id: LogicalId, tensor: torch.Tensor, sample_ids: Sequence[int] | None = None
    ) -> tuple[Frame, bool]:
        """A tensor's frame, and whether all of it is finite; see `send`."""
        index = self.codecs.index(id.purpose, id.direction, id.step)
        codec = self.codecs.codecs[index]
        with self._stopwatch.measure("encode", id):
            encoded = codec.encode(tensor, **self._codec_arguments(codec, id, sample_ids))
            payload = _at(self.transport.payload_device, encoded)
            finite = not codec.has_non_finite(payload)
        return Frame(id, index, tensor.dtype, tuple(tensor.shape), payload), finite

    def decoded(self, frame: Frame, sample_ids: Sequence[int] | None = None) -> torch.Tensor:
        """The tensor of a frame of `encoded`, as its receivers decode it."""
        codec, payload = self.codecs.codecs[frame.codec], frame.payload.to(self._device, non_blocking=True)
        return codec.decode(payload, frame.shape, frame.dtype, **self._codec_arguments(codec, frame.id, sample_ids))

    def post(
        self, id: LogicalId, shape: tuple[int, ...], dtype: torch.dtype = BOUNDARY_DTYPE, attached_nbytes: int = 0
    ) -> None:
        """Post a receive, so that its frame is accepted whenever it arrives; with so many bytes attached."""
        index = self.codecs.index(id.purpose, id.direction, id.step)
        self._posted[id] = (index, shape, dtype), attached_nbytes
        self.transport.expect(id, self.codecs.codecs[index].encoded_nbytes(shape) + attached_nbytes)

    def receive(
        self, id: LogicalId, sample_ids: Sequence[int] | None = None, waiting: str | None = None
    ) -> torch.Tensor:
        """Wait for a posted tensor and decode it; the waiting is counted as `waiting`, by default `self.waiting`.

        Raises:
            PeerLostError: the link is lost.
            RemoteProtocolError: its codec, shape or dtype differs from the plan.
            CodecError: its payload is not a valid stream.
            StepAbandonedError: there is none.
        """
        with self._stopwatch.measure(waiting or self.waiting, id):
            frame = self.await_frame(id)
        return self.decode(frame, sample_ids)

    def await_frame(self, id: LogicalId) -> Frame:
        """Wait for the frame of a posted tensor; PeerLostError if the link is lost. One thread at a time calls it."""
        while id not in self._arrived:
            frame = self.transport.recv()
            self._arrived[frame.id] = frame
        return self._arrived.pop(id)

    def decode(self, frame: Frame, sample_ids: Sequence[int] | None = None) -> torch.Tensor:
        """The tensor of a frame; arguments and errors as of `receive`."""
        got, (expected, attached_nbytes) = (frame.codec, frame.shape, frame.dtype), self._posted.pop(frame.id)
        if frame.codec == VOID:
            raise StepAbandonedError
        if got != expected:
            raise RemoteProtocolError(
                f"cut {frame.id.cut}: step {frame.id.step}, micro-batch {frame.id.micro_batch} arrived with (codec, "
                f"shape, dtype) {got}, expected {expected}; run the same version of tahq on both hosts"
            )
        with self._stopwatch.measure("decode", frame.id):
            return self.decoded(self._without_attached(frame, attached_nbytes), sample_ids)

    def _with_attached(self, frame: Frame) -> Frame:
        parts = [_used_here(part).flatten().view(torch.uint8) for part in self._attached.pop(frame.id, ())]
        if not parts:
            return frame
        behind = [_at(self.transport.payload_device, part) for part in parts]
        return replace(frame, payload=torch.cat((frame.payload, *behind)))

    def _without_attached(self, frame: Frame, nbytes: int) -> Frame:
        if not nbytes:
            return frame
        size = frame.payload.numel() - nbytes
        if size < 0:
            raise RemoteProtocolError(
                f"cut {frame.id.cut}: step {frame.id.step}, micro-batch {frame.id.micro_batch} arrived with "
                f"{frame.payload.numel()} bytes, expected {nbytes} behind a tensor; run the same version of tahq on "
                "both hosts"
            )
        self._attached[frame.id] = [frame.payload[size:].cpu()]
        return replace(frame, payload=frame.payload[:size])

    def codec_ends(self, block: int, *, is_incoming: bool) -> list[CodecEnd]:
        """This side's ends of the codecs that remember samples, at the cut behind `block` blocks of the model.

        With `is_incoming` this side receives activations and sends gradients.
        """
        return [
            CodecEnd(
                cut=f"codec/block-{block:04d}/{CARRIED[direction]}/",
                end=RECEIVED if (direction is Direction.FORWARD) == is_incoming else SENT,
                codec=codec,
            )
            for direction, codec in self.codecs.stateful.items()
        ]

    def _codec_arguments(self, codec: Codec, id: LogicalId, sample_ids: Sequence[int] | None) -> dict[str, Any]:
        arguments: dict[str, Any] = {"key": codec_key(id, self._seed) if codec.is_keyed else 0}
        if isinstance(codec, AqsgdCodec):  # remembers the samples of training only
            is_remembered = id.purpose is Purpose.TRAIN and codec.is_stateful
            if is_remembered and sample_ids is None:
                raise LocalProtocolError(f"cut {id.cut}: {codec.spec} needs the ids of the samples in training")
            arguments["sample_ids"] = sample_ids if is_remembered else None
        return arguments


def _at(device: torch.device, payload: torch.Tensor) -> torch.Tensor:
    """The payload on the transport's device; to the host through pinned memory, waiting for this stream only."""
    if payload.device.type == device.type:
        return payload
    if device.type != "cpu":
        return payload.to(device)
    pinned = torch.empty_like(payload, device="cpu", pin_memory=True)
    pinned.copy_(payload, non_blocking=True)
    torch.cuda.current_stream(payload.device).synchronize()
    return pinned


def _used_here(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, whose memory another stream has made, kept for this thread's stream."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return tensor


def _relative_error(decoded: torch.Tensor, x: torch.Tensor) -> float:
    """‖x̂ − x‖/‖x‖; infinite if either is not finite, 0 if both are zero."""
    error, size = float((decoded - x).norm()), float(x.norm())
    relative = error / size if size > 0 else math.inf * error if error else 0.0
    return relative if math.isfinite(relative) else math.inf
