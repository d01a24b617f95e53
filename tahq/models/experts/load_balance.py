"""The loss that balances the load of experts, of one micro-batch, over layers that several stages have.

    L = coefficient · E · Σᵢ fᵢ·Pᵢ,   fᵢ = countsᵢ / R,   Pᵢ = Σ probabilitiesᵢ / R

`pooled`: counts and probabilities are summed over the R = layers · T rows of all routers, as transformers'
`load_balancing_loss_func` does (Switch Transformer Eq. 4 to 6). Both sums travel with the activations; each stage
adds its layers to them, so that the last one has them of all. Of a pooled loss, the gradient of a layer's
probabilities needs the total counts, and these travel back with the gradients. `per_layer`: the mean of each layer's
own loss, for which nothing travels.

Counts are whole numbers, and layers are added in their order, so no bit depends on where the model is cut. The loss of
a step is the mean of its micro-batches' losses.

Shapes: T tokens of a micro-batch, E experts, K choices of a token.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from tahq.errors import ModelError
from tahq.models.config import RouterLossKey
from tahq.models.experts.expert_products import Routed
from tahq.models.families import num_experts
from tahq.models.model_spec import ModelSpec


@dataclass(frozen=True)
class RouterLoss:
    """The load-balancing loss of a model."""

    is_pooled: bool
    num_experts: int
    num_layers: int
    """Those with experts, of the whole model."""
    coefficient: float

    @cached_property
    def num_sent(self) -> tuple[int, int]:
        """Numbers that travel with an activation, and with a gradient."""
        return (2 * self.num_experts, self.num_experts) if self.is_pooled else (0, 0)

    def begin(self, num_tokens: int, scale: float, device: torch.device) -> "Balance":
        """A micro-batch of T tokens, whose loss is differentiated times `scale`."""
        return Balance(self, num_tokens, scale, torch.zeros(2, self.num_experts, device=device))


def router_loss_of(key: RouterLossKey, spec: ModelSpec) -> RouterLoss | None:
    """The loss that `training.router_aux_loss` names; None: there is none.

    `auto`: pooled where config.json has `output_router_logits: true`, as when transformers trains the model.

    Raises:
        ModelError: the model is no mixture of experts.
    """
    layout, config = spec.layout, spec.hf_config
    if layout.experts is None:
        if key in ("pooled", "per_layer"):
            raise ModelError(
                f"training.router_aux_loss: {key} is for mixtures of experts, and {spec.family} is none: leave it out"
            )
        return None
    if key == "auto":
        key = "pooled" if config.output_router_logits else "none"
    num_layers = sum(layout.has_experts(config, block) for block in range(spec.num_layers))
    if key == "none" or not num_layers:
        return None
    return RouterLoss(key == "pooled", num_experts(config), num_layers, float(config.router_aux_loss_coef))


@dataclass(slots=True)
class Balance:
    """The loss of one micro-batch in one chunk."""

    loss: RouterLoss
    num_tokens: int
    scale: float
    sums: torch.Tensor
    """Of the layers so far: counts and sums of probabilities, fp32 [2, E]; those of earlier chunks come first."""
    totals: torch.Tensor | None = None
    """Counts of all layers [E]; set before the backward of a pooled loss."""
    values: list[torch.Tensor] = field(default_factory=list)
    """The losses of this chunk's layers, if each has its own."""

    def routed(self, result: Routed) -> Routed:
        """Count what a router returned, and let its backward add the gradient of the loss."""
        logits, weights, chosen = result
        counts = torch.bincount(chosen.flatten(), minlength=self.loss.num_experts).float()
        if torch._C._current_graph_task_id() < 0:  # a recomputed block was counted before
            own = torch.stack((counts, torch.softmax(logits.detach().float(), -1).sum(0)))
            if self.loss.is_pooled:
                self.sums = self.sums + own
            else:
                self.values.append(self._value(own, self.num_tokens) / self.loss.num_layers)
        weights = _Balanced.apply(weights, logits, self, counts)  # type: ignore[no-untyped-call]
        return logits, weights, chosen

    def value(self) -> torch.Tensor:
        """The loss of the micro-batch, times its coefficient: behind the last layer, or of this chunk's layers."""
        if self.loss.is_pooled:
            return self._value(self.sums, self._num_rows)
        return torch.stack(self.values).sum() if self.values else self.sums.new_zeros(())

    def slopes(self, counts: torch.Tensor) -> torch.Tensor:
        """The derivative by each probability of an expert [E]; `counts`: of the probabilities' own layer."""
        factor = self.loss.coefficient * self.loss.num_experts * self.scale
        if not self.loss.is_pooled:
            return counts * (factor / self.num_tokens**2 / self.loss.num_layers)
        assert self.totals is not None, "set when the backward begins"
        return self.totals * (factor / self._num_rows**2)

    @property
    def _num_rows(self) -> int:
        return self.num_tokens * self.loss.num_layers

    def _value(self, sums: torch.Tensor, num_rows: int) -> torch.Tensor:
        counts, probabilities = sums / num_rows
        value: torch.Tensor = (counts * probabilities).sum() * (self.loss.num_experts * self.loss.coefficient)
        return value


class _Balanced(torch.autograd.Function):
    """The weights of choices, unchanged; the backward adds the gradient of the loss to that of the logits."""

    @staticmethod
    def forward(
        ctx: Any, weights: torch.Tensor, logits: torch.Tensor, balance: Balance, counts: torch.Tensor
    ) -> torch.Tensor:
        ctx.balance, ctx.counts = balance, counts
        ctx.save_for_backward(logits)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (logits,) = ctx.saved_tensors
        probabilities, slopes = torch.softmax(logits.float(), -1), ctx.balance.slopes(ctx.counts)
        of_logits = probabilities * (slopes - (probabilities * slopes).sum(-1, keepdim=True))
        return gradients[0], of_logits.to(logits.dtype), None, None
