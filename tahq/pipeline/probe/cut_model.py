"""A whole model in one process, cut where a run cuts it, for asking what codecs do to its gradients.

Invariants:
- with a wire's codecs the gradients are those that the stages of a run with that wire would have, to the bit:
  same casts, same order of addition, same dropout masks, same codec keys;
- without, they are those of the wire `raw:dtype=fp32` in both directions;
- nobody here touches a weight.

Shapes: B samples a micro-batch, S tokens, C channels, V words.
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
from tahq.quant.raw.codec import DTYPES
from tahq.quant.spec import RawSpec
from tahq.quant.stateful_codec import StatefulCodec


class CodecCut:
    """A place where the model is cut: the codecs of both directions, as one differentiable function.

    A stateful codec (AQ-SGD) belongs to one cut and one direction, others may be shared.

    Args:
        activations: packs what goes forward; None leaves it as it is.
        gradients: packs what comes back; None leaves it as it is.
    """

    def __init__(self, activations: Codec | None, gradients: Codec | None) -> None:
        self._activations = activations
        self._gradients = gradients

    def __call__(
        self, x: torch.Tensor, *, forward_key: int, backward_key: int, sample_ids: Sequence[int] | None = None
    ) -> torch.Tensor:
        """What the next stage gets of x; its gradient comes back through the other codec.

        Args:
            x: [B, …, C] in fp32, bf16 or fp16, on any device.
            forward_key: key of the activation's codec; see `boundary.codec_key`.
            backward_key: key of the gradient's codec.
            sample_ids: of the B samples, for stateful codecs; None: nobody's, nothing is remembered.

        Returns:
            A tensor of x's shape, dtype and device; x itself if neither codec changes anything.

        Raises:
            CodecError: what a codec refuses.
        """
        if is_lossless(self._activations, x.dtype) and is_lossless(self._gradients, x.dtype):
            return x
        codecs, keys = (self._activations, self._gradients), (forward_key, backward_key)
        crossed: torch.Tensor = _Crossing.apply(x, codecs, keys, sample_ids)  # type: ignore[no-untyped-call]
        return crossed


class _Crossing(torch.autograd.Function):
    """Forward through one codec, backward through the other."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        codecs: tuple[Codec | None, Codec | None],
        keys: tuple[int, int],
        sample_ids: Sequence[int] | None,
    ) -> torch.Tensor:
        """What arrives at the next stage."""
        ctx.codec, ctx.key, ctx.sample_ids = codecs[1], keys[1], sample_ids
        arrived = transfer(codecs[0], x, keys[0], sample_ids)
        return x.view_as(x) if arrived is x else arrived

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """What arrives back at the stage before."""
        return transfer(ctx.codec, gradient, ctx.key, ctx.sample_ids), None, None, None


def transfer(codec: Codec | None, x: torch.Tensor, key: int, sample_ids: Sequence[int] | None = None) -> torch.Tensor:
    """decode(encode(x)), without autograd; x itself where that would change nothing.

    Args:
        codec: None changes nothing.
        x: [B, …, C] in fp32, bf16 or fp16.
        key: 64 bits; matters to randomised codecs.
        sample_ids: of the B samples; only stateful codecs see them.

    Raises:
        CodecError: what the codec refuses.
    """
    if codec is None or is_lossless(codec, x.dtype):
        return x
    if isinstance(codec, StatefulCodec):
        payload = codec.encode(x.detach(), key=key, sample_ids=sample_ids)
        return codec.decode(payload, x.shape, x.dtype, key=key, sample_ids=sample_ids)
    return codec.decode(codec.encode(x.detach(), key=key), x.shape, x.dtype, key=key)


def is_lossless(codec: Codec | None, dtype: torch.dtype) -> bool:
    """Whether every tensor of `dtype` (fp32, bf16 or fp16) comes back from the codec with the same bits."""
    if codec is None:
        return True
    return isinstance(codec.spec, RawSpec) and DTYPES[codec.spec.dtype] in (torch.float32, dtype)


@dataclass(frozen=True, slots=True)
class Wire:
    """The codecs of both directions, as specs in text; None: nothing is packed."""

    activations: str | None = None
    gradients: str | None = None

    def cut(self) -> CodecCut:
        """One cut with these codecs.

        Raises:
            ConfigError: an unknown codec or parameter, or a codec with state by sample, which shows what it
                does only over epochs.
        """
        codecs = [get_codec(spec) if spec is not None else None for spec in (self.activations, self.gradients)]
        for codec in codecs:
            if codec is not None and codec.is_stateful:
                raise ConfigError(
                    f"{codec.spec.name} keeps what it sent of each sample, so its error shows only over epochs: "
                    "a probe cannot measure it; give other codecs (--wire), or train with it and look at the loss"
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
        """Places where something crosses a wire."""
        return len(self._slices) - 1

    @property
    def hidden_size(self) -> int:
        """C of what crosses a cut."""
        return self._slices[0].spec.hidden_size

    def is_decayed(self, name: str, parameter: Parameter) -> bool:
        """Whether weight decay applies, as every stage says."""
        return self._slices[0].is_decayed(name, parameter)

    def groups(self) -> dict[str, dict[str, Parameter]]:
        """Parameters by where they are: `embedding`, `stage 0` …, `head`; of two tied copies only the first."""
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
            wire: what is done to what crosses a cut.

        Returns:
            The mean loss in nats a token.

        Raises:
            CodecError: what a codec refuses.
        """
        cut = wire.cut()
        losses, num_tokens = [], max(batch.num_tokens, 1)
        scale = gradient_scale(batch.tokens.numel())  # as the stages do, which do not all know what is labelled
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
        ways = (Direction.FORWARD, Direction.BACKWARD)
        return [codec_key(identity.name(step, Purpose.TRAIN, micro_batch, way), self._seed) for way in ways]

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
    """A copy in fp32 of every gradient; zeros where there is none."""
    return {
        name: torch.zeros_like(p, dtype=torch.float32) if p.grad is None else p.grad.to(torch.float32, copy=True)
        for name, p in parameters.items()
    }
