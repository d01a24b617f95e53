"""Sums a stage's gradients over the replicas of the pipeline, to the same bits on all of them.

Gradients, one after the other, are cut into buckets, and a bucket [N] into a shard for each of the R replicas, of as
many numbers, a multiple of 128 except in the last one. Replica j owns shard j:

    all-to-all   every other replica i sends its shard j, encoded, to j
    sum          j adds the R shards in fp32, in the order of replicas; its own is not encoded
    all-gather   j encodes the sum and sends it to all; all of them, j too, go on with what it decodes to

While a replica does not compute, there are as many shards as replicas that do; it only takes the sums.

With `memory.shard` every parameter has an owner, the one replica that updates it. All gradients in a bucket then have
the same owner, and the bucket is its shard. Instead of the sum it sends the weights, in fp32, after the update.

If `memory.shard` has gradients, those of blocks' matrices go to their owner once per micro-batch, and only the owner
keeps the sum. A replica does not begin the next backward before it has added what the others have sent of this one:

    for each micro-batch, the replicas' first ones, then their second ones …:
        sum ← sum + own gradient; then + that of every other replica, as decoded, in the order of replicas

Nothing is divided: the loss is, by the tokens of all replicas. With `fp8` no sum is formed in 8 bits, so none
overflows. All receives are posted before the step. A bucket is sent as soon as its gradients are complete, within the
last backward of its chunk of the model: how often that backward adds to each gradient is known from the step before.

Source: AGoQ §5, Fig. 5 and 6 (all-to-all of FP8 blocks, sum in fp32, all-gather of FP8 blocks); LLMQ §3, sharded
optimizer states (ZeRO-1), and gradients and weights, but those of embedding and head.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import torch
from torch.nn import Parameter

from tahq.comm.link.frame import Direction, Frame, LogicalId, Purpose
from tahq.errors import CodecError
from tahq.memory.agoq.stored_gradients import (
    HoldsGradient,
    drop_gradient,
    fold_gradient,
    gradient_of,
    is_stored,
    replace_gradient,
)
from tahq.memory.shares import UNSHARED, Share
from tahq.memory.small_floats.block_codes import (
    BLOCK,
    BlockCodes,
    dequantize_blocks,
    quantize_blocks,
    stored_nbytes,
)
from tahq.models.deferred_gradients import after_gradient, gradient_dtype
from tahq.pipeline.boundary import BOUNDARY_DTYPE, Boundary, CodecTable, StepAbandonedError
from tahq.quant import get_codec
from tahq.quant.codec import Codec
from tahq.quant.config import FP8, WireConfig
from tahq.quant.spec import RawSpec

BUCKET = 1 << 20
"""Numbers in a bucket, unless a gradient is stored in codes and has more."""
_NCCL_BUCKET = 1 << 26
"""The same where all replicas exchange payloads over NCCL: a frame takes a millisecond there, whatever its size."""
_AHEAD = 32 * BUCKET
"""Weights that a replica sends before it waits for the others', enough for a long round trip."""
_SCATTER, _GATHER = Direction.FORWARD, Direction.BACKWARD


