"""The only place where weights change: a stage's parameters are updated as the coordinator commits.

PREPARE reports `squared_norms`; COMMIT answers with (apply or skip, clip factor); only then does `StageUpdate.apply`
change anything. Learning rates are a pure function of the step, so they are not sent. With `training.qgalore.fused` the
backward itself applies the step, and COMMIT finds nothing left to do.
"""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch.nn import Parameter

from tahq.memory.galore.low_rank_weight import LowRankWeight
from tahq.pipeline.chunk import StepShape
from tahq.pipeline.config import TrainingConfig
from tahq.pipeline.gradients import HoldsGradient, scale_gradients, squared_norm, squared_norms
from tahq.pipeline.tie import TiedEmbedding
from tahq.pipeline.update.learning_rate import learning_rate
from tahq.pipeline.update.optimizer import build_optimizer, load_optimizer_tensors, optimizer_tensors


class StageUpdate:
    """Optimizer and learning rate of one stage, whose parameters and low-rank weights come by canonical name.

    `tied` has a second copy that is left out of the norm; `shape` is needed if the update is fused.
    """

    def __init__(
        self,
        config: TrainingConfig,
        parameters: Mapping[str, Parameter],
        decayed: Callable[[str, Parameter], bool],
        total_steps: int,
        tied: TiedEmbedding | None = None,
        low_rank: Mapping[str, LowRankWeight] | None = None,
        shape: StepShape | None = None,
    ) -> None:
        self._config = config
        self._parameters = dict(parameters)
        self._low_rank = dict(low_rank or {})
        self._total_steps = total_steps
        self._uncounted = tied.uncounted if tied is not None else None
        self.optimizer = build_optimizer(config, self._parameters, decayed)
        self._fused: FusedUpdate | None = None
        if config.is_fused and shape is not None:
            self._fused = FusedUpdate(self._parameters.values(), self._low_rank.values(), self._step_alone, shape)

    def begin(self, step: int) -> None:
        """Gradients from now on belong to this step."""
        for weight in self._low_rank.values():
            weight.begin(step)
        if self._fused is not None:
            self._fused.begin(step)

    def squared_norms(self) -> list[float]:
        """‖g‖² in fp64 of each parameter, for PREPARE; for low-rank weights, of the projected gradient."""
        if self._fused is not None:
            return self._fused.squared_norms()
        return squared_norms(p for p in self._gradient_holders() if p is not self._uncounted)

    def apply(self, step: int, clip_factor: float) -> None:
        """Clip by the global factor and take the optimizer's step."""
        scale_gradients(self._gradient_holders(), clip_factor)
        lr = self._set_rate(step)
        self.optimizer.step()
        for weight in self._low_rank.values():
            weight.apply(step, lr, self._config.weight_decay)
        self.discard()

    def discard(self) -> None:
        """Drop the gradients, after a step or instead of a skipped one."""
        self.optimizer.zero_grad(set_to_none=True)
        for weight in self._low_rank.values():
            weight.discard()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Weights and optimizer states, by their names in a checkpoint."""
        weights = {f"model/{name}": p.detach() for name, p in self._parameters.items()}
        states = optimizer_tensors(self.optimizer, self._parameters)
        for weight in self._low_rank.values():
            weights |= weight.weight_tensors()
            states |= weight.states()
        return weights | {f"optimizer/{name}": tensor for name, tensor in states.items()}

    @torch.no_grad()
    def load(self, read: Callable[[str], torch.Tensor], names: set[str]) -> None:
        """Restore weights and optimizer states, bit for bit, from a checkpoint with these names."""
        for name, parameter in self._parameters.items():
            parameter.copy_(read(f"model/{name}"))
        for weight in self._low_rank.values():
            weight.load(read)
        states = {}
        for name in sorted(names):
            prefix, _, state = name.partition("/")
            if prefix == "optimizer" and state.partition("/")[2] in self._parameters:
                states[state] = read(name)
        if states:
            load_optimizer_tensors(self._config, self.optimizer, self._parameters, states)

    def _gradient_holders(self) -> list[HoldsGradient]:
        return [*self._parameters.values(), *self._low_rank.values()]

    def _step_alone(self, step: int, holder: torch.Tensor | LowRankWeight) -> None:
        """Take the step of one weight: a low-rank one, or the only parameter that has a gradient."""
        lr = self._set_rate(step)
        if isinstance(holder, LowRankWeight):
            holder.apply(step, lr, self._config.weight_decay)
        else:
            self.optimizer.step()

    def _set_rate(self, step: int) -> float:
        lr = learning_rate(self._config, step, self._total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr


class FusedUpdate:
    """The update within the backward: each weight takes its step as soon as it has its gradient, which is then freed.

    For one stage, one micro-batch and no clipping, because elsewhere a step is only decided once all gradients are
    there. No step can be skipped, so a non-finite one ends the run (`training.non_finite: halt`). Weights get the bits
    that COMMIT would have given them. Weight gradients of a split backward bypass autograd's hooks, so zero-bubble is
    refused (`ClusterConfig`).

    `take_step` is called with (step, holder of the new gradient), whose gradient scale has been removed.

    Source: Q-GaLore §3.5; Lv et al. 2023, Full Parameter Fine-tuning for LLMs with Limited Resources (LOMO), §3.1.
    """

    def __init__(
        self,
        parameters: Iterable[Parameter],
        low_rank: Iterable[LowRankWeight],
        take_step: Callable[[int, torch.Tensor | LowRankWeight], None],
        shape: StepShape,
    ) -> None:
        self._take_step = take_step
        self._factor = 1 / shape.gradient_scale
        self._step = 0
        self._squares: list[torch.Tensor] = []
        self._parameters = tuple(parameters)
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._update)  # type: ignore[no-untyped-call]
        for weight in low_rank:
            weight.on_gradient = self._update

    def begin(self, step: int) -> None:
        """Gradients from now on belong to this step."""
        self._step = step
        self._squares = []

    def squared_norms(self) -> list[float]:
        """‖g‖² in fp64 of each gradient of the step, in the order in which they came."""
        if any(parameter.grad is not None for parameter in self._parameters):
            raise AssertionError("a gradient bypassed the hooks of the fused update")
        return [float(square) for square in torch.stack(self._squares).tolist()] if self._squares else []

    def _update(self, holder: torch.Tensor | LowRankWeight) -> None:
        scale_gradients([holder], self._factor)
        self._squares.append(squared_norm(holder))
        self._take_step(self._step, holder)
        if isinstance(holder, torch.Tensor):
            holder.grad = None
