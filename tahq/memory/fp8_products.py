"""Matrix products of a slice's blocks in FP8: `training.precision: fp8`, LLMQ's mixed training in BF16 and FP8.

    s = max|x|/Δmax,   y = (round(x/s_x) · round(W/s_w)ᵀ)·s_x·s_w + b

with one scale per tensor, computed just in time, so that nothing is clipped. Both products of the backward take the
gradient of y in E4M3 or E5M2; everything else is E4M3. Products add in fp32. NaN or infinity in a tensor makes its
scale, and so the whole product, NaN. Norms, activations, attention, embedding and head are those of bf16, and so are
tensors between layers; gradients of weights are fp32.

On CUDA the kernels of norms and activations find the maxima of what they write, outputs and the gradients of an
activation's inputs; of other tensors a kernel of its own does.

For the backward a product keeps its input's codes, one byte per element, which all products of one input share. Not
attention's output: attention keeps it anyway, so its codes are made again with the scale of the forward. Inputs that
are recomputed (`kept`) are coded again too, and have the same codes where they have the same bits.

Codes, kernels and products are COAT's (`coat/fp8_codes.py`), which says when FP8 units compute them. Weights are coded
once per step; outside of `sharing_weight_copies`, as where blocks are recomputed, anew for every product.

Source: LLMQ §3.
Letters: T tokens, C input channels, N output channels of a matrix.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from tahq.errors import ConfigError
from tahq.memory.agoq.stored_inputs import output_projection
from tahq.memory.coat.fp8_codes import (
    E4M3,
    Layouts,
    OutputGradient,
    TensorCodes,
    WeightCodes,
    kept_scale,
    layouts_for,
    linear_forward,
    matrix,
    tensor_codes,
    weight_gradient_layout,
)
from tahq.memory.config import Fp8Config
from tahq.memory.small_floats.block_codes import has_fp8_units
from tahq.models.deferred_gradients import (
    DeferredGradients,
    Recomputation,
    current_deferral,
    is_linear,
    product_dtype,
    recomputed_input,
    shared_copies,
)
from tahq.models.slice import ModelSlice


def check_fp8_units(device: torch.device) -> None:
    """Raise ConfigError for a GPU without FP8 units; a CPU emulates them."""
    if device.type != "cpu" and not has_fp8_units(device):
        raise ConfigError(
            f"training.precision: fp8 needs an NVIDIA GPU of compute capability 8.9 or newer, which {device} is not; "
            "use training.precision: bf16"
        )


def use_fp8_products(module: ModelSlice, config: Fp8Config) -> None:
    """Compute the products with weights in a slice's blocks in FP8; call it after what changes layers otherwise."""
    for block in module.blocks():
        attention = next(child for child in block.children() if type(child).__name__.endswith("Attention"))
        for layer in block.children():  # norms and the MLP
            layer.gives_maxima = True  # type: ignore[assignment]
        for layer in filter(is_linear, block.modules()):
            keeps_input = layer is output_projection(attention)
            layer.forward = partial(_forward, layer, config.backward, keeps_input)


def _forward(layer: Any, backward: str, keeps_input: bool, x: torch.Tensor) -> torch.Tensor:
    """[…, C] to […, N]; `keeps_input`: x is kept anyway."""
    weight, dtype = _weight_codes(layer), product_dtype(x)
    if not torch.is_grad_enabled():
        return linear_forward(_input_codes(x, _rows), weight, dtype, fast=False).view(*x.shape[:-1], -1)
    kept, tensors, again, is_exact = recomputed_input(x), [], None, True
    if kept is not None:
        tensors, again, is_exact = [*kept.tensors], kept.expect(), kept.is_exact
    elif keeps_input:
        tensors, again = [x.detach()], _AsKept()
    codes = _input_codes(x, layouts_for if again is None else _rows)
    call = _Call(weight, dtype, backward, current_deferral(), again, is_exact)
    output: torch.Tensor = _Fp8Product.apply(x, layer.weight, codes, call, *tensors)  # type: ignore[no-untyped-call]
    return output


def _weight_codes(layer: Any) -> WeightCodes:
    copies = shared_copies()
    if copies is None:
        return WeightCodes(layer, keep=False)
    key = layer.weight, E4M3
    if key not in copies:
        copies[key] = WeightCodes(layer, keep=True)
    codes: WeightCodes = copies[key]
    return codes


@torch.no_grad()
def _input_codes(
    x: torch.Tensor, layouts: Callable[[torch.Tensor], Layouts], scale: torch.Tensor | None = None
) -> TensorCodes:
    """Codes of x […, C] as a matrix [T, C], made once for all products that take this tensor."""
    codes: TensorCodes | None = getattr(x, "fp8_codes", None)
    if codes is None:
        rows = matrix(x)
        scale = kept_scale(x, E4M3) if scale is None else scale
        codes = x.fp8_codes = tensor_codes(rows, E4M3, layouts(rows), scale)  # type: ignore[attr-defined]
    return codes


def _rows(x: torch.Tensor) -> Layouts:
    return "rows"


class _AsKept:
    """A `Recomputation` of an input that is kept unchanged."""

    def rows(self, tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """The input."""
        return tensors[0]


@dataclass(frozen=True, slots=True)
class _Call:
    """One product.

    `backward`: the format of the output's gradient; `again`: gives the backward the input, with the same bits if
    `is_exact`; None: the input's codes are kept.
    """

    weight: WeightCodes
    dtype: torch.dtype
    backward: str
    deferred: DeferredGradients | None
    again: Recomputation | None
    is_exact: bool


class _Fp8Product(torch.autograd.Function):
    """Of an input and a weight, whose gradient is added to it; `tensors`: what the input is recomputed from."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, codes: TensorCodes, call: _Call, *tensors: torch.Tensor
    ) -> torch.Tensor:
        ctx.call, ctx.shape, ctx.dtype, ctx.num_kept = call, x.shape, x.dtype, len(tensors)
        ctx.save_for_backward(*(codes.for_weight_gradient() if call.again is None else (codes.scale, *tensors)))
        return linear_forward(codes, call.weight, call.dtype, fast=False).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call, saved, dtype = ctx.call, ctx.saved_tensors, ctx.dtype
        gradient = OutputGradient.of(gradients[0], call.weight, call.dtype, call.backward)
        again, is_exact = call.again, call.is_exact  # `x` must not refer to `deferred`, which will hold it

        def x() -> TensorCodes:
            if again is None:
                return TensorCodes(*saved)
            scale, *tensors = saved
            return _input_codes(again.rows(tensors, dtype), weight_gradient_layout, scale if is_exact else None)

        of_input = None
        if ctx.needs_input_grad[0]:
            of_input = gradient.of_input(call.weight, call.dtype).view(ctx.shape).to(dtype)
        gradient.add_weight_gradients(call.weight, x, call.deferred)
        return of_input, None, None, None, *[None] * ctx.num_kept
