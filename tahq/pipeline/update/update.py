"""The one place where weights change: a stage's parameters, told what the coordinator committed.

PREPARE is made of `squared_norms`, COMMIT comes back as (apply or skip, clip factor); only then does
`StageUpdate.apply` touch anything. Learning rates are a pure function of the step, so they are not sent.
Under `training.qgalore.fused` the backward itself has applied the step (`fused_update.py`): COMMIT finds nothing left.
"""

from collections.abc import Callable, Mapping

import torch
from torch.nn import Parameter

from tahq.memory.galore.low_rank_weight import LowRankWeight
from tahq.pipeline.chunk import StepShape
from tahq.pipeline.config import TrainingConfig
from tahq.pipeline.gradients import HoldsGradient, scale_gradients, squared_norms
from tahq.pipeline.tie import TiedEmbedding
from tahq.pipeline.update.fused import FusedUpdate
from tahq.pipeline.update.learning_rate import learning_rate
from tahq.pipeline.update.optimizer import build_optimizer, load_optimizer_tensors, optimizer_tensors


class StageUpdate:
    """Optimizer and learning rate of one stage.

    Args:
        config: `training:`.
        parameters: the stage's parameters by canonical name, in model order.
        decayed: which of them weight decay applies to.
        total_steps: length of the run, for the learning-rate schedule.
        tied: its second copy is left out of the norm.
        low_rank: what the stage has beside its parameters, by canonical name.
        shape: of a step; needed where the update is fused.
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
        """Gradients that come from now on are those of this step."""
        for weight in self._low_rank.values():
            weight.begin(step)
        if self._fused is not None:
            self._fused.begin(step)

    def squared_norms(self) -> list[float]:
        """‖g‖² in fp64 of each parameter, for PREPARE; of low-rank weights, of what was accumulated."""
        if self._fused is not None:
            return self._fused.squared_norms()
        return squared_norms(p for p in self._gradient_holders() if p is not self._uncounted)

    def apply(self, step: int, clip_factor: float) -> None:
        """Clip by the global factor and take the optimizer's step."""
        scale_gradients(self._gradient_holders(), clip_factor)
        lr = self._rate(step)
        self.optimizer.step()
        for weight in self._low_rank.values():
            weight.apply(step, lr, self._config.weight_decay)
        self.discard()

    def discard(self) -> None:
        """Forget the gradients: after a step, or instead of one that is skipped."""
        self.optimizer.zero_grad(set_to_none=True)
        for weight in self._low_rank.values():
            weight.discard()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Weights and optimizer states under the names that a snapshot has them by."""
        weights = {f"model/{name}": p.detach() for name, p in self._parameters.items()}
        states = optimizer_tensors(self.optimizer, self._parameters)
        for weight in self._low_rank.values():
            weights |= weight.weight_tensors()
            states |= weight.states()
        return weights | {f"optimizer/{name}": tensor for name, tensor in states.items()}

    @torch.no_grad()
    def load(self, read: Callable[[str], torch.Tensor], names: set[str]) -> None:
        """Take weights and optimizer states from a snapshot, bit for bit.

        Args:
            read: a tensor by its name in the snapshot.
            names: all names in the snapshot.
        """
        for name, parameter in self._parameters.items():
            parameter.copy_(read(f"model/{name}"))
        for weight in self._low_rank.values():
            weight.load(read)
        states = {
            name.removeprefix("optimizer/"): read(name)
            for name in sorted(names)
            if name.startswith("optimizer/") and name.removeprefix("optimizer/").partition("/")[2] in self._parameters
        }
        if states:
            load_optimizer_tensors(self._config, self.optimizer, self._parameters, states)

    def _gradient_holders(self) -> list[HoldsGradient]:
        return [*self._parameters.values(), *self._low_rank.values()]

    def _step_alone(self, step: int, holder: torch.Tensor | LowRankWeight) -> None:
        """Take the step of one weight: a low-rank one, or the only parameter that has a gradient."""
        lr = self._rate(step)
        if isinstance(holder, LowRankWeight):
            holder.apply(step, lr, self._config.weight_decay)
        else:
            self.optimizer.step()

    def _rate(self, step: int) -> float:
        """The step's learning rate, which the optimizer is told."""
        lr = learning_rate(self._config, step, self._total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr
