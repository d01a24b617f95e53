"""Part of bench_agoq_loss.py: `CutTraining` with AGoQ's stored activations, optimizer states and gradients.

REPLICAS pipelines take a part of the batch each; here they follow each other in one process, and their all-reduce is
computed where their gradients are.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from cut_training import PEAK_LR, CutTraining, Wire

from tahq.memory.adam.adamw import BlockwiseAdamW, adamw8bit_states
from tahq.memory.agoq.stored_inputs import store_inputs
from tahq.memory.config import AgoqConfig
from tahq.memory.small_floats.block_codes import dequantize_blocks, quantize_blocks
from tahq.models.model_spec import ModelSpec
from tahq.models.slice import ModelSlice

REPLICAS = 4
EVERYTHING = ("norms", "mlp", "attention")
LARGEST = torch.finfo(torch.float8_e4m3fn).max


@dataclass(frozen=True, slots=True)
class Method:
    """`bits` of stored activations by stage, None: as torch keeps them; `reduce`: how gradients are summed."""

    bits: tuple[int, ...] | None = None
    stored: tuple[str, ...] = ("norms", "mlp")
    small_states: bool = False
    reduce: Literal["fp32", "blocks", "fp8"] = "fp32"


METHODS: Mapping[str, Method] = {
    "bf16": Method(),
    "A": Method(bits=(4, 4, 4, 4)),
    "A, bits by stage": Method(bits=(4, 5, 8, 8)),  # 1F1B, strict
    "4 bits everywhere": Method(bits=(4, 4, 4, 4), stored=EVERYTHING),
    "A, bits by stage, O, G": Method(bits=(4, 5, 8, 8), small_states=True, reduce="blocks"),
    "FP8 all-reduce": Method(reduce="fp8"),
}


class StoredTraining(CutTraining):
    """A training by one of METHODS; the model is `<a key of MODELS>/<a key of METHODS>`."""

    def _build(self, spec: ModelSpec) -> list[ModelSlice]:
        self._recorded: RecordedStep | None = None
        self._method = METHODS[self.name.partition("/")[2]]
        slices = super()._build(spec)
        for part, bits in zip(slices, self._method.bits or (), strict=self._method.bits is not None):
            store_inputs(part, AgoqConfig(stored=self._method.stored), bits)
        return slices

    def _optimizer(self) -> torch.optim.Optimizer:
        if not self._method.small_states:
            return super()._optimizer()
        return BlockwiseAdamW(self._groups(), adamw8bit_states, lr=PEAK_LR, betas=(0.9, 0.95))

    def backward(self, tokens: torch.Tensor, labels: torch.Tensor, wire: Wire, seed: int, step: int) -> torch.Tensor:
        if self._method.reduce == "fp32":
            return super().backward(tokens, labels, wire, seed, step)
        if not self._is_cuda:
            return self._of_replicas(tokens, labels)
        # launching the kernels of four small batches would take longer than they do
        self._recorded = self._recorded or RecordedStep(self._of_replicas, tokens.to(self._device), self._parameters)
        return self._recorded(tokens, labels)

    def _of_replicas(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        losses, gradients = [], []
        for part in range(REPLICAS):
            losses.append(super().backward(tokens[part::REPLICAS], labels[part::REPLICAS], Wire(), 0, 0))
            gradients.append([parameter.grad for parameter in self._parameters])
            for parameter in self._parameters:
                parameter.grad = None
        reduce = _in_blocks if self._method.reduce == "blocks" else _in_fp8
        if self._is_cuda:
            reduce = torch.compile(reduce)
        for parameter, *each in zip(self._parameters, *gradients, strict=True):
            parameter.grad = reduce([gradient.flatten() for gradient in each]).view_as(parameter)
        return torch.stack(losses).mean()


class RecordedStep:
    """A CUDA graph of a function of tokens and labels that leaves gradients with the parameters and returns a loss."""

    def __init__(
        self,
        function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        like: torch.Tensor,
        parameters: list[torch.nn.Parameter],
    ) -> None:
        self._tokens, self._labels, self._parameters = like.clone(), like.clone(), parameters
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):  # compiles what it launches
            function(self._tokens, self._labels)
        torch.cuda.current_stream().wait_stream(beside)
        for parameter in parameters:
            parameter.grad = None
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._loss = function(self._tokens, self._labels)
        self._gradients = [parameter.grad for parameter in parameters]

    def __call__(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self._tokens.copy_(tokens)
        self._labels.copy_(labels)
        self._graph.replay()
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        return self._loss.clone()


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
