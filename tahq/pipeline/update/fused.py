"""The update within the backward: each weight takes its step as soon as its gradient is there, which is then freed.

For one stage, one micro-batch and no clipping: elsewhere a step is not decided before all gradients are there. Nothing
can be skipped any more either, so a step that is not finite ends the run (`training.non_finite: halt`), which goes on
from its newest snapshot. Every weight gets the bits that COMMIT would have given it.

Every gradient comes through a hook here, so of ordinary parameters never more than one has a gradient. Weight gradients
of a split backward come past autograd's hooks: zero-bubble is refused (`ClusterConfig`).

Source: Q-GaLore §3.5; Lv et al. 2023, Full Parameter Fine-tuning for LLMs with Limited Resources (LOMO), §3.1.
"""

from collections.abc import Callable, Iterable

import torch
from torch.nn import Parameter

from tahq.memory.galore.low_rank_weight import LowRankWeight
from tahq.pipeline.chunk import StepShape
from tahq.pipeline.gradients import scale_gradients, squared_norm


class FusedUpdate:
    """Hooks into the backward of one stage.

    Args:
        parameters: ordinary ones.
        low_rank: the others.
        take_step: (step, whose gradient has come) -> its optimizer's step.
        shape: of a step; what the engine multiplies gradients by is taken off before they are used.
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
            parameter.register_post_accumulate_grad_hook(self._update_parameter)  # type: ignore[no-untyped-call]
        for weight in low_rank:
            weight.on_gradient = self._update_weight

    def begin(self, step: int) -> None:
        """Gradients that come from now on are those of this step."""
        self._step = step
        self._squares = []

    def squared_norms(self) -> list[float]:
        """‖g‖² in fp64 of each gradient of the step, in the order in which they came."""
        if any(parameter.grad is not None for parameter in self._parameters):
            raise AssertionError("a gradient came past the hooks of the fused update")
        return [float(square) for square in torch.stack(self._squares).tolist()] if self._squares else []

    def _update_parameter(self, parameter: torch.Tensor) -> None:
        scale_gradients([parameter], self._factor)
        self._squares.append(squared_norm(parameter))
        self._take_step(self._step, parameter)
        parameter.grad = None

    def _update_weight(self, weight: LowRankWeight) -> None:
        scale_gradients([weight], self._factor)
        self._squares.append(squared_norm(weight))
        self._take_step(self._step, weight)
