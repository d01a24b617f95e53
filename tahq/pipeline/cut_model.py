"""A whole model in one process, cut where a run cuts it, to measure the effect of codecs on its gradients.

Invariants:
- with codecs, the gradients are those of the stages of a run with the same wire, to the bit: same casts, same order of
  addition, same dropout masks, same codec keys;
- without, they are those of the wire `raw:dtype=fp32` in both directions;
- weights are never changed here.

Shapes: B samples per micro-batch, S tokens, C channels, V words of the vocabulary.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import Parameter

from tahq.comm.link.frame import Direction, Purpose
from tahq.data.batches import StepBatch
from tahq.errors import ConfigError
from tahq.memory.agoq.stored_gradients import scale_gradients
from tahq.models.experts.load_balance import RouterLoss
from tahq.models.slice import HEAD_WEIGHT, ModelSlice
from tahq.pipeline.boundary import CutIdentity, codec_key
from tahq.pipeline.gradients import TiedEmbedding, gradient_scale
from tahq.quant import get_codec
from tahq.quant.codec import Codec

CodecPair = tuple[Codec | None, Codec | None]
"""The codecs of the forward and of the backward direction; None: nothing is encoded."""


class CodecCut(torch.autograd.Function):
    """A cut without a link: forward through one codec, backward through the other.

    ``CodecCut.apply(x, codecs, keys)`` gives the tensor that a `Boundary` on the other side would receive, to the bit,
    in the dtype, shape and device of x [B, …, C]; so does the gradient. Keys are those of `boundary.codec_key`.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, codecs: CodecPair, keys: Sequence[int]) -> torch.Tensor:
        """The tensor that arrives at the next stage."""
        ctx.codec, ctx.key = codecs[1], keys[1]
        return _crossed(codecs[0], x, keys[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradient that arrives back at the previous stage."""
        return _crossed(ctx.codec, gradient, ctx.key), None, None


def _crossed(codec: Codec | None, x: torch.Tensor, key: int) -> torch.Tensor:
    """decode(encode(x)), without autograd."""
    return x.view_as(x) if codec is None else codec.decode(codec.encode(x.detach(), key=key), x.shape, x.dtype, key=key)


@dataclass(frozen=True, slots=True)
class ProbedWire:
    """The codecs of both directions, as specs; None: nothing is encoded."""

    activations: str | None = None
    gradients: str | None = None

    def codecs(self) -> CodecPair:
        """The codecs of one cut; ConfigError for an unknown codec or parameter, or a codec that remembers samples."""
        forward, backward = (None if spec is None else get_codec(spec) for spec in (self.activations, self.gradients))
        for codec in (forward, backward):
            if codec is not None and codec.is_stateful:
                raise ConfigError(
                    f"{codec.spec.name} remembers what it sent of each sample, so its error shows only over epochs: a "
                    "probe cannot measure it; choose other codecs (--codec), or train with it and compare the loss"
                )
        return forward, backward


UNCOMPRESSED = ProbedWire()


class CutModel:
    """All stages' slices in order, on one device, sharing one `RandomContext`; codec keys come from the run's seed.

    `num_pieces` and `router_loss` as of `StageEngine`.
    """

    def __init__(
        self,
        slices: Sequence[ModelSlice],
        *,
        seed: int,
        autocast: torch.dtype | None = None,
        num_pieces: Callable[[int], int] = lambda step: 1,
        router_loss: RouterLoss | None = None,
    ) -> None:
        self._router_loss = router_loss
        self._slices = tuple(slices)
        self._num_pieces = num_pieces
        self._seed = seed
        self._dtype = autocast
        self.weights = {name: p for part in slices for name, p in part.canonical_parameters().items()}
        self.parameters = {name: p for name, p in self.weights.items() if p.requires_grad}
        """Those that are trained."""
        self._device = next(iter(self.weights.values())).device
        self._spec = slices[0].spec
        self.num_cuts = len(slices) - 1
        self.hidden_size = self._spec.hidden_size
        self.is_decayed = slices[0].is_decayed
        self.tied: TiedEmbedding | None = None
        if self._spec.tie == "sync":
            embedding, head = self.parameters[self._spec.layout.embedding_weight], self.parameters[HEAD_WEIGHT]
            self.tied = TiedEmbedding(embedding, head, None)

    def groups(self) -> dict[str, dict[str, Parameter]]:
        """Parameters by place: `embedding`, `stage 0` …, `head`; of two tied copies only the first."""
        groups: dict[str, dict[str, Parameter]] = {}
        layout = self._spec.layout
        for stage, module in enumerate(self._slices):
            for name, parameter in module.canonical_parameters().items():
                if name not in self.parameters or (self.tied is not None and parameter is self.tied.uncounted):
                    continue
                part = name.removeprefix(f"{layout.trunk}.").partition(".")[0]
                is_embedding = part in (layout.embedding, layout.positions)
                group = "embedding" if is_embedding else f"stage {stage}" if part == layout.blocks else "head"
                groups.setdefault(group, {})[name] = parameter
        return groups

    def compute_gradients(
        self, batch: StepBatch, step: int, wire: ProbedWire | Sequence[CodecPair] = UNCOMPRESSED
    ) -> float:
        """Forward and backward of every micro-batch; leaves the step's gradients in `parameters`.

        The step's number names the dropout masks and the codec keys. `wire`: of all cuts, or a pair of codecs for each.

        Returns:
            The mean loss in nats per token.

        Raises:
            CodecError: a codec refuses a tensor.
        """
        codecs = [wire.codecs()] * self.num_cuts if isinstance(wire, ProbedWire) else wire
        losses, num_tokens = [], max(batch.num_tokens, 1)
        num_micro_batches = len(batch.sample_ids) // batch.micro_batch_size
        scale = gradient_scale(batch.tokens.numel())  # all tokens, as on the stages
        for parameter in self.parameters.values():
            parameter.grad = None
        for index in range(num_micro_batches):
            tokens, labels = (tensor.to(self._device) for tensor in batch.micro_batch(index))
            balance = None
            if self._router_loss is not None:
                balance = self._router_loss.begin(tokens.numel(), scale / num_micro_batches, self._device)
            for part in self._slices:
                part.balance = balance
            y = self._output(tokens, batch.micro_batch_positions(index), step, index, codecs)
            if balance is not None:
                balance.totals = balance.sums[0]
            with self._autocast():
                loss, summed = self._slices[-1].loss(y, labels, num_tokens / scale)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(summed)
        scale_gradients(self.parameters.values(), 1 / scale)
        if self.tied is not None:
            self.tied.exchange(step)
        return math.fsum(torch.stack(losses).tolist()) / num_tokens

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._device.type, self._dtype or torch.bfloat16, enabled=self._dtype is not None)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[StepBatch], step: int, codecs: Sequence[CodecPair]) -> float:
        """The mean loss in nats per token, with a pair of codecs for each cut; micro-batches are numbered from 0."""
        losses, num_tokens = list[torch.Tensor](), 0
        for batch in batches:
            for index in range(len(batch.sample_ids) // batch.micro_batch_size):
                tokens, labels = (tensor.to(self._device) for tensor in batch.micro_batch(index))
                places = batch.micro_batch_positions(index)
                y = self._output(tokens, places, step, len(losses), codecs, Purpose.EVAL)
                with self._autocast():
                    losses.append(self._slices[-1].loss(y, labels)[1])
            num_tokens += batch.num_tokens
        return math.fsum(torch.stack(losses).tolist()) / num_tokens

    @torch.no_grad()
    def next_tokens(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """The likeliest token behind the first `lengths` int64 [B] of each row of tokens [B, S], without codecs."""
        y = self._output(tokens.to(self._device), None, 0, 0, [(None, None)] * self.num_cuts, Purpose.EVAL)
        with self._autocast():
            return self._slices[-1].logits(y, lengths.to(y.device) - 1).argmax(1)

    def _output(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None,
        step: int,
        micro_batch: int,
        codecs: Sequence[CodecPair],
        purpose: Purpose = Purpose.TRAIN,
    ) -> torch.Tensor:
        """Of tokens [B, S], what the last slice's `loss` takes; `positions` as of `ModelSlice.forward`."""
        x = tokens
        positions = None if positions is None else positions.to(self._device)
        for stage, part in enumerate(self._slices):
            part.train(purpose == Purpose.TRAIN)
            part.num_pieces = self._num_pieces(step) if purpose == Purpose.TRAIN else 1
            part.balance = part.balance if purpose == Purpose.TRAIN else None
            part.random.at(step, 0, micro_batch, int(purpose))
            if stage > 0:
                names = CutIdentity(run=0, seed=self._seed, cut=stage - 1)
                ids = [names.name(step, purpose, micro_batch, direction) for direction in Direction]
                keys = [codec_key(id, self._seed) for id in ids]
                x = CodecCut.apply(x.float(), codecs[stage - 1], keys)  # type: ignore[no-untyped-call]
            with self._autocast():
                x = part(x, positions)
        return x


def copied_gradients(parameters: Mapping[str, Parameter]) -> dict[str, torch.Tensor]:
    """An fp32 copy of every gradient; zeros where there is none."""
    return {
        name: torch.zeros_like(p, dtype=torch.float32) if p.grad is None else p.grad.to(torch.float32, copy=True)
        for name, p in parameters.items()
    }
