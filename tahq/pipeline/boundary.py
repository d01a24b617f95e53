"""Where codec meets link: one cut, seen from one of its two sides.

A boundary is the only place that knows both tensors and frames. It names each tensor by its logical
id, derives the codec's key from that id, packs and sends; and on the other side posts receives ahead,
checks that what came is what the plan says, and unpacks.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from tahq.comm.frame import Direction, Frame, LogicalId, Purpose
from tahq.comm.transport import Transport
from tahq.errors import LocalProtocolError, RemoteProtocolError
from tahq.quant import AUTO, get_codec
from tahq.quant.codec import Codec
from tahq.quant.stateful_codec import StatefulCodec
from tahq.randomness import derive_seed

BOUNDARY_DTYPE = torch.float32
"""Of what crosses a cut, before it is encoded and after it was decoded."""


class Stopwatch:
    """Seconds spent by activity; what a step's time was made of."""

    def __init__(self) -> None:
        self._timers: dict[str, Timer] = {}

    def measure(self, activity: str) -> "Timer":
        """A context that adds the time it takes to `activity`; not to be entered within itself."""
        timer = self._timers.get(activity)
        if timer is None:
            timer = self._timers[activity] = Timer()
        return timer

    def take(self) -> dict[str, float]:
        """What was measured since the last call."""
        taken = {activity: timer.seconds for activity, timer in self._timers.items() if timer.seconds}
        self._timers = {}
        return taken


class Timer:
    """Adds up the time spent inside it. A plain class: entering a generator's context costs ten times as much."""

    __slots__ = ("_begin_s", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._begin_s = time.perf_counter()

    def __exit__(self, *exc_info: object) -> None:
        self.seconds += time.perf_counter() - self._begin_s


class CodecTable:
    """The plan's table of resolved codec specs; a frame names its codec by the index here.

    A codec with state belongs to one cut, so every cut has a table of its own.

    Args:
        activations: spec of what goes forward.
        gradients: spec of what goes backward.
        backend: which implementation of them, `auto` by device; both ends of a link may differ.
        threads: how many the implementation for CPUs may use.
    """

    def __init__(self, activations: str, gradients: str, *, backend: str = AUTO, threads: int = 1) -> None:
        self.codecs: tuple[Codec, ...] = tuple(
            get_codec(spec, backend=backend, threads=threads) for spec in ("raw:dtype=fp32", activations, gradients)
        )

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
        by_direction = dict(zip(Direction, self.codecs[1:], strict=True))
        return {d: c for d, c in by_direction.items() if isinstance(c, StatefulCodec) and c.is_stateful}

    def index(self, purpose: Purpose, direction: Direction) -> int:
        """Which codec packs this kind of tensor."""
        if purpose in (Purpose.EVAL_RAW, Purpose.TIE):
            return 0
        return 1 if direction is Direction.FORWARD else 2


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
        stopwatch: told the seconds of `encode`, `decode` and `wait`.
    """

    def __init__(
        self,
        transport: Transport,
        identity: CutIdentity,
        codecs: CodecTable,
        device: torch.device,
        stopwatch: Stopwatch,
    ) -> None:
        self.transport = transport
        self.codecs = codecs
        self._identity = identity
        self._device = device
        self._stopwatch = stopwatch
        self._arrived: dict[LogicalId, Frame] = {}

    def post(
        self, step: int, purpose: Purpose, direction: Direction, micro_batches: Iterable[int], shape: tuple[int, ...]
    ) -> None:
        """Post receives ahead, so that a frame finds its place whenever it comes."""
        codec = self.codecs.codecs[self.codecs.index(purpose, direction)]
        max_nbytes = codec.encoded_nbytes(shape)
        for micro_batch in micro_batches:
            self.transport.expect(self._identity.name(step, purpose, micro_batch, direction), max_nbytes)

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
        id = self._identity.name(step, purpose, micro_batch, direction)
        index = self.codecs.index(purpose, direction)
        codec = self.codecs.codecs[index]
        with self._stopwatch.measure("encode"):
            payload = self._encode(codec, id, tensor, sample_ids).cpu()
            finite = not codec.has_non_finite(payload)
        self.transport.send(Frame(id, index, tensor.dtype, tuple(tensor.shape), payload))
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
        id = self._identity.name(step, purpose, micro_batch, direction)
        with self._stopwatch.measure("wait"):
            frame = self._await(id)
        index = self.codecs.index(purpose, direction)
        _check(frame, index, shape, dtype)
        codec = self.codecs.codecs[index]
        with self._stopwatch.measure("decode"):
            return self._decode(codec, frame, sample_ids)

    def _encode(
        self, codec: Codec, id: LogicalId, tensor: torch.Tensor, sample_ids: Sequence[int] | None
    ) -> torch.Tensor:
        key = self._key(codec, id)
        if isinstance(codec, StatefulCodec):
            return codec.encode(tensor, key=key, sample_ids=_remembered(codec, id, sample_ids))
        return codec.encode(tensor, key=key)

    def _decode(self, codec: Codec, frame: Frame, sample_ids: Sequence[int] | None) -> torch.Tensor:
        payload, key = frame.payload.to(self._device), self._key(codec, frame.id)
        if isinstance(codec, StatefulCodec):
            ids = _remembered(codec, frame.id, sample_ids)
            return codec.decode(payload, frame.shape, frame.dtype, key=key, sample_ids=ids)
        return codec.decode(payload, frame.shape, frame.dtype, key=key)

    def _key(self, codec: Codec, id: LogicalId) -> int:
        return codec_key(id, self._identity.seed) if codec.is_keyed else 0

    def _await(self, id: LogicalId) -> Frame:
        while id not in self._arrived:
            frame = self.transport.recv()
            self._arrived[frame.id] = frame
        return self._arrived.pop(id)


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
