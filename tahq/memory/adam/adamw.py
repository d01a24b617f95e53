"""AdamW with moments in 8 bits, bf16 or fp32.

*8 bits*, 2.03 bytes per parameter instead of 8 (Dettmers et al. 2022): a step reads codes and scales, computes in fp32,
moves the weight by the moments *before* they are rounded again, and stores them: m with the signed map, v with the
unsigned one (`blockwise8`). Blocks lie within one parameter, and rounding is to nearest, so a step is a function of
weight, states, gradient and step. Parameters with fewer elements than `min_elements` keep fp32 moments, as in other
8-bit optimizers: norms and biases, together a thousandth of a model.

*bf16*, 4 bytes per parameter: torch's AdamW keeps moments in the dtype of the weights, which are fp32 in tahq, so bf16
moments need their own step (decision 0021). A second moment in bf16 only changes where (1 − β₂)·|g² − v| is above half
of its last place, v·2⁻⁹ to v·2⁻⁸: with β₂ = 0.95, the default, wherever g² differs from v by more than 8 %; with 0.999
it never falls, since even without a gradient it should lose 0.1 % per step.

*fp32*: torch's AdamW for CUDA, where torch's own takes ten kernels per parameter, or treats a stage's parameters as one
list (see `pipeline/update/optimizer.py`).

On CUDA with Triton one kernel per parameter does a step (`kernels`): codes, scales and moments are bit-equal to plain
torch, weights within 2⁻²⁰ of a step's change.
"""

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.nn import Parameter

from tahq.memory.adam.blockwise8 import BLOCK, decode, encode, num_blocks, zero_codes
from tahq.memory.adam.loop import AdamwLoop, State, StateSpec, StateSpecs, has_ptx
from tahq.memory.adam.step import AdamwNumbers, adamw_slice, adamw_step, slices
from tahq.memory.config import MIN_ELEMENTS
from tahq.quant.backends import interprets_triton

if TYPE_CHECKING:  # needs triton
    from tahq.quant.gpu.launch import BoundLaunches

_ALIGNMENT = 16
_TYPES = (torch.float32, torch.bfloat16, torch.uint8)


class AdamW8bit(AdamwLoop):
    """AdamW with 8-bit moments.

    Args:
        params: groups, or parameters.
        block: elements that share a scale, a power of two from 64 to 2048.
        min_elements: parameters with fewer keep fp32 moments.
        others: `lr`, `betas`, `eps`, `weight_decay` of torch's AdamW.
    """

    def __init__(self, params: Any, *, block: int = BLOCK, min_elements: int = MIN_ELEMENTS, **others: Any) -> None:
        self._block, self._min_elements = block, min_elements
        super().__init__(params, **others)

    def _moments(self, parameter: Parameter) -> State:
        moments = {}
        for name, spec in adamw8bit_states(tuple(parameter.shape), self._block, self._min_elements).items():
            if spec.is_counter:
                continue
            if spec.dtype == torch.uint8:
                moments[name] = zero_codes(spec.shape, name == "exp_avg", parameter.device)
            else:
                moments[name] = torch.zeros(spec.shape, dtype=torch.float32, device=parameter.device)
        return moments

    def _bind(self, weight: torch.Tensor, gradient: torch.Tensor, state: State) -> "BoundLaunches | None":
        return bind_kernels(weight, gradient, state, self._block)

    def _advance(self, weight: torch.Tensor, gradient: torch.Tensor, state: State, numbers: AdamwNumbers) -> None:
        step_in_torch(weight, gradient, state, numbers, self._block)


class PlainAdamW(AdamwLoop):
    """AdamW with moments in bf16 or fp32.

    Args:
        params: groups, or parameters.
        moments: their dtype.
        others: `lr`, `betas`, `eps`, `weight_decay` of torch's AdamW.
    """

    def __init__(self, params: Any, *, moments: torch.dtype, **others: Any) -> None:
        self._dtype = moments
        super().__init__(params, **others)

    def _moments(self, parameter: Parameter) -> State:
        shape, device = parameter.shape, parameter.device
        return {name: torch.zeros(shape, dtype=self._dtype, device=device) for name in ("exp_avg", "exp_avg_sq")}

    def _bind(self, weight: torch.Tensor, gradient: torch.Tensor, state: State) -> "BoundLaunches | None":
        return bind_kernels(weight, gradient, state)

    def _advance(self, weight: torch.Tensor, gradient: torch.Tensor, state: State, numbers: AdamwNumbers) -> None:
        step_in_torch(weight, gradient, state, numbers)


