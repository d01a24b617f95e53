"""FP8 formats, tensors of COAT's activations, and linear layers in FP8: products, cached codes of weights, gradients.

`tahq.memory.fp8_products` uses the same products without COAT's activations.

Tensors are codes with scales for groups of 16 or a whole tensor. A product runs on FP8 matrix units
(`torch._scaled_mm`) where the device has them and the sizes are multiples of 16; elsewhere the same codes are
multiplied as floating-point numbers, with the same result except for the order of additions and, on CUDA, a rounding of
the unscaled sum to bf16.

A backward quantises the bf16 gradient of its output to E5M2 and multiplies in FP8, as the paper's times imply (Table 7:
a backward 1.71 times as fast) and its code does; `backward_products: bf16` multiplies that gradient unquantised.
Decision 19 compares the two. Gradients between layers and of weights are never FP8.

Source: COAT §5.2, appendices D, G.3 and G.5.
Letters: T tokens, C input channels, N output channels of a matrix.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from tahq.kernel_launch import has_triton
from tahq.memory.small_floats.block_codes import has_fp8_units
from tahq.models.deferred_gradients import DeferredGradients, accumulate, gradient_dtype

GROUP = 16  # Elements along the channels that share a scale in non-linear layers (COAT §5.2, appendix H)
E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
FP8_FORMATS = {"e4m3": E4M3, "e5m2": E5M2}  # By their name in cluster.yaml
LARGEST = {E4M3: 448.0, E5M2: 57344.0}  # Δmax of each format
FRACTION_BITS = {E4M3: 3, E5M2: 2}

Layouts = Literal["rows", "columns", "both"]
"""Layouts of a tensor's codes that are written: not transposed, transposed, or both."""


class GroupCodes(NamedTuple):
    """A tensor [T, C] in groups of 16 along its channels."""

    codes: torch.Tensor  # E4M3 [T, C]
    scales: torch.Tensor  # bf16 [T, ⌈C/16⌉]


class TensorCodes(NamedTuple):
    """A matrix [T, C] with one scale, in one or both layouts.

    `row_codes`: [T, C]; `column_codes`: [C, T], both contiguous; `scale`: fp32 [1], on their device.
    FP8 matrix units need both operands contiguous along the summed dimension, so a backward needs the transposed codes;
    where products are emulated, a view suffices.
    """

    row_codes: torch.Tensor | None
    column_codes: torch.Tensor | None
    scale: torch.Tensor

    @property
    def rows(self) -> torch.Tensor:
        """Codes [T, C]."""
        if self.row_codes is None:
            assert self.column_codes is not None
            return self.column_codes.t()
        return self.row_codes

    @property
    def columns(self) -> torch.Tensor:
        """Codes [C, T]."""
        return self.rows.t() if self.column_codes is None else self.column_codes

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """Values [T, C]."""
        return (self.rows.float() * self.scale).to(dtype)

    def for_weight_gradient(self) -> "TensorCodes":
        """Only the codes that the gradient of a weight needs."""
        return self if self.column_codes is None else TensorCodes(None, self.column_codes, self.scale)

    def transposed(self) -> "TensorCodes":
        """The codes of the transposed matrix."""
        return TensorCodes(self.column_codes, self.row_codes, self.scale)


class NormForward(NamedTuple):
    """The results of an RMSNorm's first pass."""

    total: torch.Tensor  # Its input, the sum of residual stream and branch, in the stream's dtype
    codes: GroupCodes  # The same in groups
    rstd: torch.Tensor  # fp32 [T], of the coded input
    maxima: torch.Tensor  # Maxima of the output's magnitudes, in no particular order


def kernels_for(device: torch.device) -> ModuleType:
    """`fp8_flow_triton` on CUDA with triton, else `fp8_flow_reference`, which documents the functions of both."""
    return _kernels_for(device.type)


@cache
def _kernels_for(device_type: str) -> ModuleType:
    kind = "triton" if device_type == "cuda" and has_triton() else "reference"
    return import_module(f"tahq.memory.coat.fp8_flow_{kind}")


def fits_fp8_units(device: torch.device, *sizes: int) -> bool:
    """Whether a product of these sizes runs on FP8 units."""
    return all(size % 16 == 0 for size in sizes) and has_fp8_units(device)


