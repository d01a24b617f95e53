"""AdamW with moments as they are, in bf16 or fp32, in one kernel a parameter on CUDA.

*bf16*, 4 bytes a parameter in place of 8: torch's AdamW keeps moments in the type of the weights. tahq's weights are
fp32, so bf16 moments need a step of their own (decision 0021): moments are read as they are, the step is fp32, and they
are rounded to nearest even. A second moment of bf16 only changes where (1 − β₂)·|g² − v| is above half of its last
place, v·2⁻⁹ to v·2⁻⁸: with β₂ = 0.95, the default, wherever g² is farther from v than 8 %; with 0.999 it never falls at
all, since even without a gradient it should lose 0.1 % a step.

*fp32*: torch's AdamW, for CUDA, where torch's own takes ten kernels a parameter, or treats a stage's parameters as one
list (see `pipeline/optimizer.py`).
"""

from typing import TYPE_CHECKING, Any, cast

import torch
from torch.nn import Parameter

from tahq.memory.adam.backend import has_kernels, triton_backend
from tahq.memory.adam.bound_step import State
from tahq.memory.adam.loop import AdamwLoop
from tahq.memory.adam.state_spec import StateSpec, StateSpecs
from tahq.memory.adam.step import AdamwNumbers, adamw_step

if TYPE_CHECKING:  # needs triton
    from tahq.quant.gpu.launch import BoundLaunches


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
        m, v = state["exp_avg"].view(-1), state["exp_avg_sq"].view(-1)
        if not has_kernels(weight, gradient, m, v):
            return None
        return cast("BoundLaunches", triton_backend().bind_plain_adamw(weight, gradient, m, v))

    def _advance(self, weight: torch.Tensor, gradient: torch.Tensor, state: State, numbers: AdamwNumbers) -> None:
        if launches := self._bind(weight, gradient, state):
            launches(gradient, numbers.in_order())
        else:
            adamw_step(weight, gradient, state["exp_avg"].view(-1), state["exp_avg_sq"].view(-1), numbers)


def plain_adamw_states(shape: tuple[int, ...], dtype: torch.dtype) -> StateSpecs:
    """What is kept of a parameter of this shape, with moments of this dtype; of torch's AdamW the same, in fp32."""
    moments = {name: StateSpec(shape, dtype) for name in ("exp_avg", "exp_avg_sq")}
    return {"step": StateSpec((), torch.float32, is_counter=True)} | moments
