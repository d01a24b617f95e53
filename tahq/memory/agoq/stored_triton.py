"""Norms and activations that keep codes of their inputs, on CUDA: one kernel each forward, recomputation and backward.

Without bits they keep the inputs themselves. Codes are those of `quantize_blocks`, bit for bit. Outputs and gradients
are computed in fp32 and rounded once, where torch's layers may round between: within a few units of the last place of
those. Where products in FP8 take them, their largest magnitudes come with them (`fp8_codes.keep_maxima`).
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import nn
from triton import next_power_of_2

from tahq.kernel_launch import launch
from tahq.memory.agoq import stored_kernels as kernels
from tahq.memory.coat.fp8_codes import keep_maxima
from tahq.memory.small_floats.block_codes import BLOCK, FORMATS, BlockCodes, has_fp8_units

_BLOCKS = 8  # Blocks per program of an activation: 1024 numbers of each tensor
_BACKWARD_ELEMENTS = 1 << 20
"""Partial sums of a norm's parameters' gradients; fixed, so that every device adds in the same order."""
_FORWARD_PER_WARP, _BACKWARD_PER_WARP = 1024, 256
"""Channels of a norm per warp; the fastest of 256, 512 and 1024 on an H100 at 4,096 channels, by hand."""
_EXACT = {"enable_fp_fusion": False}
"""A fused multiply-add rounds once where codes need two roundings, and where an output is computed twice."""


def quantize(x: torch.Tensor, bits: int) -> BlockCodes:
    """See `quantize_blocks`; scales in bf16."""
    values, coded = x.detach().contiguous(), _empty(x, bits)
    _launch_blocks(kernels.quantize_kernel, values.numel(), bits, values, *_bits(coded), **_largest(bits), **_EXACT)
    return coded


def dequantize(coded: BlockCodes, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """See `dequantize_blocks`."""
    y = torch.empty(shape, dtype=dtype, device=coded.codes.device)
    _launch_blocks(kernels.dequantize_kernel, y.numel(), coded.bits, *_bits(coded), y)
    return y


def accumulated(gradient: torch.Tensor, past: BlockCodes | None) -> BlockCodes:
    """E4M3 codes with fp32 scales of a gradient added to `past`, in whose place they are written."""
    values = gradient.detach().contiguous()
    coded = past or BlockCodes(_empty(values, 8).codes, torch.empty(-(-values.numel() // BLOCK), device=values.device))
    launch(
        kernels.accumulate_kernel, _num_runs(values.numel()),
        values, *coded, *coded, values.numel(), HAS_PAST=past is not None, NATIVE=_is_native(values, 8),
        **_runs(values.numel()), **_EXACT,
    )  # fmt: skip
    return coded


class StoredNorm:
    """An RMSNorm of transformers or a LayerNorm, of one input [..., C]; `dtype`: of the output.

    With bits C is a multiple of 128.
    """

    def __init__(self, layer: Any, bits: int | None, x: torch.Tensor, dtype: torch.dtype) -> None:
        self.is_exact = bits is None
        self._bits, self._like, self._dtype = bits, torch.empty_like(x, device="meta"), dtype
        self._weight, self._bias = layer.weight, getattr(layer, "bias", None)
        self._is_centred = isinstance(layer, nn.LayerNorm)
        self._epsilon = layer.eps if self._is_centred else layer.variance_epsilon
        self._gives_maxima = getattr(layer, "gives_maxima", False)
        self.parameters = tuple(each for each in (self._weight, self._bias) if each is not None)

    def run(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Output; codes and scales, or the input."""
        values = x.detach().contiguous()
        kept = _new_kept(values, self._bits)
        return self._normed(values, kept), kept

    def run_on_sum(self, x: torch.Tensor, addend: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of x + addend, and that sum in the dtype of x; without bits."""
        total = torch.empty_like(x, memory_format=torch.contiguous_format)
        return self._normed(x.detach().contiguous(), [total], addend.detach().contiguous()), total

    def _normed(
        self, values: torch.Tensor, kept: Sequence[torch.Tensor], addend: torch.Tensor | None = None
    ) -> torch.Tensor:
        y = torch.empty(values.shape, dtype=self._dtype, device=values.device)
        inputs = (values, values if addend is None else addend, *self._parameters())
        options = {"MAXIMA": self._gives_maxima, "ADDS": addend is not None, **_largest(self._bits), **_EXACT}
        maxima = _new_maxima(y, self._tokens, self._gives_maxima)
        self._launch(kernels.norm_forward_kernel, self._tokens, *inputs, y, *_pair(kept), maxima, **options)
        return y

    def output(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Of the decoded input; of the input itself by the forward's kernel, and so with its bits."""
        if self.is_exact:
            return self.run(*tensors)[0]
        y = torch.empty(self._like.shape, dtype=self._dtype, device=tensors[0].device)
        self._launch(kernels.norm_output_kernel, self._tokens, *_pair(tensors), *self._parameters(), y, **_EXACT)
        return y

    def gradients(
        self,
        tensors: Sequence[torch.Tensor],
        gradient: torch.Tensor,
        needed: Sequence[bool],
        past: torch.Tensor | None = None,
    ) -> list[torch.Tensor | None]:
        """Of the input and the parameters, at the decoded input.

        `past`: another part of the input's gradient, which is added; the sum carries a copy in the output's dtype.
        """
        channels, device = self._like.shape[-1], gradient.device
        of_input = torch.empty(self._like.shape, dtype=self._like.dtype, device=device)
        narrowed, narrows = of_input, past is not None and self._dtype != self._like.dtype
        if narrows:
            narrowed = torch.empty(self._like.shape, dtype=self._dtype, device=device)
            of_input.narrowed = narrowed, of_input._version  # type: ignore[attr-defined]
        num_programs = min(self._tokens, max(256, _BACKWARD_ELEMENTS // next_power_of_2(channels)))
        parts = torch.empty(len(self.parameters), num_programs, channels, device=device)
        self._launch(
            kernels.norm_backward_kernel, num_programs,
            gradient.contiguous(), of_input if past is None else past.contiguous(), *_pair(tensors), self._weight,
            of_input, narrowed, parts[0], parts[-1], self._tokens,
            ADDS=past is not None, NARROWS=narrows, per_warp=_BACKWARD_PER_WARP, **_EXACT,
        )  # fmt: skip
        of_parameters = (total.to(each.dtype) for total, each in zip(parts.sum(1), self.parameters, strict=True))
        return [each if is_needed else None for each, is_needed in zip((of_input, *of_parameters), needed, strict=True)]

    @cached_property
    def _tokens(self) -> int:
        return self._like.numel() // self._like.shape[-1]

    def _parameters(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._weight, self._weight if self._bias is None else self._bias

    def _launch(
        self, kernel: Any, programs: int, *arguments: Any, per_warp: int = _FORWARD_PER_WARP, **options: Any
    ) -> None:
        channels = self._like.shape[-1]
        block = next_power_of_2(-(-channels // BLOCK))
        launch(
            kernel, programs, *arguments, channels, self._epsilon,
            CENTRED=self._is_centred, HAS_BIAS=self._bias is not None, BITS=self._bits or 0,
            NATIVE=_is_native(arguments[0], self._bits), K=block,
            num_warps=min(16, max(1, block * BLOCK // per_warp)), **options,
        )  # fmt: skip


class StoredActivation:
    """SiLU(x)·up of two inputs, or GELU by tanh of one; the output has the dtype of x."""

    parameters: tuple[nn.Parameter, ...] = ()

    def __init__(self, bits: int | None, *inputs: torch.Tensor, gives_maxima: bool = False) -> None:
        self.is_exact, self._gives_maxima = bits is None, gives_maxima
        self._bits, self._like = bits, [torch.empty_like(x, device="meta") for x in inputs]

    def run(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Output; codes and scales, or the inputs."""
        values = [x.detach().contiguous() for x in inputs]
        kept = [tensor for x in values for tensor in _new_kept(x, self._bits)]
        y, options = torch.empty_like(values[0]), {"MAXIMA": self._gives_maxima, **_largest(self._bits), **_EXACT}
        arguments = (values[0], values[-1], y, *self._pairs(kept), self._new_maxima(y))
        self._launch(kernels.activation_forward_kernel, *arguments, **options)
        return y, kept

    def output(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Of the decoded inputs; of the inputs themselves by the forward's kernel, and so with its bits."""
        if self.is_exact:
            return self.run(*tensors)[0]
        y = torch.empty(self._like[0].shape, dtype=self._like[0].dtype, device=tensors[0].device)
        self._launch(kernels.activation_output_kernel, *self._pairs(tensors), y, **_EXACT)
        return y

    def gradients(
        self, tensors: Sequence[torch.Tensor], gradient: torch.Tensor, needed: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        """Of the inputs, at the decoded inputs."""
        found = [torch.empty(like.shape, dtype=like.dtype, device=gradient.device) for like in self._like]
        maxima = [self._new_maxima(each) for each in found]
        arguments = (gradient.contiguous(), *self._pairs(tensors), found[0], found[-1], maxima[0], maxima[-1])
        self._launch(kernels.activation_backward_kernel, *arguments, MAXIMA=self._gives_maxima)
        return [each if is_needed else None for each, is_needed in zip(found, needed, strict=True)]

    def _new_maxima(self, x: torch.Tensor) -> torch.Tensor:
        return _new_maxima(x, _num_runs(x.numel()), self._gives_maxima)

    def _pairs(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The first input's `_pair` and the last one's."""
        num = len(tensors) // len(self._like)
        return (*_pair(tensors[:num]), *_pair(tensors[-num:]))

    def _launch(self, kernel: Any, *arguments: torch.Tensor, **options: Any) -> None:
        _launch_blocks(kernel, self._like[0].numel(), self._bits, *arguments, GATED=len(self._like) == 2, **options)


def _launch_blocks(kernel: Any, numel: int, bits: int | None, *arguments: torch.Tensor, **options: Any) -> None:
    keys = {"BITS": bits or 0, "NATIVE": _is_native(arguments[0], bits), **_runs(numel), **options}
    launch(kernel, _num_runs(numel), *arguments, numel, **keys)


def _num_runs(numel: int) -> int:
    """Programs for so many numbers."""
    return -(-numel // (BLOCK * _BLOCKS))


def _runs(numel: int) -> dict[str, Any]:
    return {"EVEN": numel % BLOCK == 0, "R": _BLOCKS, "num_warps": 2}


def _largest(bits: int | None) -> dict[str, Any]:
    return {"LARGEST": 0.0 if bits is None else FORMATS[bits].largest}


def _is_native(like: torch.Tensor, bits: int | None) -> bool:
    return bits == 8 and has_fp8_units(like.device)


def _empty(x: torch.Tensor, bits: int) -> BlockCodes:
    blocks = -(-x.numel() // BLOCK)
    codes = torch.empty(blocks, FORMATS[bits].block_nbytes, dtype=torch.uint8, device=x.device)
    return BlockCodes(codes, torch.empty(blocks, dtype=torch.bfloat16, device=x.device))


def _bits(coded: BlockCodes) -> tuple[torch.Tensor, torch.Tensor]:
    return coded.codes, coded.scales.view(torch.int16)


def _new_kept(x: torch.Tensor, bits: int | None) -> list[torch.Tensor]:
    """Codes and scales to be written; without bits the input itself."""
    return [x] if bits is None else [*_empty(x, bits)]


def _new_maxima(x: torch.Tensor, programs: int, is_wanted: bool) -> torch.Tensor:
    """Where programs write the largest magnitudes of x, which keeps them; if they are not wanted, any tensor."""
    if not is_wanted:
        return x
    maxima = torch.empty(programs, dtype=torch.int32, device=x.device)
    keep_maxima(x, maxima)
    return maxima


def _pair(kept: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales as kernels take them; the input itself stands for both."""
    return (kept[0], kept[0]) if len(kept) == 1 else _bits(BlockCodes(*kept))
