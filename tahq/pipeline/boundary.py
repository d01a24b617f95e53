"""Where codec meets link: one cut, seen from one of its two sides.

A boundary is the only place that knows both tensors and frames. It names each tensor by its logical
id, derives the codec's key from that id, packs and sends; and on the other side posts receives ahead,
checks that what came is what the plan says, and unpacks.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from tahq.comm.link.frame import Direction, Frame, LogicalId, Purpose
from tahq.comm.transport import Transport
from tahq.errors import LocalProtocolError, RemoteProtocolError
from tahq.pipeline.spans import Stopwatch
from tahq.quant import AUTO, CodecSpec, get_codec
from tahq.quant.codec import Codec
from tahq.quant.spec import RawSpec
from tahq.quant.stateful_codec import StatefulCodec
from tahq.randomness import derive_seed

BOUNDARY_DTYPE = torch.float32
"""Of what crosses a cut, before it is encoded and after it was decoded."""


class CodecTable:
    """The plan's table of resolved codec specs; a frame names its codec by the index here.

    First raw, then what activations may have, then what gradients may. Which of these is in force is a matter of the
    step (`use`), and both ends of a cut are told the same. A codec with state belongs to one cut, so every cut has a
    table of its own.

    Args:
        activations: spec of what goes forward at first.
        gradients: spec of what goes backward at first.
        rungs: what either may change to, itself among them, by direction; None: nothing.
        backend: which implementation of them, `auto` by device; both ends of a link may differ.
        threads: how many the implementation for CPUs may use.
    """

    def __init__(
        self,
        activations: str,
        gradients: str,
        *,
        rungs: Mapping[Direction, Sequence[str]] | None = None,
        backend: str = AUTO,
        threads: int = 1,
    ) -> None:
        first = {Direction.FORWARD: activations, Direction.BACKWARD: gradients}
        tables = {d: [CodecSpec.parse(text) for text in (rungs or {}).get(d, [spec])] for d, spec in first.items()}
        specs = [RawSpec("fp32"), *tables[Direction.FORWARD], *tables[Direction.BACKWARD]]
        self.codecs: tuple[Codec, ...] = tuple(get_codec(spec, backend=backend, threads=threads) for spec in specs)
        num_forward = len(tables[Direction.FORWARD])
        self._choices = {
            Direction.FORWARD: range(1, 1 + num_forward),
            Direction.BACKWARD: range(1 + num_forward, len(specs)),
        }
        # By direction (first step, index), newest last. Replaced whole: other threads may be looking.
        self._in_force: dict[Direction, tuple[tuple[int, int], ...]] = {
            d: ((0, self._choices[d][tables[d].index(CodecSpec.parse(spec))]),) for d, spec in first.items()
        }

    def prepare(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        """Have every kernel that these tensors will need compiled or loaded, whichever way they go.

        Raises:
            CodecError: a codec does not go with the shape, or its backend not with the device.
        """
        for codec in self.codecs:
            codec.prepare(shape, dtype, device)

    @property
    def stateful(self) -> dict[Direction, StatefulCodec]:
        """The codecs that remember what has crossed, by the direction that they are for."""
        by_direction = {d: [self.codecs[index] for index in choice] for d, choice in self._choices.items()}
        return {d: c for d, cs in by_direction.items() for c in cs if isinstance(c, StatefulCodec) and c.is_stateful}

    def use(self, step: int, direction: Direction, index: int) -> None:
        """Pack this direction with the codec of this index from this step on, until told otherwise.

        The step before may still be going on: what it packs with does not change.

        Raises:
            LocalProtocolError: this direction has no such codec.
        """
        if index not in self._choices[direction]:
            choice = self._choices[direction]
            raise LocalProtocolError(
                f"codec {index} is none of those for {direction.name.lower()}, {choice.start} to {choice.stop - 1}"
            )
        before = [entry for entry in self._in_force[direction] if entry[0] < step]
        self._in_force[direction] = (*before[-1:], (step, index))

    def index(self, purpose: Purpose, direction: Direction, step: int) -> int:
        """Which codec packs this kind of tensor in this step."""
        if purpose in (Purpose.EVAL_RAW, Purpose.TIE):
            return 0
        entries = self._in_force[direction]
        return next((index for since, index in reversed(entries) if since <= step), entries[0][1])


@dataclass(frozen=True, slots=True)
class ErrorSample:
    """‖x̂ − x‖/‖x‖ of one tensor that was sent, x̂ being what its receiver decodes."""

    link: int
    direction: Direction
    relative_error: float


def codec_key(id: LogicalId, seed: int) -> int:
    """The 64-bit key of a randomised codec for one tensor, equal on both ends and never sent.

    The run's number is left out: the seed stands for the run, so that a continued or repeated run
    with the same seed draws the same signs.
    """
    return derive_seed(seed, "codec", id.replica, id.step, int(id.purpose), id.micro_batch, id.cut, int(id.direction))


@dataclass(frozen=True, slots=True)
class CutIdentity:
    """What the ids of all tensors on one cut have in common."""

    run: int
    seed: int
    cut: int
    replica: int = 0

    def name(self, step: int, purpose: Purpose, micro_batch: int, direction: Direction) -> LogicalId:
        """The logical id of one tensor on this cut."""
        return LogicalId(self.run, self.replica, step, purpose, micro_batch, self.cut, direction)


class Boundary:
    """One side of a cut.

    Args:
        transport: the link that crosses it.
        identity: names of what crosses it.
        codecs: the plan's table.
        device: where tensors are encoded from and decoded to.
        stopwatch: told the seconds of encoding, decoding and waiting.
        peer: stage at the other end, by which the waiting is called; None: nobody asks who it was for.
        measure_every: steps between measurements of the codec's error, on what is sent of the first micro-batch;
            None: never.
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
        self._identity = identity
        self._device = device
        self._stopwatch = stopwatch
        self._measure_every = measure_every
        self._errors: list[ErrorSample] = []
        self.waiting = "wait" if peer is None else f"wait:{peer}"
        """What waiting for a frame of the other end is called where times are told."""
        self._arrived: dict[LogicalId, Frame] = {}

    def name(self, step: int, purpose: Purpose, micro_batch: int, direction: Direction) -> LogicalId:
        """The logical id of a tensor that crosses here."""
        return self._identity.name(step, purpose, micro_batch, direction)

    def use(self, step: int, direction: Direction, index: int) -> None:
        """See `CodecTable.use`."""
        self.codecs.use(step, direction, index)

    def take_errors(self) -> list[ErrorSample]:
        """What was measured since the last call."""
        errors, self._errors = self._errors, []
        return errors

    def post(
        self, step: int, purpose: Purpose, direction: Direction, micro_batches: Iterable[int], shape: tuple[int, ...]
    ) -> None:
        """Post receives ahead, so that a frame finds its place whenever it comes."""
        codec = self.codecs.codecs[self.codecs.index(purpose, direction, step)]
        max_nbytes = codec.encoded_nbytes(shape)
        for micro_batch in micro_batches:
            self.transport.expect(self.name(step, purpose, micro_batch, direction), max_nbytes)

    def send(
        self,
        step: int,
        purpose: Purpose,
        direction: Direction,
        micro_batch: int,
        tensor: torch.Tensor,
        sample_ids: Sequence[int] | None = None,
    ) -> bool:
        """Pack a tensor and queue it; returns whether all that was packed is finite.

        Args:
            step, purpose, direction, micro_batch: name the tensor.
            tensor: [B, S, C].
            sample_ids: of the B samples, which stateful codecs need in training.
        """
        id = self.name(step, purpose, micro_batch, direction)
        index = self.codecs.index(purpose, direction, step)
        codec = self.codecs.codecs[index]
        with self._stopwatch.measure("encode", id):
            payload = _at(self.transport.payload_device, self._encode(codec, id, tensor, sample_ids))
            finite = not codec.has_non_finite(payload)
        frame = Frame(id, index, tensor.dtype, tuple(tensor.shape), payload)
        self.transport.send(frame)
        if self._is_measured(id):
            with self._stopwatch.measure("guard"):
                self._errors.append(ErrorSample(self.transport.link, direction, self._error(codec, frame, tensor)))
        return finite

    def receive(
        self,
        step: int,
        purpose: Purpose,
        direction: Direction,
        micro_batch: int,
        shape: tuple[int, ...],
        dtype: torch.dtype = BOUNDARY_DTYPE,
        sample_ids: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Wait for a posted tensor and unpack it; `sample_ids` as in `send`.

        Raises:
            PeerLostError: the link is lost.
            RemoteProtocolError: its codec, shape or dtype is not what the plan says.
            CodecError: its payload is not a valid stream.
        """
        with self._stopwatch.measure(self.waiting, self.name(step, purpose, micro_batch, direction)):
            frame = self.await_frame(step, purpose, direction, micro_batch)
        return self.unpack(frame, shape, dtype, sample_ids)

    def await_frame(self, step: int, purpose: Purpose, direction: Direction, micro_batch: int) -> Frame:
        """Wait for the frame of a posted tensor; of all that wait here, one thread at a time.

        Raises:
            PeerLostError: the link is lost.
        """
        id = self.name(step, purpose, micro_batch, direction)
        while id not in self._arrived:
            frame = self.transport.recv()
            self._arrived[frame.id] = frame
        return self._arrived.pop(id)

    def unpack(
        self, frame: Frame, shape: tuple[int, ...], dtype: torch.dtype, sample_ids: Sequence[int] | None
    ) -> torch.Tensor:
        """Make a tensor of a frame that is what the plan says; arguments and errors as of `receive`."""
        index = self.codecs.index(frame.id.purpose, frame.id.direction, frame.id.step)
        _check(frame, index, shape, dtype)
        with self._stopwatch.measure("decode", frame.id):
            return self._decode(self.codecs.codecs[index], frame, sample_ids)

    def _encode(
        self, codec: Codec, id: LogicalId, tensor: torch.Tensor, sample_ids: Sequence[int] | None
    ) -> torch.Tensor:
        key = self._key(codec, id)
        if isinstance(codec, StatefulCodec):
            return codec.encode(tensor, key=key, sample_ids=_remembered(codec, id, sample_ids))
        return codec.encode(tensor, key=key)

    def _is_measured(self, id: LogicalId) -> bool:
        every = self._measure_every
        return every is not None and id.purpose is Purpose.TRAIN and id.micro_batch == 0 and id.step % every == 0

    def _error(self, codec: Codec, frame: Frame, x: torch.Tensor) -> float:
        """‖x̂ − x‖/‖x‖; infinite where either is not finite, 0 where both are nothing."""
        error = float((self._decode(codec, frame, None) - x).norm())
        size = float(x.norm())
        relative = error / size if size > 0 else math.inf * error if error else 0.0
        return relative if math.isfinite(relative) else math.inf

    def _decode(self, codec: Codec, frame: Frame, sample_ids: Sequence[int] | None) -> torch.Tensor:
        payload, key = frame.payload.to(self._device, non_blocking=True), self._key(codec, frame.id)
        if isinstance(codec, StatefulCodec):
            ids = _remembered(codec, frame.id, sample_ids)
            return codec.decode(payload, frame.shape, frame.dtype, key=key, sample_ids=ids)
        return codec.decode(payload, frame.shape, frame.dtype, key=key)

    def _key(self, codec: Codec, id: LogicalId) -> int:
        return codec_key(id, self._identity.seed) if codec.is_keyed else 0


def _at(device: torch.device, payload: torch.Tensor) -> torch.Tensor:
    """The bytes where a transport takes them; to the host through pinned memory, waiting for this stream alone."""
    if payload.device.type == device.type:
        return payload
    if device.type != "cpu":
        return payload.to(device)
    pinned = torch.empty_like(payload, device="cpu", pin_memory=True)
    pinned.copy_(payload, non_blocking=True)
    torch.cuda.current_stream(payload.device).synchronize()
    return pinned


def _remembered(codec: Codec, id: LogicalId, sample_ids: Sequence[int] | None) -> Sequence[int] | None:
    """The ids that a stateful codec is told: in training those of the samples, in evaluations none."""
    if id.purpose is not Purpose.TRAIN or not codec.is_stateful:
        return None
    if sample_ids is None:
        raise LocalProtocolError(f"cut {id.cut}: {codec.spec} needs the ids of the samples that cross in training")
    return sample_ids


def _check(frame: Frame, index: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    got = (frame.codec, frame.shape, frame.dtype)
    expected = (index, shape, dtype)
    if got != expected:
        raise RemoteProtocolError(
            f"cut {frame.id.cut}: step {frame.id.step}, micro-batch {frame.id.micro_batch} came as "
            f"(codec, shape, dtype) {got}, the plan says {expected}; are both ends the same version?"
        )
