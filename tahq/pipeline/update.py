"""The one place where weights change: a stage's parameters, told what the coordinator committed.

PREPARE is made of `squared_norms`, COMMIT comes back as (apply or skip, clip factor); only then does
`StageUpdate.apply` touch anything. Learning rates are a pure function of the step, so they are not sent.
"""

from collections.abc import Callable, Mapping

import torch
from torch.nn import Parameter

from tahq.pipeline.config import TrainingConfig
from tahq.pipeline.gradients import scale_gradients, squared_norms
from tahq.pipeline.learning_rate import learning_rate
from tahq.pipeline.optimizer import build_optimizer, load_optimizer_tensors, optimizer_tensors
from tahq.pipeline.tie import TiedEmbedding


class StageUpdate:
    """Optimizer and learning rate of one stage.

    Args:
        config: `training:`.
        parameters: the stage's parameters by canonical name, in model order.
        decayed: which of them weight decay applies to.
        total_steps: length of the run, for the learning-rate schedule.
        tied: its second copy is left out of the norm.
    """

    def __init__(
        self,
        config: TrainingConfig,
        parameters: Mapping[str, Parameter],
        decayed: Callable[[str, Parameter], bool],
        total_steps: int,
        tied: TiedEmbedding | None = None,
    ) -> None:
        self._config = config
        self._parameters = dict(parameters)
        self._total_steps = total_steps
        self._uncounted = tied.uncounted if tied is not None else None
        self.optimizer = build_optimizer(config, self._parameters, decayed)

    def squared_norms(self) -> list[float]:
        """‖g‖² in fp64 of each parameter, for PREPARE."""
        return squared_norms(p for p in self._parameters.values() if p is not self._uncounted)

    def apply(self, step: int, clip_factor: float) -> None:
        """Clip by the global factor and take the optimizer's step."""
        scale_gradients(self._parameters.values(), clip_factor)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self._config, step, self._total_steps)
        self.optimizer.step()
        self.discard()

    def discard(self) -> None:
        """Forget the gradients: after a step, or instead of one that is skipped."""
        self.optimizer.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Weights and optimizer states under the names that a snapshot has them by."""
        weights = {f"model/{name}": p.detach() for name, p in self._parameters.items()}
        states = optimizer_tensors(self.optimizer, self._parameters)
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
        states = {
            name.removeprefix("optimizer/"): read(name)
            for name in sorted(names)
            if name.startswith("optimizer/") and name.removeprefix("optimizer/").partition("/")[2] in self._parameters
        }
        if states:
            load_optimizer_tensors(self._config, self.optimizer, self._parameters, states)
