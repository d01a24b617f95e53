"""Optimizers of one stage, and their states as flat named tensors.

What a parameter becomes depends on nothing but its own gradients and state: not on which other
parameters its stage owns. That is what lets a run be cut elsewhere, or resumed on another number of
stages, and still give the same bits. torch's `foreach` and `fused` variants treat a stage's parameters as
one list, in chunks whose borders depend on the neighbours, so the loop over single tensors is asked for by
name; it also needs no temporaries as large as the stage. On CUDA `adamw` is a kernel of our own, one a tensor.

A state is named `<state>/<canonical parameter name>`, such as `exp_avg/transformer.h.0.ln_1.weight`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import SGD, AdamW, Optimizer

from tahq.errors import SnapshotError
from tahq.memory.adam.adamw8bit import AdamW8bit, adamw8bit_states
from tahq.memory.adam.backend import has_ptx
from tahq.memory.adam.plain_adamw import PlainAdamW, plain_adamw_states
from tahq.memory.adam.state_spec import StateSpec, StateSpecs, states_nbytes
from tahq.memory.coat.fp8_adamw import Fp8AdamW, fp8_adamw_states
from tahq.pipeline.config import TrainingConfig

Groups = list[dict[str, Any]]
Shape = tuple[int, ...]


def build_optimizer(
    config: TrainingConfig, params: Mapping[str, Parameter], decayed: Callable[[str, Parameter], bool]
) -> Optimizer:
    """The optimizer that `training:` asks for, over the parameters of one stage.

    Args:
        config: `training:`; its rate stands in every group's `lr` until the engine sets the step's.
        params: by canonical name; at least one.
        decayed: whether weight decay applies to (name, parameter): not to norms and biases.

    Returns:
        An optimizer with up to two groups, decayed and not.
    """
    groups: dict[bool, list[Parameter]] = {True: [], False: []}
    for name, parameter in params.items():
        groups[decayed(name, parameter)].append(parameter)
    decay = {True: config.weight_decay, False: 0.0}
    filled = [{"params": members, "weight_decay": decay[key]} for key, members in groups.items() if members]
    return OPTIMIZERS[config.optimizer].build(filled, config)


def _decay(params: Iterable[Parameter], lr: float, weight_decay: float) -> None:
    """Decoupled weight decay, x ← x · (1 − η·λ) (Loshchilov & Hutter 2019, Alg. 2), before the step."""
    if weight_decay == 0:
        return
    for parameter in params:
        if parameter.grad is not None:
            parameter.mul_(1 - lr * weight_decay)


class DecoupledSgd(SGD):
    """torch's SGD with momentum, and weight decay that bypasses the momentum.

    torch would add λ·x to the gradient; tahq's `weight_decay` means the same under every optimizer, so it
    stands in the groups as `decoupled_decay`, and torch's own `weight_decay` is 0.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """x ← x·(1 − η·λ); then torch's b ← μ·b + g (b = g at first), x ← x − η·b."""
        for group in self.param_groups:
            _decay(group["params"], group["lr"], group["decoupled_decay"])
        loss: float | None = super().step(closure)
        return loss


class EmaSgd(Optimizer):
    """SGD whose momentum is a moving average of gradients, as the theorem assumes.

    m^t = (1 − β₁)·m^{t−1} + β₁·ĝ^t;  x^{t+1} = x^t − η·m^t      (TAH-Quant §4, Eq. 6 and 7)

    `momentum` is 1 − β₁. The paper leaves open what m is before the first step (its bound has
    ‖m^0 − ∇f(x^0)‖² in it); here it is 0, as for Adam's moments, so the same line holds at every step.
    Unlike torch's momentum, the step is not 1/β₁ times larger in the long run: a rate that suits `sgd`
    with momentum 0.9 is ten times larger here. Weight decay is decoupled.
    """

    def __init__(self, params: Groups, lr: float, momentum: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step on the gradients at hand; parameters without one are left alone."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            _decay(group["params"], group["lr"], group["weight_decay"])
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group["lr"], group["momentum"])
        return loss

    def _update(self, parameter: Parameter, gradient: torch.Tensor, lr: float, momentum: float) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        average = state["momentum_buffer"].mul_(momentum).add_(gradient, alpha=1 - momentum)
        parameter.add_(average, alpha=-lr)


def _adamw(groups: Groups, config: TrainingConfig) -> Optimizer:
    parameters = [parameter for group in groups for parameter in group["params"]]
    if all(parameter.is_cuda for parameter in parameters) and has_ptx("cuda"):
        return PlainAdamW(groups, moments=torch.float32, lr=config.lr, betas=config.betas, eps=config.epsilon)
    return AdamW(groups, lr=config.lr, betas=config.betas, eps=config.epsilon, foreach=False, fused=False)


def _sgd(groups: Groups, config: TrainingConfig) -> Optimizer:
    groups = [group | {"weight_decay": 0.0, "decoupled_decay": group["weight_decay"]} for group in groups]
    return DecoupledSgd(groups, lr=config.lr, momentum=config.momentum, foreach=False, fused=False)


def _ema_sgd(groups: Groups, config: TrainingConfig) -> Optimizer:
    return EmaSgd(groups, lr=config.lr, momentum=config.momentum)


def _fp8_adamw(groups: Groups, config: TrainingConfig) -> Optimizer:
    return Fp8AdamW(groups, config.fp8_adamw, lr=config.lr, betas=config.betas, eps=config.epsilon)


def _adamw8bit(groups: Groups, config: TrainingConfig) -> Optimizer:
    layout = config.adamw8bit.model_dump()
    return AdamW8bit(groups, lr=config.lr, betas=config.betas, eps=config.epsilon, **layout)


def _adamw_bf16(groups: Groups, config: TrainingConfig) -> Optimizer:
    return PlainAdamW(groups, moments=torch.bfloat16, lr=config.lr, betas=config.betas, eps=config.epsilon)


def _beside_low_rank(groups: Groups, config: TrainingConfig) -> Optimizer:
    return (_adamw8bit if config.has_small_states else _adamw)(groups, config)


def _beside_low_rank_states(config: TrainingConfig, shape: Shape) -> StateSpecs:
    return (_adamw8bit_states if config.has_small_states else _adamw_states)(config, shape)


def _adamw_states(config: TrainingConfig, shape: Shape) -> StateSpecs:
    return plain_adamw_states(shape, torch.float32)


def _sgd_states(config: TrainingConfig, shape: Shape) -> StateSpecs:
    return {"momentum_buffer": StateSpec(shape)} if config.momentum > 0 else {}


def _ema_sgd_states(config: TrainingConfig, shape: Shape) -> StateSpecs:
    return {"momentum_buffer": StateSpec(shape)}


def _fp8_adamw_states(config: TrainingConfig, shape: Shape) -> StateSpecs:
    return fp8_adamw_states(config.fp8_adamw, shape)


def _adamw8bit_states(config: TrainingConfig, shape: Shape) -> StateSpecs:
    return adamw8bit_states(shape, config.adamw8bit.block, config.adamw8bit.min_elements)


def _adamw_bf16_states(config: TrainingConfig, shape: Shape) -> StateSpecs:
    return plain_adamw_states(shape, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class OptimizerKind:
    """One choice of `training.optimizer`: how it is built, and what it keeps of a parameter of a given shape."""

    build: Callable[[Groups, TrainingConfig], Optimizer]
    states: Callable[[TrainingConfig, Shape], StateSpecs]


OPTIMIZERS: Mapping[str, OptimizerKind] = {
    "adamw": OptimizerKind(_adamw, _adamw_states),
    "sgd": OptimizerKind(_sgd, _sgd_states),
    "ema_sgd": OptimizerKind(_ema_sgd, _ema_sgd_states),
    "fp8_adamw": OptimizerKind(_fp8_adamw, _fp8_adamw_states),
    "adamw8bit": OptimizerKind(_adamw8bit, _adamw8bit_states),
    "adamw_bf16": OptimizerKind(_adamw_bf16, _adamw_bf16_states),
    # of what a slice has beside its low-rank weights: see `memory/qgalore.py`
    "qgalore": OptimizerKind(_beside_low_rank, _beside_low_rank_states),
    "galore": OptimizerKind(_beside_low_rank, _beside_low_rank_states),
}
"""The choices of `training.optimizer`; their states are checkpointed and restored bit-exactly."""


def optimizer_nbytes(config: TrainingConfig, shapes: Iterable[Shape]) -> int:
    """Bytes that the optimizer of `training:` keeps of fp32 parameters of these shapes."""
    states = OPTIMIZERS[config.optimizer].states
    return sum(states_nbytes(states(config, shape)) for shape in shapes)


def optimizer_tensors(optimizer: Optimizer, params: Mapping[str, Parameter]) -> dict[str, torch.Tensor]:
    """All that an optimizer remembers, by `<state>/<canonical name>`; the tensors themselves, not copies.

    Empty before the first step.
    """
    return {
        f"{state}/{name}": value
        for name, parameter in params.items()
        for state, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, torch.Tensor)
    }


def load_optimizer_tensors(
    config: TrainingConfig,
    optimizer: Optimizer,
    params: Mapping[str, Parameter],
    tensors: Mapping[str, torch.Tensor],
) -> None:
    """Make an optimizer remember what `optimizer_tensors` gave, bit for bit, whichever stages gave it.

    Args:
        config: what it was built from.
        optimizer: freshly built, or to be overwritten.
        params: the parameters of this stage, by canonical name.
        tensors: states of at least these parameters; those of others are ignored. Where there are none
            for any of these parameters, the optimizer starts anew.

    Raises:
        SnapshotError: states for some of the parameters only, or of another shape or type.
    """
    states = OPTIMIZERS[config.optimizer].states
    specs = {name: states(config, tuple(parameter.shape)) for name, parameter in params.items()}
    found = {name: _states_of(specs[name], name, tensors) for name in params}
    missing = [name for name, states in found.items() if not states]
    if missing and len(missing) < len(params):
        raise SnapshotError(
            f"the snapshot has optimizer states for {len(params) - len(missing)} of {len(params)} parameters of "
            f"this stage; {missing[0]} has none: it is damaged, or from another model"
        )
    for name, parameter in params.items():
        copies = {
            state: _checked_copy(specs[name][state], f"{state} of {name}", parameter, value)
            for state, value in found[name].items()
        }
        optimizer.state.pop(parameter, None)
        if copies:
            optimizer.state[parameter] = copies


def _states_of(expected: StateSpecs, name: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {state: tensors[f"{state}/{name}"] for state in sorted(expected) if f"{state}/{name}" in tensors}
    if found and len(found) < len(expected):
        absent = ", ".join(sorted(expected.keys() - found.keys()))
        raise SnapshotError(f"the snapshot has {', '.join(found)} of {name} but not {absent}: it is damaged")
    return found


def _checked_copy(spec: StateSpec, name: str, parameter: Parameter, value: torch.Tensor) -> torch.Tensor:
    """A copy where the optimizer wants it: beside the weights, a counter on the CPU."""
    if tuple(value.shape) != spec.shape:
        raise SnapshotError(
            f"optimizer state {name} has shape {list(value.shape)} in the snapshot, expected {list(spec.shape)}: "
            "it is from another model"
        )
    dtype = spec.dtype or parameter.dtype
    if value.dtype != dtype:
        raise SnapshotError(
            f"optimizer state {name} is {value.dtype} in the snapshot, expected {dtype}: it is from another optimizer"
        )
    return value.detach().to("cpu" if spec.is_counter else parameter.device, copy=True)