def product(
    a: torch.Tensor, b: torch.Tensor, scale: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype, *, fast: bool
) -> torch.Tensor:
    """a·bᵀ times both scales, fp32 [1]: [M, N] in bf16 or fp32 of FP8 codes [M, K] and [N, K].

    `fast`: may add in the matrix units' shorter accumulators; for forwards.
    """
    of_a, of_b = scale
    if a.is_contiguous() and b.is_contiguous() and fits_fp8_units(a.device, a.shape[0], a.shape[1], b.shape[0]):
        of_codes: torch.Tensor = torch._scaled_mm(
            a, b.t(), scale_a=of_a, scale_b=of_b, out_dtype=dtype, use_fast_accum=fast
        )
        return of_codes
    # All codes are bf16 numbers. A CPU multiplies fp32 as fast, with one rounding less.
    wide = torch.float32 if a.device.type == "cpu" else torch.bfloat16
    with torch.autocast(a.device.type, enabled=False):
        return (a.to(wide).mm(b.to(wide).t()).float() * (of_a * of_b)).to(dtype)


class WeightCodes:
    """The codes of one linear layer's weight [N, C], recomputed when the weight has changed.

    The layer is `nn.Linear`, or transformers' Conv1D, whose parameter is the transposed matrix, [C, N].

    Weights change at COMMIT only, between steps; all micro-batches of a step share the codes. A change is recognised by
    `forget`, called when a stage begins a step or an evaluation, and by the tensor's version.

    `keep`: keep the codes, two bytes per parameter on devices with FP8 units and one elsewhere; else only their scale,
    and code the weight for every product.
    """

    def __init__(self, linear: Any, *, keep: bool) -> None:
        self.linear, self._keep = linear, keep
        self.is_transposed = not isinstance(linear, nn.Linear)
        self._version = -1
        self._scale: torch.Tensor | None = None
        self._codes: TensorCodes | None = None

    def forget(self) -> None:
        """Drop the codes, because the weight may have changed."""
        self._scale = self._codes = None

    @property
    def nbytes(self) -> int:
        """Bytes of kept codes and scale."""
        codes = self._codes
        kept = [] if codes is None else [codes.row_codes, codes.column_codes]
        return sum(each.nbytes for each in (*kept, self._scale) if each is not None)

    @torch.no_grad()
    def codes(self, *, for_gradient: bool) -> TensorCodes:
        """Codes for the forward, or for the gradient of the input."""
        weight = self.linear.weight
        if self._version != weight._version:
            self.forget()
            self._version = weight._version
        if self._codes is not None:
            return self._codes
        kernels = kernels_for(weight.device)
        if self._scale is None:
            self._scale = kernels.tensor_scale(kernels.group_maxima(weight), E4M3)
        needs_columns = fits_fp8_units(weight.device, *weight.shape)
        layouts: Layouts = "rows"
        if needs_columns:
            layouts = "both" if self._keep else "columns" if for_gradient != self.is_transposed else "rows"
        codes: TensorCodes = kernels.quantize_tensor(weight, self._scale, E4M3, layouts)
        if self.is_transposed:
            codes = codes.transposed()
        self._codes = codes if self._keep else None
        return codes


def linear_forward(x: TensorCodes, weight: WeightCodes, dtype: torch.dtype, *, fast: bool = True) -> torch.Tensor:
    """x·Wᵀ + b: [T, N] of x [T, C]; `fast` as of `product`."""
    codes = weight.codes(for_gradient=False)
    y = product(x.rows, codes.rows, (x.scale, codes.scale), dtype, fast=fast)
    bias = weight.linear.bias
    return y if bias is None else y.add_(bias.detach().to(dtype))


def tensor_codes(x: torch.Tensor, fp8: torch.dtype, layouts: Layouts, scale: torch.Tensor | None = None) -> TensorCodes:
    """x [T, C] with one scale: s = max|x|/Δmax, computed unless it is given, and codes round(x/s)."""
    kernels = kernels_for(x.device)
    if scale is None:
        scale = kernels.tensor_scale(kernels.group_maxima(x), fp8)
    codes: TensorCodes = kernels.quantize_tensor(x, scale, fp8, layouts)
    return codes


