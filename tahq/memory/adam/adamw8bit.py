"""AdamW with block-wise 8-bit moments: 2.03 bytes a parameter in place of 8 (Dettmers et al. 2022).

A step reads codes and scales, computes in fp32, moves the weight by the moments *before* they are rounded again,
and stores them: m with the signed map, v with the one without signs (`blockwise8`). Blocks do not look
beyond their parameter, and rounding is to nearest, so a step is a function of weight, states, gradient and step.

Parameters with fewer elements than `min_elements` keep fp32 moments, as in the 8-bit optimizers that are in use:
norms and biases, together a thousandth of a model, which move by noise of 8 bits at no gain.

On CUDA with Triton one kernel a parameter does all of it (`adamw_triton`); codes and scales are those of the plain
torch below to the bit, weights to within 2⁻²⁰ of a step's change.
"""

from typing import TYPE_CHECKING, Any, cast

import torch
from torch.nn import Parameter

from tahq.memory.adam.backend import has_kernels, triton_backend
from tahq.memory.adam.blockwise8 import BLOCK, decode, encode, num_blocks, zero_codes
from tahq.memory.adam.bound_step import State
from tahq.memory.adam.loop import AdamwLoop
from tahq.memory.adam.state_spec import StateSpec, StateSpecs
from tahq.memory.adam.step import AdamwNumbers, adamw_slice, adamw_step, slices

if TYPE_CHECKING:  # needs triton
    from tahq.quant.gpu.launch import BoundLaunches

MIN_ELEMENTS = 4096


class AdamW8bit(AdamwLoop):
    """AdamW with moments of 8 bits.

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
        m, v = state["exp_avg"].view(-1), state["exp_avg_sq"].view(-1)
        if not has_kernels(weight, gradient, m, v):
            return None
        if m.dtype != torch.uint8:
            return cast("BoundLaunches", triton_backend().bind_plain_adamw(weight, gradient, m, v))
        scales = state["exp_avg_scale"], state["exp_avg_sq_scale"]
        return cast("BoundLaunches", triton_backend().bind_adamw8bit(weight, gradient, m, v, *scales, self._block))

    def _advance(self, weight: torch.Tensor, gradient: torch.Tensor, state: State, numbers: AdamwNumbers) -> None:
        m, v = state["exp_avg"].view(-1), state["exp_avg_sq"].view(-1)
        if launches := self._bind(weight, gradient, state):
            launches(gradient, numbers.in_order())
        elif m.dtype == torch.uint8:
            scales = state["exp_avg_scale"], state["exp_avg_sq_scale"]
            adamw8bit_step(weight, gradient, m, v, *scales, numbers, self._block)
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


def adamw8bit_states(shape: tuple[int, ...], block: int = BLOCK, min_elements: int = MIN_ELEMENTS) -> StateSpecs:
    """What is kept of a parameter of this shape."""
    specs = {"step": StateSpec((), torch.float32, is_counter=True)}
    if torch.Size(shape).numel() < min_elements:
        return specs | {name: StateSpec(shape, torch.float32) for name in ("exp_avg", "exp_avg_sq")}
    for name in ("exp_avg", "exp_avg_sq"):
        specs[name] = StateSpec(shape, torch.uint8)
        specs[f"{name}_scale"] = StateSpec((num_blocks(shape, block),), torch.float32)
    return specs
