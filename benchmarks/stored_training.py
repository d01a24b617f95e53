"""Part of bench_agoq_loss.py: a `CutTraining` in which gradients are summed as AGoQ sums them over replicas.

REPLICAS pipelines take a part of the batch each; here they follow each other in one process, and their all-reduce is
computed where their gradients are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
from cut_training import CutTraining, split_name

from tahq.data.batches import StepBatch
from tahq.memory.small_floats.block_codes import dequantize_blocks, quantize_blocks
from tahq.pipeline.cut_model import CodecPair

REPLICAS = 4
METHODS = ("bf16", "A", "A, bits by stage", "4 bits everywhere", "A, bits by stage, O, G", "FP8 all-reduce")
"""Keys of OPTIONS that AGoQ is about."""
REDUCE: Mapping[str, Literal["blocks", "fp8"]] = {"A, bits by stage, O, G": "blocks", "FP8 all-reduce": "fp8"}
LARGEST = torch.finfo(torch.float8_e4m3fn).max


class ReplicaTraining(CutTraining):
    """A training by a method of REDUCE; the model is `<a key of MODELS>/<a key of REDUCE>`."""

    def __init__(self, model: str, *arguments: object, **options: object) -> None:
        super().__init__(model, *arguments, **options)  # type: ignore[arg-type]
        self._reduce = _in_blocks if REDUCE[split_name(model)[1]] == "blocks" else _in_fp8

    def compute_gradients(self, batch: StepBatch, step: int, codecs: Sequence[CodecPair]) -> float:
        losses, gradients = [], []
        for part in range(REPLICAS):
            losses.append(super().compute_gradients(_part(batch, part), step, codecs))
            parameters = self.model.parameters.values()
            gradients.append([parameter.grad.clone() for parameter in parameters])  # graphs reuse theirs
        reduce = torch.compile(self._reduce) if gradients[0][0].is_cuda else self._reduce
        for parameter, *each in zip(parameters, *gradients, strict=True):
            parameter.grad = reduce([gradient.flatten() for gradient in each]).view_as(parameter)
        return sum(losses) / REPLICAS


def _part(batch: StepBatch, number: int) -> StepBatch:
    rows = slice(number, None, REPLICAS)
    tokens, labels, ids = (each[rows].contiguous() for each in (batch.tokens, batch.labels, batch.sample_ids))
    num_tokens = batch.num_tokens // REPLICAS
    return replace(
        batch, tokens=tokens, labels=labels, sample_ids=ids, num_tokens=num_tokens, micro_batch_size=len(tokens)
    )


def _in_blocks(gradients: list[torch.Tensor]) -> torch.Tensor:
    """AGoQ §5: coded in blocks of 128 for the all-to-all, summed in fp32, divided once, and coded again."""
    total = sum(_rounded(gradient) for gradient in gradients)
    return _rounded(total / len(gradients))


def _rounded(x: torch.Tensor) -> torch.Tensor:
    return dequantize_blocks(quantize_blocks(x, 8, torch.float32), x.shape)


def _in_fp8(gradients: list[torch.Tensor]) -> torch.Tensor:
    """A ring that adds in E4M3, with one scale per tensor: partial sums are rounded, and saturate."""
    scale = (torch.stack([gradient.abs().max() for gradient in gradients]).max() / LARGEST).clamp(min=1e-30)
    total = torch.zeros_like(gradients[0])
    for gradient in gradients:
        total = (total + (gradient / scale).to(torch.float8_e4m3fn).float()).clamp(-LARGEST, LARGEST)
        total = total.to(torch.float8_e4m3fn).float()
    return total * scale / len(gradients)
