"""A whole model in one process, cut where a run cuts it, to measure the effect of codecs on its gradients.

Invariants:
- with codecs, the gradients are those of the stages of a run with the same wire, to the bit: same casts, same order of
  addition, same dropout masks, same codec keys;
- without, they are those of the wire `raw:dtype=fp32` in both directions;
- weights are never changed here.

Shapes: B samples per micro-batch, S tokens, C channels, V words of the vocabulary.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import Parameter

from tahq.comm.link.frame import Direction, Purpose
from tahq.data.batches import StepBatch
from tahq.errors import ConfigError
from tahq.models.families import FamilyLayout
from tahq.models.slice import HEAD_WEIGHT, ModelSlice
from tahq.pipeline.boundary import CutIdentity, codec_key
from tahq.pipeline.gradients import gradient_scale, scale_gradients, summed_cross_entropy
from tahq.pipeline.tie import TiedEmbedding
from tahq.quant import get_codec
from tahq.quant.codec import Codec


class CodecCut:
    """A cut of the model without a link: the codecs of both directions, as one differentiable function.

    The output is what a `Boundary` on the other side would have received, to the bit: decode(encode(x)) forward,
    decode(encode(g)) backward, in the dtype, shape and device of the input.

    Args:
        activations: codec of the forward direction; None: nothing is encoded.
        gradients: codec of the backward direction; None: nothing is encoded.
    """

    def __init__(self, activations: Codec | None, gradients: Codec | None) -> None:
        self._codecs = activations, gradients

    def __call__(self, x: torch.Tensor, *, forward_key: int, backward_key: int) -> torch.Tensor:
        """What the next stage receives of x; its gradient returns through the other codec.

        Args:
            x: [B, …, C] in fp32, bf16 or fp16, on any device.
            forward_key: key of the activation's codec; see `boundary.codec_key`.
            backward_key: key of the gradient's codec.

        Raises:
            CodecError: a codec refuses the tensor.
        """
        if self._codecs == (None, None):
            return x
        crossed: torch.Tensor = _Crossing.apply(  # type: ignore[no-untyped-call]
            x, self._codecs, (forward_key, backward_key)
        )
        return crossed


class _Crossing(torch.autograd.Function):
    """Forward through one codec, backward through the other."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, codecs: tuple[Codec | None, Codec | None], keys: tuple[int, int]
    ) -> torch.Tensor:
        """The tensor that arrives at the next stage."""
        ctx.codec, ctx.key = codecs[1], keys[1]
        return x.view_as(x) if codecs[0] is None else _decoded(codecs[0], x, keys[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradient that arrives back at the previous stage."""
        return gradient if ctx.codec is None else _decoded(ctx.codec, gradient, ctx.key), None, None


def _decoded(codec: Codec, x: torch.Tensor, key: int) -> torch.Tensor:
    """decode(encode(x)), without autograd."""
    return codec.decode(codec.encode(x.detach(), key=key), x.shape, x.dtype, key=key)


@dataclass(frozen=True, slots=True)
class Wire:
    """The codecs of both directions, as specs; None: nothing is encoded."""

    activations: str | None = None
    gradients: str | None = None

    def cut(self) -> CodecCut:
        """One cut with these codecs.

        Raises:
            ConfigError: an unknown codec or parameter, or a codec that remembers samples.
        """
        codecs = [get_codec(spec) if spec is not None else None for spec in (self.activations, self.gradients)]
        for codec in codecs:
            if codec is not None and codec.is_stateful:
                raise ConfigError(
                    f"{codec.spec.name} remembers what it sent of each sample, so its error shows only over epochs: a "
                    "probe cannot measure it; choose other codecs (--wire), or train with it and compare the loss"
                )
        return CodecCut(*codecs)


UNCOMPRESSED = Wire()


class CutModel:
    """All stages' slices in a row.

    Args:
        slices: of every stage in order, on one device, sharing one `RandomContext`.
        seed: the run's; codec keys are derived from it.
        bf16: compute under bf16 autocast.
    """

    def __init__(self, slices: Sequence[ModelSlice], *, seed: int, bf16: bool = False) -> None:
        self._slices = tuple(slices)
        self._seed = seed
        self._bf16 = bf16
        self.parameters = {name: p for part in slices for name, p in part.canonical_parameters().items()}
        self._device = next(iter(self.parameters.values())).device
        self.tied = self._tied_embedding()

    @property
    def num_cuts(self) -> int:
        """Number of cuts."""
        return len(self._slices) - 1

    @property
    def hidden_size(self) -> int:
        """C of the tensors at a cut."""
        return self._slices[0].spec.hidden_size

    def is_decayed(self, name: str, parameter: Parameter) -> bool:
        """Whether weight decay applies, as on every stage."""
        return self._slices[0].is_decayed(name, parameter)

    def groups(self) -> dict[str, dict[str, Parameter]]:
        """Parameters by place: `embedding`, `stage 0` …, `head`; of two tied copies only the first."""
        groups: dict[str, dict[str, Parameter]] = {}
        for stage, part in enumerate(self._slices):
            for name, parameter in part.canonical_parameters().items():
                if self.tied is None or parameter is not self.tied.uncounted:
                    group = _group(name, part.spec.layout, stage)
                    groups.setdefault(group, {})[name] = parameter
        return groups

    def compute_gradients(self, batch: StepBatch, step: int, wire: Wire = UNCOMPRESSED) -> float:
        """Forward and backward of every micro-batch; leaves the step's gradients in `parameters`.

        Args:
            batch: the step's samples.
            step: names the dropout masks and the codec keys.
            wire: the codecs at each cut.

        Returns:
            The mean loss in nats per token.

        Raises:
            CodecError: a codec refuses a tensor.
        """
        cut = wire.cut()
        losses, num_tokens = [], max(batch.num_tokens, 1)
        scale = gradient_scale(batch.tokens.numel())  # all tokens, as on the stages
        for parameter in self.parameters.values():
            parameter.grad = None
        for index in range(len(batch.sample_ids) // batch.micro_batch_size):
            tokens, labels = (tensor.to(self._device) for tensor in batch.micro_batch(index))
            loss = summed_cross_entropy(self._logits(tokens, step, index, cut), labels)
            (loss / (num_tokens / scale)).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        scale_gradients(self.parameters.values(), 1 / scale)
        if self.tied is not None:
            self.tied.exchange(step)
        return math.fsum(torch.stack(losses).tolist()) / num_tokens

    def _logits(self, tokens: torch.Tensor, step: int, micro_batch: int, cut: CodecCut) -> torch.Tensor:
        """[B, S, V] of tokens [B, S]."""
        x = tokens
        for stage, part in enumerate(self._slices):
            part.train()
            part.random.at(step, 0, micro_batch, int(Purpose.TRAIN))
            if stage > 0:
                forward_key, backward_key = self._keys(step, micro_batch, stage - 1)
                x = cut(x.float(), forward_key=forward_key, backward_key=backward_key)
            with torch.autocast(self._device.type, torch.bfloat16, enabled=self._bf16):
                x = part(x)
        return x

    def _keys(self, step: int, micro_batch: int, cut: int) -> list[int]:
        identity = CutIdentity(run=0, seed=self._seed, cut=cut)
        return [codec_key(identity.name(step, Purpose.TRAIN, micro_batch, d), self._seed) for d in Direction]

    def _tied_embedding(self) -> TiedEmbedding | None:
        spec = self._slices[0].spec
        if spec.tie != "sync":
            return None
        return TiedEmbedding(self.parameters[spec.layout.embedding_weight], self.parameters[HEAD_WEIGHT], None)


def _group(name: str, layout: FamilyLayout, stage: int) -> str:
    part = name.removeprefix(f"{layout.trunk}.").partition(".")[0]
    if part in (layout.embedding, layout.positions):
        return "embedding"
    return f"stage {stage}" if part == layout.blocks else "head"


def copied_gradients(parameters: Mapping[str, Parameter]) -> dict[str, torch.Tensor]:
    """An fp32 copy of every gradient; zeros where there is none."""
    return {
        name: torch.zeros_like(p, dtype=torch.float32) if p.grad is None else p.grad.to(torch.float32, copy=True)
        for name, p in parameters.items()
    }