class BlockFloatCodec(Codec):
    """E4M3 in blocks of 128 with scales in fp32: K scales, then K blocks of codes, 1.03 bytes per number."""

    spec = RawSpec()

    def encoded_nbytes(self, shape: Sequence[int]) -> int:
        """Exact length of a stream in bytes."""
        return stored_nbytes(torch.Size(shape).numel(), 8, torch.float32.itemsize)

    def encode(self, x: torch.Tensor, *, key: int = 0) -> torch.Tensor:
        """See `quantize_blocks`."""
        coded = quantize_blocks(x, 8, torch.float32)
        return torch.cat((coded.scales.view(torch.uint8), coded.codes.view(-1)))

    def decode(
        self, buf: torch.Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32, *, key: int = 0
    ) -> torch.Tensor:
        """See `dequantize_blocks`."""
        size = torch.Size(shape)
        if buf.numel() != self.encoded_nbytes(size):
            raise CodecError(f"fp8: got a stream of {buf.numel()} bytes, expected {self.encoded_nbytes(size)}")
        scales = buf[: 4 * -(-size.numel() // BLOCK)].view(torch.float32)
        codes = buf[scales.nbytes :].view(-1, BLOCK)
        return dequantize_blocks(BlockCodes(codes, scales), size).to(dtype)

    def has_non_finite(self, buf: torch.Tensor) -> bool:
        """False: NaN decodes to NaN, and norms show it."""
        return False


def sum_codec(spec: str, wire: WireConfig) -> Codec:
    """The codec of `wire.all_reduce`."""
    return BlockFloatCodec() if spec == FP8 else get_codec(spec, backend=wire.backend, threads=wire.threads)


class SumCodecs(CodecTable):
    """The codecs of a link between replicas: of shards, of sums, and of weights that are lent."""

    def __init__(self, *codecs: Codec) -> None:
        self._choices, self._in_force = {}, {}
        self.codecs = codecs

    def index(self, purpose: Purpose, direction: Direction, step: int) -> int:
        """See `CodecTable.index`."""
        return int(direction) if purpose is Purpose.SUM else 2


@dataclass(frozen=True, slots=True)
class _Piece:
    """Numbers [start, stop) of a holder's gradient, or of a parameter."""

    holder: HoldsGradient
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Pieces of gradients that are sent together, to their owner; without one cut into a shard for each replica."""

    pieces: tuple[_Piece, ...]
    share: Share = UNSHARED

    @property
    def holders(self) -> list[HoldsGradient]:
        """Each once."""
        return list({id(piece.holder): piece.holder for piece in self.pieces}.values())

    @property
    def sizes(self) -> list[int]:
        """Of its pieces."""
        return [piece.stop - piece.start for piece in self.pieces]


Send = Callable[[Boundary, LogicalId, torch.Tensor | None, None], None]
"""`CodecLanes.send`: encodes and sends a tensor, which does not change until `finish`."""


@dataclass(slots=True)
class _Open:
    """A chunk whose backward runs, its `is_last` or an earlier one."""

    step: int
    chunk: int
    is_last: bool
    send: Send
    unsent: set[int]
    added: Counter[int] = field(default_factory=Counter)


class GradientSum:
    """One replica's part of the sums of its stage.

    Args:
        chunks: the holders of gradients of each chunk of the model, in one order on all replicas.
        replica: this one's number.
        boundaries: the links to the others, by replica.
        run: the run's number, for logical ids.
        first_cut: logical ids of shard j have the cut first_cut + j.
        shares: of each holder of a chunk; those with an owner are parameters. None: each replica updates all of them.
    """

    def __init__(
        self,
        chunks: Mapping[int, Sequence[HoldsGradient]],
        replica: int,
        boundaries: Mapping[int, Boundary],
        run: int,
        first_cut: int,
        shares: Mapping[int, Sequence[Share]] | None = None,
    ) -> None:
        self._replica, self._run, self._first_cut = replica, run, first_cut
        self._boundaries = dict(sorted(boundaries.items()))
        self._num_replicas = len(boundaries) + 1
        over_nccl = all(boundary.transport.payload_device.type == "cuda" for boundary in boundaries.values())
        self._most = most = _NCCL_BUCKET if over_nccl else BUCKET
        by_chunk = {
            chunk: list(_buckets(holders, most) if shares is None else _owned_buckets(holders, shares[chunk], most))
            for chunk, holders in chunks.items()
        }
        self._buckets = [bucket for buckets in by_chunk.values() for bucket in buckets]
        every = range(self._num_replicas)
        gathered = [(n, bucket.share.owner) for n, bucket in enumerate(self._buckets) if not bucket.share.keeps_alone]
        numbers_of = [[n for n, owner in gathered if owner == replica] for replica in every]
        self._turns = list(zip_longest(*numbers_of))
        """For `gather_weights`: in each turn a bucket of every owner, by its number; None: it has no more."""
        numbers = iter(range(len(self._buckets)))
        self._of_chunk = {chunk: [next(numbers) for _ in buckets] for chunk, buckets in by_chunk.items()}
        self.use(range(self._num_replicas))
        self._of_holder: dict[int, list[int]] = {}
        for number, bucket in enumerate(self._buckets):
            for holder in bucket.holders:
                self._of_holder.setdefault(id(holder), []).append(number)
                if len(self._of_holder[id(holder)]) == 1:
                    after_gradient(holder, self._added)
        self._open: _Open | None = None
        self._expected: dict[tuple[int, bool], Counter[int]] = {}
        """By chunk: how often its last backward, or an earlier one, adds to each gradient, by the holder's `id`."""
        self._left: dict[int, int] = {}
        """How many of these additions each bucket waits for."""
        self._turn = Counter[int]()
        """By chunk: how many of the step's backwards have been opened."""

    def use(self, computing: Sequence[int]) -> None:
        """Sum over these replicas from the next step on."""
        self._computing = tuple(computing)
        self._sizes = [self._shard_sizes(bucket) for bucket in self._buckets]

    def prepare(self, device: torch.device) -> None:
        """Compile or load the kernels of its codecs; CodecError: as of `Codec.prepare`."""
        by_spec = {str(each.spec): each for boundary in self._boundaries.values() for each in boundary.codecs.codecs}
        for codec in by_spec.values():
            codec.prepare((self._most // self._num_replicas,), BOUNDARY_DTYPE, device)

    def post(self, step: int, num_backwards: int = 1) -> None:
        """Post all receives of a step, in which each chunk has so many backwards here."""
        self._turn.clear()
        for number, sizes in enumerate(self._sizes):
            turns = num_backwards if self._buckets[number].share.sums_alone else 1
            for other, boundary in self._boundaries.items():
                if sizes[self._replica] and other in self._computing:
                    for turn in range(1, turns + 1):
                        name = self._name(step, number, other, self._replica, _SCATTER, turn)
                        boundary.post(name, (sizes[self._replica],))
                if sizes[other] and not self._buckets[number].share.keeps_alone:
                    boundary.post(self._name(step, number, other, other, _GATHER), (sizes[other],))

    def open(self, step: int, chunk: int, send: Send, *, is_last: bool = True) -> None:
        """Begin to send a chunk's gradients, as they become complete in the backward that is about to run.

        All of them in the last backward, in others those that are sent each time.
        """
        self._add_received(step, chunk)
        self._turn[chunk] += 1
        numbers = [n for n in self._of_chunk[chunk] if is_last or self._buckets[n].share.sums_alone]
        self._open = _Open(step, chunk, is_last, send, set(numbers))
        expected = self._expected.get((self._open.chunk, self._open.is_last))
        if expected is None:
            return
        for number in numbers:
            self._left[number] = sum(expected[id(holder)] for holder in self._buckets[number].holders)
            if not self._left[number]:
                self._send(number)

    def close(self, *, is_void: bool = False) -> None:
        """Send what is left of the chunk; with `is_void`, in an abandoned step, nothing but that."""
        assert self._open is not None
        for number in sorted(self._open.unsent):
            self._send(number, is_void=is_void)
        self._expected[(self._open.chunk, self._open.is_last)] = self._open.added
        if is_void:
            self.forget()
        self._open = None

    def _add_received(self, step: int, chunk: int) -> None:
        """Add the other replicas' gradients of the chunk's last backward so far to the sums that are here alone."""
        turn = self._turn[chunk]
        for number in self._of_chunk[chunk] if turn else ():
            bucket = self._buckets[number]
            if bucket.share.sums_alone and bucket.share.owner == self._replica:
                for other, boundary in self._boundaries.items():
                    name = self._name(step, number, other, self._replica, _SCATTER, turn)
                    _put(bucket, boundary.receive(name), is_added=True)

    def forget(self) -> None:
        """Expect nothing of the next step's backward: its schedule is another."""
        self._expected.clear()

    def _added(self, holder: HoldsGradient) -> None:
        """Within the backward: something was added to a gradient."""
        if self._open is None:
            return
        self._open.added[id(holder)] += 1
        for number in self._of_holder[id(holder)] if (self._open.chunk, self._open.is_last) in self._expected else ():
            if not (self._open.is_last or self._buckets[number].share.sums_alone):
                continue
            if number not in self._open.unsent:
                raise AssertionError("a gradient changed after it was sent: its backward differs from the step before")
            self._left[number] -= 1
            if not self._left[number]:
                self._send(number)

    def _send(self, number: int, *, is_void: bool = False) -> None:
        assert self._open is not None
        self._open.unsent.remove(number)
        bucket, sizes = self._buckets[number], self._sizes[number]
        if bucket.share.owner == self._replica:
            return
        shards = () if is_void else torch.split(self._flat(number), sizes)
        for other, boundary in self._boundaries.items():
            if sizes[other]:
                name = self._name(
                    *(self._open.step, number, self._replica, other, _SCATTER), self._turn[self._open.chunk]
                )
                self._open.send(boundary, name, None if is_void else shards[other], None)
        for holder in bucket.holders if bucket.share.sums_alone else ():
            if self._open.unsent.isdisjoint(self._of_holder[id(holder)]):
                drop_gradient(holder)

    def finish(self, step: int, *, is_void: bool = False) -> bool:
        """Replace every gradient by the sum, once all chunks are sent and encoded; those of other owners are dropped.

        Returns:
            False if the step is abandoned, here (`is_void`) or by another replica; gradients are then without meaning.

        Raises:
            PeerLostError, RemoteProtocolError, CodecError: from the links.
        """
        for chunk in self._of_chunk:
            self._add_received(step, chunk)
        numbers = [number for number, bucket in enumerate(self._buckets) if not bucket.share.sums_alone]
        sums = [self._own_sum(step, number, is_void=is_void) for number in numbers]
        for number, own in zip(numbers, sums, strict=True):
            bucket = self._buckets[number]
            if bucket.share is not UNSHARED and bucket.share.owner != self._replica:
                for holder in bucket.holders:
                    drop_gradient(holder)
                continue
            parts = [
                own if replica == self._replica else self._received(step, number, replica, replica, _GATHER)
                for replica in self._computing
            ]
            if (whole := _all_of(parts)) is None:
                is_void = True
            elif not is_void:
                _put(bucket, torch.cat(whole))
        return not is_void

    def gather_weights(self, step: int) -> None:
        """After a step's update, or none: send the weights that this replica owns, and take the others, if any.

        What is taken keeps pace with what is sent, so that large shares do not pile up in the links' queues.

        Raises:
            PeerLostError, RemoteProtocolError, CodecError: from the links.
        """
        blank: list[tuple[int | None, ...]] = [()] * max(1, _AHEAD // self._most)
        for sent, taken in zip([*self._turns, *blank], [*blank, *self._turns], strict=True):
            for owner, number in enumerate(sent):
                if owner == self._replica and number is not None:
                    weights = torch.cat([_weights(piece).float() for piece in self._buckets[number].pieces])
                    self._send_to_all(self._name(step, number, owner, owner, _GATHER), weights)
            for owner, number in enumerate(taken):
                if owner != self._replica and number is not None:
                    values = self._boundaries[owner].receive(self._name(step, number, owner, owner, _GATHER))
                    bucket = self._buckets[number]
                    for piece, part in zip(bucket.pieces, torch.split(values, bucket.sizes), strict=True):
                        _weights(piece).copy_(part)

    def _own_sum(self, step: int, number: int, *, is_void: bool) -> torch.Tensor | None:
        """This replica's shard of the sum, as all decode it, sent to all; with an owner for itself. None: abandoned."""
        mine = self._replica
        if not self._sizes[number][mine]:
            return self._nothing(number)
        own = torch.split(self._flat(number), self._sizes[number])[mine]
        parts = [
            own if replica == mine else self._received(step, number, replica, mine, _SCATTER)
            for replica in self._computing
        ]
        name = self._name(step, number, mine, mine, _GATHER)
        whole = _all_of(parts)
        if whole is None or is_void:
            for boundary in self._boundaries.values():
                boundary.send_void(name)
            return None
        total = whole[0].clone()
        for part in whole[1:]:
            total.add_(part)
        if self._buckets[number].share is not UNSHARED:
            return total
        return next(iter(self._boundaries.values())).decoded(self._send_to_all(name, total))

    def _send_to_all(self, name: LogicalId, values: torch.Tensor) -> Frame:
        frame, _ = next(iter(self._boundaries.values())).encoded(name, values)
        for boundary in self._boundaries.values():
            boundary.transport.send(frame)
        return frame

    def _received(self, step: int, number: int, sender: int, shard: int, direction: Direction) -> torch.Tensor | None:
        """None: the sender has abandoned the step."""
        if not self._sizes[number][shard]:
            return self._nothing(number)
        try:
            return self._boundaries[sender].receive(self._name(step, number, sender, shard, direction))
        except StepAbandonedError:
            return None

    def _nothing(self, number: int) -> torch.Tensor:
        return torch.empty(0, dtype=BOUNDARY_DTYPE, device=self._buckets[number].pieces[0].holder.device)

    def _name(self, step: int, number: int, sender: int, shard: int, direction: Direction, turn: int = 1) -> LogicalId:
        if self._buckets[number].share.sums_alone:
            number += (turn - 1) * len(self._buckets)
        return LogicalId(self._run, sender, step, Purpose.SUM, number, self._first_cut + shard, direction)

    def _flat(self, number: int) -> torch.Tensor:
        """A bucket's gradients, fp32 [N]; zeros where there is none."""
        parts = []
        for piece in self._buckets[number].pieces:
            gradient = gradient_of(piece.holder)
            if gradient is None:
                parts.append(torch.zeros(piece.stop - piece.start, device=piece.holder.device))
            else:
                parts.append(gradient.detach().reshape(-1)[piece.start : piece.stop].float())
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _shard_sizes(self, bucket: Bucket) -> list[int]:
        """By replica, 0 for those that do not compute, or do not own it."""
        numel = sum(bucket.sizes)
        if bucket.share is not UNSHARED:
            return [numel if replica == bucket.share.owner else 0 for replica in range(self._num_replicas)]
        blocks = -(-numel // BLOCK)
        most = -(-blocks // len(self._computing)) * BLOCK
        sizes = {replica: max(0, min(most, numel - most * place)) for place, replica in enumerate(self._computing)}
        return [sizes.get(replica, 0) for replica in range(self._num_replicas)]


def _all_of(parts: Sequence[torch.Tensor | None]) -> list[torch.Tensor] | None:
    whole = [part for part in parts if part is not None]
    return whole if len(whole) == len(parts) else None


def _owned_buckets(holders: Sequence[HoldsGradient], shares: Sequence[Share], most: int) -> Iterator[Bucket]:
    """Buckets of one share each."""
    for share in sorted(set(shares)):
        owned = [holder for holder, its_share in zip(holders, shares, strict=True) if its_share == share]
        yield from (Bucket(bucket.pieces, share) for bucket in _buckets(owned, most))


def _buckets(holders: Sequence[HoldsGradient], most: int) -> Iterator[Bucket]:
    """Pieces of the gradients in order, `most` numbers at a time; gradients in codes stay whole."""
    bucket, room = list[_Piece](), most
    for holder in holders:
        start, numel = 0, holder.numel()
        while start < numel:
            stop = numel if is_stored(holder) else min(numel, start + room)
            bucket.append(_Piece(holder, start, stop))
            room -= stop - start
            start = stop
            if room <= 0:
                yield Bucket(tuple(bucket))
                bucket, room = [], most
    if bucket:
        yield Bucket(tuple(bucket))


@torch.no_grad()
def _put(bucket: Bucket, values: torch.Tensor, *, is_added: bool = False) -> None:
    """Put a bucket's numbers, fp32 [N], in the place of its gradients, or add them."""
    for piece, part in zip(bucket.pieces, torch.split(values, bucket.sizes), strict=True):
        holder = piece.holder
        if is_stored(holder) and is_added:
            holder.grad = part.view(holder.shape)
            fold_gradient(holder)
        elif is_stored(holder):
            replace_gradient(holder, part.view(holder.shape))
        else:
            if holder.grad is None:  # this replica does not compute
                holder.grad = torch.zeros(holder.shape, dtype=gradient_dtype(holder), device=holder.device)
            holder.grad = holder.grad.contiguous()
            numbers = holder.grad.view(-1)[piece.start : piece.stop]
            numbers.add_(part) if is_added else numbers.copy_(part)


def _weights(piece: _Piece) -> torch.Tensor:
    """The numbers of a parameter's piece, in place."""
    assert isinstance(piece.holder, Parameter)
    return piece.holder.detach().view(-1)[piece.start : piece.stop]