def adamw8bit_states(shape: tuple[int, ...], block: int = BLOCK, min_elements: int = MIN_ELEMENTS) -> StateSpecs:
    """The state of a parameter of this shape, with 8-bit moments unless it is small."""
    if torch.Size(shape).numel() < min_elements:
        return plain_adamw_states(shape, torch.float32)
    specs = {"step": StateSpec((), torch.float32, is_counter=True)}
    for name in ("exp_avg", "exp_avg_sq"):
        specs[name] = StateSpec(shape, torch.uint8)
        specs[f"{name}_scale"] = StateSpec((num_blocks(shape, block),), torch.float32)
    return specs


def plain_adamw_states(shape: tuple[int, ...], dtype: torch.dtype) -> StateSpecs:
    """The state of a parameter of this shape, with moments of this dtype; in fp32 that of torch's AdamW."""
    moments = {name: StateSpec(shape, dtype) for name in ("exp_avg", "exp_avg_sq")}
    return {"step": StateSpec((), torch.float32, is_counter=True)} | moments


def bind_kernels(
    weight: torch.Tensor, gradient: torch.Tensor, state: State, block: int = BLOCK
) -> "BoundLaunches | None":
    """Kernels for a step on flat tensors [N] and a state; None where `step_in_torch` has to do it."""
    m, v = state["exp_avg"].view(-1), state["exp_avg_sq"].view(-1)
    tensors = (weight, gradient, m, v)
    is_suited = all(each.data_ptr() % _ALIGNMENT == 0 and each.dtype in _TYPES for each in tensors)
    if not (_has_kernels(weight.device.type) and weight.numel() > 0 and is_suited):
        return None
    kernels = import_module("tahq.memory.adam.kernels")
    if m.dtype != torch.uint8:
        return cast("BoundLaunches", kernels.bind_plain_adamw(*tensors))
    return cast(
        "BoundLaunches", kernels.bind_adamw8bit(*tensors, state["exp_avg_scale"], state["exp_avg_sq_scale"], block)
    )


@cache
def _has_kernels(device_type: str) -> bool:
    return interprets_triton() if device_type == "cpu" else has_ptx(device_type)


def step_in_torch(
    weight: torch.Tensor, gradient: torch.Tensor, state: State, numbers: AdamwNumbers, block: int = BLOCK
) -> None:
    """One step in plain torch, in place, on flat tensors [N] and a state."""
    m, v = state["exp_avg"].view(-1), state["exp_avg_sq"].view(-1)
    if m.dtype == torch.uint8:
        adamw8bit_step(weight, gradient, m, v, state["exp_avg_scale"], state["exp_avg_sq_scale"], numbers, block)
    else:
        adamw_step(weight, gradient, m, v, numbers)


def adamw8bit_step(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    m_codes: torch.Tensor,
    v_codes: torch.Tensor,
    m_scales: torch.Tensor,
    v_scales: torch.Tensor,
    numbers: AdamwNumbers,
    block: int = BLOCK,
) -> None:
    """One step in plain torch, in place, slice by slice.

    Args:
        weight, gradient: fp32 or bf16 [N].
        m_codes, v_codes: uint8 [N].
        m_scales, v_scales: fp32 [⌈N/block⌉].
        numbers: of this step.
        block: elements that share a scale.
    """
    for here in slices(weight.numel()):
        blocks = slice(here.start // block, -(-here.stop // block))
        shape = (here.stop - here.start,)
        m = decode(m_codes[here], m_scales[blocks], True, shape, block)
        v = decode(v_codes[here], v_scales[blocks], False, shape, block)
        adamw_slice(weight[here], gradient[here], m, v, numbers)
        for values, signed, codes, scales in ((m, True, m_codes, m_scales), (v, False, v_codes, v_scales)):
            new_codes, new_scales = encode(values, signed, block)
            codes[here].copy_(new_codes)
            scales[blocks].copy_(new_scales)
