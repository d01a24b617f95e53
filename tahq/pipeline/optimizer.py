"""The optimizer of one stage, and its state as flat named tensors.

A parameter's update depends only on its own gradients and state, not on the other parameters of its stage, so a run
that is cut elsewhere or resumed on another number of stages gives the same bits. torch's `foreach` and `fused` variants
process a stage's parameters as one list, in chunks whose borders depend on the neighbours; so they are turned off. On
CUDA `adamw` is tahq's own kernel, whose chunks lie within one parameter.

A state is named `<state>/<canonical parameter name>`, such as `exp_avg/transformer.h.0.ln_1.weight`.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import SGD, AdamW, Optimizer

from tahq.errors import SnapshotError
from tahq.memory.adam.adamw import BlockwiseAdamW, adamw8bit_states, plain_adamw_states
from tahq.memory.adam.loop import StateSpec, StateSpecs, has_ptx, states_nbytes
from tahq.memory.coat.fp8_adamw import Fp8AdamW, fp8_adamw_states
from tahq.memory.config import Offload
from tahq.memory.galore.low_rank_weight import LowRankSettings
from tahq.memory.galore.subspace import LazyRule
from tahq.memory.offload.host_part import host_part, moment_of
from tahq.memory.shares import Shape
from tahq.models.deferred_gradients import gradient_dtype
from tahq.pipeline.config import TrainingConfig

Groups = list[dict[str, Any]]


def build_optimizer(
    config: TrainingConfig,
    params: Mapping[str, Parameter],
    decayed: Callable[[str, Parameter], bool],
    seed: int = 0,
    drawn_as: Mapping[str, str] = MappingProxyType({}),
) -> Optimizer:
    """The optimizer of `training:` over a stage's parameters by canonical name.

    It has up to two groups: `decayed` says which parameters have weight decay (not norms and biases). The draws of
    stochastic rounding depend on `seed`, the run's, and on the name, or on what `drawn_as` has for it.
    """
    groups: dict[bool, list[Parameter]] = {True: [], False: []}
    for name, parameter in params.items():
        groups[decayed(name, parameter)].append(parameter)
    draws = {parameter: (seed, "adamw rounding", drawn_as.get(name, name)) for name, parameter in params.items()}
    decay = {True: config.weight_decay, False: 0.0}
    filled = [
        {"params": members, "weight_decay": decay[key], "draws": draws} for key, members in groups.items() if members
    ]
    # a replica may update no parameter (`shares_of`), and torch wants a group
    return OPTIMIZERS[config.optimizer].build(filled or [{"params": [], "weight_decay": 0.0}], config)


def _decay(params: Iterable[Parameter], lr: float, weight_decay: float) -> None:
    """Decoupled weight decay, x ← x · (1 − η·λ) (Loshchilov & Hutter 2019, Alg. 2), before the step."""
    for parameter in params:
        if weight_decay and parameter.grad is not None:
            parameter.mul_(1 - lr * weight_decay)


class DecoupledSgd(SGD):
    """torch's SGD with momentum, and weight decay that bypasses the momentum.

    torch would add λ·x to the gradient. tahq's `weight_decay` means the same for every optimizer, so here it is in the
    groups as `decoupled_decay`, and torch's own `weight_decay` is 0.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """x ← x·(1 − η·λ); then torch's b ← μ·b + g (b = g at first), x ← x − η·b."""
        for group in self.param_groups:
            _decay(group["params"], group["lr"], group["decoupled_decay"])
        super().step()


class EmaSgd(Optimizer):
    """SGD whose momentum is a moving average of gradients, as the theorem assumes.

    m^t = (1 − β₁)·m^{t−1} + β₁·ĝ^t;  x^{t+1} = x^t − η·m^t      (TAH-Quant §4, Eq. 6 and 7)

    `momentum` is 1 − β₁. The paper does not define m before the first step; here it is 0, as for Adam's moments. Unlike
    torch's momentum, steps do not grow by 1/β₁ over time: a rate that suits `sgd` with momentum 0.9 is ten times larger
    here. Weight decay is decoupled.
    """

    def __init__(self, params: Groups, lr: float, momentum: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step with the present gradients; parameters without a gradient do not change."""
        for group in self.param_groups:
            _decay(group["params"], group["lr"], group["weight_decay"])
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if not state:
                        state["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                    average = state["momentum_buffer"]
                    average.mul_(group["momentum"]).add_(parameter.grad, alpha=1 - group["momentum"])
                    parameter.add_(average, alpha=-group["lr"])


@dataclass(frozen=True, slots=True)
class OptimizerKind:
    """One choice of `training.optimizer`: how it is built, and its state for a parameter of a given shape."""

    build: Callable[[Groups, TrainingConfig], Optimizer]
    states: Callable[[TrainingConfig, Shape], StateSpecs]


def _adam_keys(config: TrainingConfig) -> dict[str, Any]:
    return {"lr": config.lr, "betas": config.betas, "eps": config.epsilon}


def _adamw(groups: Groups, config: TrainingConfig) -> Optimizer:
    parameters = [parameter for group in groups for parameter in group["params"]]
    has_bf16 = any(gradient_dtype(parameter) != torch.float32 for parameter in parameters)  # not for torch's
    if has_bf16 or (all(parameter.is_cuda for parameter in parameters) and has_ptx("cuda")):
        return BlockwiseAdamW(groups, partial(_ADAMW.states, config), **_adam_keys(config))
    return AdamW(groups, foreach=False, fused=False, **_adam_keys(config))


def _adamw8bit(groups: Groups, config: TrainingConfig) -> Optimizer:
    states = partial(_ADAMW_8BIT.states, config)
    return BlockwiseAdamW(groups, states, block=config.adamw8bit.block, **_adam_keys(config))


def _adamw_bf16(groups: Groups, config: TrainingConfig) -> Optimizer:
    is_stochastic = config.adamw_bf16.rounding == "stochastic"
    return BlockwiseAdamW(
        groups, partial(_ADAMW_BF16.states, config), is_stochastic=is_stochastic, **_adam_keys(config)
    )


def _sgd(groups: Groups, config: TrainingConfig) -> Optimizer:
    groups = [group | {"weight_decay": 0.0, "decoupled_decay": group["weight_decay"]} for group in groups]
    return DecoupledSgd(groups, lr=config.lr, momentum=config.momentum, foreach=False, fused=False)


_ADAMW = OptimizerKind(_adamw, lambda config, shape: plain_adamw_states(shape, torch.float32))
_ADAMW_BF16 = OptimizerKind(_adamw_bf16, lambda config, shape: plain_adamw_states(shape, torch.bfloat16))
_ADAMW_8BIT = OptimizerKind(
    _adamw8bit, lambda config, shape: adamw8bit_states(shape, config.adamw8bit.block, config.adamw8bit.min_elements)
)
_BESIDE_LOW_RANK = OptimizerKind(
    lambda groups, config: (_ADAMW_8BIT if config.has_small_states else _ADAMW).build(groups, config),
    lambda config, shape: (_ADAMW_8BIT if config.has_small_states else _ADAMW).states(config, shape),
)
"""For the parameters that a slice has beside its low-rank weights; see `memory/galore`."""

OPTIMIZERS: Mapping[str, OptimizerKind] = {
    "adamw": _ADAMW,
    "sgd": OptimizerKind(
        _sgd, lambda config, shape: {"momentum_buffer": StateSpec(shape)} if config.momentum > 0 else {}
    ),
    "ema_sgd": OptimizerKind(
        lambda groups, config: EmaSgd(groups, lr=config.lr, momentum=config.momentum),
        lambda config, shape: {"momentum_buffer": StateSpec(shape)},
    ),
    "fp8_adamw": OptimizerKind(
        lambda groups, config: Fp8AdamW(groups, config.fp8_adamw, **_adam_keys(config)),
        lambda config, shape: fp8_adamw_states(config.fp8_adamw, shape),
    ),
    "adamw8bit": _ADAMW_8BIT,
    "adamw_bf16": _ADAMW_BF16,
    "qgalore": _BESIDE_LOW_RANK,
    "galore": _BESIDE_LOW_RANK,
}
"""The choices of `training.optimizer`; their states are checkpointed and restored bit-exactly."""


def optimizer_nbytes(config: TrainingConfig, shapes: Iterable[Shape], moments: Collection[Offload] = ("m", "v")) -> int:
    """Bytes of optimizer state for fp32 parameters of these shapes: of these moments only."""
    every = (item for shape in shapes for item in OPTIMIZERS[config.optimizer].states(config, shape).items())
    return sum(states_nbytes({name: spec}) for name, spec in every if moment_of(name) in moments)


def optimizer_tensors(optimizer: Optimizer, params: Mapping[str, Parameter]) -> dict[str, torch.Tensor]:
    """An optimizer's state by `<state>/<canonical name>`: the tensors themselves, not copies; empty before step 1."""
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
    """Restore an optimizer from `optimizer_tensors`, bit for bit, whichever stages wrote them.

    `tensors` are states of at least these parameters; others are ignored. Without any state for these parameters the
    optimizer starts empty.

    Raises:
        SnapshotError: states for some of the parameters only, or of another shape or type.
    """
    states = OPTIMIZERS[config.optimizer].states
    specs = {name: states(config, tuple(parameter.shape)) for name, parameter in params.items()}
    found = {
        name: {state: tensors[f"{state}/{name}"] for state in sorted(specs[name]) if f"{state}/{name}" in tensors}
        for name in params
    }
    missing = [name for name, states in found.items() if not states]
    if missing and len(missing) < len(params):
        raise SnapshotError(
            f"the checkpoint has optimizer states for {len(params) - len(missing)} of {len(params)} parameters of "
            f"this stage; {missing[0]} has none: it is damaged, from another model, or other replicas have them in "
            "files that are not here"
        )
    for name, parameter in params.items():
        absent = ", ".join(sorted(specs[name].keys() - found[name].keys()))
        if found[name] and absent:
            raise SnapshotError(
                f"the checkpoint has {', '.join(found[name])} of {name} but not {absent}: it is damaged"
            )
        copies = {
            state: _checked_copy(specs[name][state], f"{state} of {name}", parameter, value)
            for state, value in found[name].items()
        }
        optimizer.state.pop(parameter, None)
        if copies:
            optimizer.state[parameter] = copies
        if (host := host_part(parameter)) is not None:
            host.states.clear()
            host.take_states(copies)


def _checked_copy(spec: StateSpec, name: str, parameter: Parameter, value: torch.Tensor) -> torch.Tensor:
    """A copy where the optimizer needs it: with the weights, or a counter on the CPU."""
    if tuple(value.shape) != spec.shape:
        raise SnapshotError(
            f"optimizer state {name} has shape {list(value.shape)} in the checkpoint, expected {list(spec.shape)}: "
            "it is from another model"
        )
    dtype = spec.dtype or parameter.dtype
    if value.dtype != dtype:
        raise SnapshotError(
            f"optimizer state {name} is {value.dtype} in the checkpoint, expected {dtype}: it is from another optimizer"
        )
    return value.detach().to("cpu" if spec.is_counter else parameter.device, copy=True)


DEFAULT_MAX_GAP_FACTOR = 16
"""`qgalore.max_gap` over `gap`, if it is not set."""


def low_rank_settings(config: TrainingConfig, seed: int) -> LowRankSettings | None:
    """How this run stores and trains the matrices of blocks, with defaults filled in; None: as ordinary parameters."""
    if not config.is_low_rank:
        return None
    keys, is_quantised = config.qgalore, config.optimizer == "qgalore"
    rule = LazyRule(
        gap=keys.gap,
        max_gap=keys.max_gap or DEFAULT_MAX_GAP_FACTOR * keys.gap,
        queue=keys.queue,
        threshold=keys.threshold,
        is_lazy=is_quantised if keys.lazy is None else keys.lazy,
    )
    return LowRankSettings(
        rank=keys.rank,
        scale=keys.scale,
        rule=rule,
        weights=keys.weights or ("int8" if is_quantised else "fp32"),
        projections=keys.projections or ("int4" if is_quantised else "fp32"),
        states="int8" if config.has_small_states else "fp32",
        is_stochastic=keys.rounding == "stochastic",
        svd=keys.svd,
        betas=config.betas,
        epsilon=config.epsilon,
        seed=seed,
        ends=keys.ends or ("bf16" if is_quantised else "fp32"),
    )
