"""AdamW with moments in 8 bits, bf16 or fp32.

*8 bits*, 2.03 bytes per parameter instead of 8 (Dettmers et al. 2022): a step reads codes and scales, computes in fp32,
moves the weight by the moments *before* they are rounded again, and stores them: m with the signed map, v with the
unsigned one (`blockwise8`). Blocks lie within one parameter, and rounding is to nearest, so a step is a function of
weight, states, gradient and step. Parameters with fewer elements than `min_elements` keep fp32 moments, as in other
8-bit optimizers: norms and biases, together a thousandth of a model.

*bf16*, 4 bytes per parameter: torch's AdamW keeps moments in the dtype of the weights, which are fp32 in tahq, so bf16
moments need their own step (decision 21). A second moment in bf16 only changes where (1 − β₂)·|g² − v| is above half
of its last place, v·2⁻⁹ to v·2⁻⁸: with β₂ = 0.95, the default, wherever g² differs from v by more than 8 %; with 0.999
it never falls, since even without a gradient it should lose 0.1 % per step. So by default the rounding is stochastic,
whose mean is the unrounded number; then weights can be bf16, too, without fp32 ones beside them (LLMQ §3.1). A draw is
a function of run, parameter, step, tensor and element.

*fp32*: torch's AdamW for CUDA, where torch's own takes ten kernels per parameter, or treats a stage's parameters as one
list (see `pipeline/optimizer.py`).

One step, each operation rounded once:

    m ← β₁·m + (1 − β₁)·g                     v ← β₂·v + (1 − β₂)·g²
    x ← x·(1 − η·λ) − η/(1 − β₁^t) · m / (√v/√(1 − β₂^t) + ε)     (Loshchilov & Hutter 2019, Alg. 2)

This is torch's AdamW except for the order of some operations, which is fixed so that kernels can give bit-equal
moments: no multiply-add is fused, and the numbers of a step are computed once, in fp64, and rounded to fp32. On CUDA
with Triton one kernel does a step (`kernels`), of a parameter with 8-bit moments or of all the others: codes, scales
and moments are bit-equal to plain torch, weights within 2⁻²⁰ of a step's change.
"""

import math
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

import torch

from tahq.kernel_launch import ALIGNMENT
from tahq.memory.adam.blockwise8 import BLOCK, ZERO_SIGNED, decode, encode
from tahq.memory.adam.loop import STEP_COUNTER, AdamwLoop, AdamwNumbers, State, StateSpec, StateSpecs, Task, has_ptx
from tahq.memory.config import MIN_ELEMENTS
from tahq.quant.backends import interprets_triton
from tahq.quant.stochastic_rounding import round_to_bf16

if TYPE_CHECKING:  # needs triton
    from tahq.quant.gpu.launch import BoundLaunches

_TYPES = (torch.float32, torch.bfloat16, torch.uint8)
SLICE = 1 << 18  # Elements computed at a time, so that temporaries stay small: a multiple of every block


class BlockwiseAdamW(AdamwLoop):
    """AdamW with states of `adamw8bit_states`, in blocks of a power of two from 64 to 2048, or `plain_adamw_states`."""

    def __init__(self, *args: Any, block: int = BLOCK, **others: Any) -> None:
        self._block = block
        super().__init__(*args, **others)
        self.reads_host_memory = all(has_ptx(p.device.type) for group in self.param_groups for p in group["params"])

    def _take_together(self, tasks: list[Task]) -> list[Task]:
        alike, others = dict[tuple[object, ...], list[tuple[tuple[torch.Tensor, ...], Task]]](), list[Task]()
        for task in tasks:
            tensors = (task.parameter, task.gradient, task.state["exp_avg"], task.state["exp_avg_sq"])
            if not takes_plain_kernel(*tensors):
                others.append(task)
                continue
            is_filled = task.parameter.numel() % ALIGNMENT == 0  # one that is not would cost all their vector loads
            kind = (task.parameter.device, task.numbers, is_filled, *[each.dtype for each in tensors])
            alike.setdefault(kind, []).append((tensors, task))
        for members in alike.values():
            _step_plain([each for each, _ in members], members[0][1].numbers, [task.key for _, task in members])
        return others

    def _bind(self, weight: torch.Tensor, gradient: torch.Tensor, state: State) -> "BoundLaunches | None":
        return bind_adamw8bit(weight, gradient, state, self._block)

    def _advance(
        self, weight: torch.Tensor, gradient: torch.Tensor, state: State, numbers: AdamwNumbers, key: int | None
    ) -> None:
        take_step(weight, gradient, state, numbers, self._block, key)