def keep_maxima(x: torch.Tensor, maxima: torch.Tensor) -> None:
    """Let a tensor carry the largest magnitudes of its parts, as `tensor_scale` takes them."""
    x.maxima = maxima, x._version  # type: ignore[attr-defined]


def kept_scale(x: torch.Tensor, fp8: torch.dtype) -> torch.Tensor | None:
    """The scale of a tensor by the maxima that it carries; None: it has none, or has been changed."""
    maxima, version = getattr(x, "maxima", (None, None))
    if maxima is None or version != x._version:
        return None
    scale: torch.Tensor = kernels_for(x.device).tensor_scale(maxima, fp8)
    return scale


def matrix(x: torch.Tensor) -> torch.Tensor:
    """[…, C] as contiguous [T, C]."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def layouts_for(x: torch.Tensor) -> Layouts:
    """The layouts that products need for a tensor as large as x [T, C]: FP8 units need its transposed codes too."""
    return "both" if fits_fp8_units(x.device, *x.shape) else "rows"


def weight_gradient_layout(x: torch.Tensor) -> Layouts:
    """The layout that only the gradient of a weight needs for its input x [T, C]."""
    return "columns" if layouts_for(x) == "both" else "rows"


@dataclass(frozen=True, slots=True)
class OutputGradient:
    """The gradient of a linear layer's output [T, N], in the form that its two products need.

    `plain`: in the dtype that is computed in; `codes`: in FP8, instead; `of_bias`: Σ_T ∂y, fp32 [N], of the gradient
    itself, where there is a bias.
    """

    plain: torch.Tensor | None
    codes: TensorCodes | None
    of_bias: torch.Tensor | None = None

    @classmethod
    def of(cls, gradient: torch.Tensor, weight: WeightCodes, dtype: torch.dtype, products: str) -> "OutputGradient":
        """Prepare a gradient […, N] of any dtype for `products`, as `backward_products`, or products in `dtype`."""
        fp8, rows = FP8_FORMATS.get(products), matrix(gradient)
        of_bias = None if weight.linear.bias is None else rows.sum(0, dtype=torch.float32)
        if fp8 is None:
            return cls(rows.to(dtype), None, of_bias)
        return cls(None, tensor_codes(rows, fp8, layouts_for(rows), kept_scale(gradient, fp8)), of_bias)

    def of_input(self, weight: WeightCodes, dtype: torch.dtype) -> torch.Tensor:
        """∂x = ∂y·W: [T, C]."""
        codes = weight.codes(for_gradient=True)
        if self.codes is None:
            assert self.plain is not None
            return self.plain.mm(codes.dequantized(self.plain.dtype))
        return product(self.codes.rows, codes.columns, (self.codes.scale, codes.scale), dtype, fast=False)

    def of_weight(self, x: TensorCodes, weight: WeightCodes) -> torch.Tensor:
        """∂W = ∂yᵀ·x: [N, C], or as the layer's parameter lies, in its gradient's dtype."""
        dtype = gradient_dtype(weight.linear.weight)
        if self.codes is None:
            assert self.plain is not None
            return self.plain.t().mm(x.dequantized(self.plain.dtype)).to(dtype)
        factors = (x, self.codes) if weight.is_transposed else (self.codes, x)
        left, right = (each.columns for each in factors)
        return product(left, right, (self.codes.scale, x.scale), dtype, fast=False)

    def add_weight_gradients(
        self, weight: WeightCodes, x: Callable[[], TensorCodes], deferred: DeferredGradients | None
    ) -> None:
        """Add to the gradients of a linear layer: its bias now, its weight now or when the deferred part runs.

        `x`: gives the layer's input.
        """
        linear, codes = weight.linear, self.codes
        if self.of_bias is not None and linear.bias.requires_grad:
            accumulate(linear.bias, self.of_bias)
        kept = OutputGradient(self.plain, None if codes is None else codes.for_weight_gradient())

        def add() -> None:
            if linear.weight.requires_grad:
                accumulate(linear.weight, kept.of_weight(x(), weight))

        if deferred is None:
            add()
        else:
            deferred.add(add)