def adamw8bit_states(shape: tuple[int, ...], block: int = BLOCK, min_elements: int = MIN_ELEMENTS) -> StateSpecs:
    """The state of a parameter of this shape, with 8-bit moments unless it is small."""
    if math.prod(shape) < min_elements:
        return plain_adamw_states(shape, torch.float32)
    scales = StateSpec((-(-math.prod(shape) // block),), torch.float32)
    return {
        **STEP_COUNTER,
        "exp_avg": StateSpec(shape, torch.uint8, ZERO_SIGNED),
        "exp_avg_scale": scales,
        "exp_avg_sq": StateSpec(shape, torch.uint8),
        "exp_avg_sq_scale": scales,
    }


def plain_adamw_states(shape: tuple[int, ...], dtype: torch.dtype) -> StateSpecs:
    """The state of a parameter of this shape, with moments of this dtype; in fp32 that of torch's AdamW."""
    return {**STEP_COUNTER, "exp_avg": StateSpec(shape, dtype), "exp_avg_sq": StateSpec(shape, dtype)}


def take_step(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    state: State,
    numbers: AdamwNumbers,
    block: int = BLOCK,
    key: int | None = None,
) -> None:
    """One step by kernels if they can read these tensors, else as `step_in_torch`, whose arguments it has."""
    tensors = (weight, gradient, state["exp_avg"].view(-1), state["exp_avg_sq"].view(-1))
    if launches := bind_adamw8bit(weight, gradient, state, block):
        launches(gradient, numbers)
    elif takes_plain_kernel(*tensors):
        _step_plain([tensors], numbers, [key])
    else:
        step_in_torch(weight, gradient, state, numbers, block, key)


def bind_adamw8bit(
    weight: torch.Tensor, gradient: torch.Tensor, state: State, block: int = BLOCK
) -> "BoundLaunches | None":
    """Kernels for a step on flat tensors [N] and a state with 8-bit moments; None if they cannot take it."""
    tensors = (weight, gradient, state["exp_avg"].view(-1), state["exp_avg_sq"].view(-1))
    if tensors[2].dtype != torch.uint8 or not _kernels_read(*tensors):
        return None
    bind = import_module("tahq.memory.adam.blockwise8_kernels").bind_adamw8bit
    return cast("BoundLaunches", bind(*tensors, state["exp_avg_scale"], state["exp_avg_sq_scale"], block))


def takes_plain_kernel(weight: torch.Tensor, gradient: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether moments are in fp32 or bf16, and kernels can take this parameter's step."""
    return m.dtype != torch.uint8 and _kernels_read(weight, gradient, m, v)


def _step_plain(parameters: list[tuple[torch.Tensor, ...]], numbers: AdamwNumbers, keys: Sequence[int | None]) -> None:
    import_module("tahq.memory.adam.kernels").step_plain(parameters, numbers, keys)


def _kernels_read(*tensors: torch.Tensor) -> bool:
    """Whether kernels exist for the first one's device and can read all of them."""
    if tensors[0].numel() == 0 or not _has_kernels(tensors[0].device.type):
        return False
    for each in tensors:  # a generator would take the host longer
        is_dense = each.layout == torch.strided and each.is_contiguous()
        if not is_dense or each.dtype not in _TYPES or each.data_ptr() % ALIGNMENT:
            return False
    return True


@cache
def _has_kernels(device_type: str) -> bool:
    return interprets_triton() if device_type == "cpu" else has_ptx(device_type)


def step_in_torch(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    state: State,
    numbers: AdamwNumbers,
    block: int = BLOCK,
    key: int | None = None,
) -> None:
    """One step in plain torch, in place, on flat tensors [N], fp32 or bf16, and a state.

    `key`: of the draws by which weight (0), m (1) and v (2) are rounded where they are bf16, and moments unquantised;
    the tensor's number is XORed into its upper half. None: to nearest.
    """
    m, v = state["exp_avg"].view(-1), state["exp_avg_sq"].view(-1)
    for start in range(0, weight.numel(), SLICE):
        here, blocks = slice(start, start + SLICE), slice(start // block, (start + SLICE) // block)
        if m.dtype != torch.uint8:
            wide_m, wide_v = m[here].float(), v[here].float()
            moved = _advance(weight[here], gradient[here], wide_m, wide_v, numbers)
            for number, (target, wide) in enumerate(((weight, moved), (m, wide_m), (v, wide_v))):
                if key is not None and target.dtype == torch.bfloat16:
                    wide = round_to_bf16(wide, start, key ^ number << 32)
                target[here].copy_(wide)
            continue
        stored = ((m[here], state["exp_avg_scale"][blocks], True), (v[here], state["exp_avg_sq_scale"][blocks], False))
        wide_m, wide_v = (decode(codes, scales, signed, block) for codes, scales, signed in stored)
        weight[here].copy_(_advance(weight[here], gradient[here], wide_m, wide_v, numbers))
        for (codes, scales, signed), moment in zip(stored, (wide_m, wide_v), strict=True):
            new_codes, new_scales = encode(moment, signed, block)
            codes.copy_(new_codes)
            scales.copy_(new_scales)


def _advance(
    weight: torch.Tensor, gradient: torch.Tensor, m: torch.Tensor, v: torch.Tensor, numbers: AdamwNumbers
) -> torch.Tensor:
    """Update m and v, fp32, in place; returns the new weight in fp32."""
    gradient = gradient.float()
    m.mul_(numbers.beta1).add_(gradient * numbers.rest1)
    v.mul_(numbers.beta2).add_(gradient.square().mul_(numbers.rest2))
    # torch's own fp32 root is off by a unit here and there on CPUs; that of fp64, rounded, never is.
    denominator = v.double().sqrt_().float().mul_(numbers.root_factor).add_(numbers.epsilon)
    change = denominator.reciprocal_().mul_(m).mul_(numbers.rate)
    return weight.float() * numbers.decay - change
