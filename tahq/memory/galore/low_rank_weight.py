"""One weight that is trained in a low-rank subspace: its storage, its subspace, its moments.

Invariants:
- the gradient of a micro-batch is projected as soon as it is computed and added to `grad`, in ascending order; nothing
  of its full size outlives that;
- between two steps' `apply` the weight does not change, and `discard` leaves no trace of a step;
- everything is a function of (weight, states, gradients, step, name), not of the stage that owns the weight.

At a rank equal to the smaller dimension a projection would only be a rotation, so the gradient is used directly, and
without quantisation the update is AdamW's. Embedding and head are such weights.

Source: Q-GaLore §3.5; GaLore (Zhao et al. 2024), Alg. 2.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from tahq.errors import SnapshotError
from tahq.memory.adam.adamw import adamw8bit_states, plain_adamw_states, take_step
from tahq.memory.adam.loop import AdamwNumbers, StateSpecs, new_states
from tahq.memory.galore.stored_weight import FullWeight, Int8Weight
from tahq.memory.galore.subspace import (
    FLOATS,
    LazyRule,
    LazySubspace,
    ProjectionType,
    SvdMethod,
    low_rank_shape,
    project,
    project_back,
    rank_of,
)
from tahq.memory.offload.host_part import HostPart
from tahq.randomness import derive_seed

MomentType = Literal["int8", "fp32"]
WeightType = Literal["int8", "bf16", "fp32"]
_WHOLE = 2**63  # A rank large enough that nothing is projected
_NUMBERS = ("step", "gap", "similarities")  # States that are numbers, made for each checkpoint


@dataclass(frozen=True, slots=True)
class LowRankSettings:
    """How the weights of a run are stored and trained; see `QGaLoreConfig`."""

    rank: int | None = None
    scale: float = 0.25
    rule: LazyRule = field(default_factory=LazyRule)
    weights: WeightType = "int8"
    projections: ProjectionType = "int4"
    states: MomentType = "int8"
    is_stochastic: bool = True
    svd: SvdMethod = "exact"
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8
    seed: int = 0
    ends: WeightType = "fp32"  # Embedding and head: with fp32 they stay ordinary parameters
    is_end: bool = False
    """Whether these are for embedding or head, whose bf16 is rounded stochastically too, unlike GaLore's."""

    def of_ends(self) -> "LowRankSettings":
        """Settings of embedding and head: nothing is projected, so no update is scaled."""
        return replace(self, rank=_WHOLE, scale=1.0, weights=self.ends, is_end=True)

    def moment_states(self, shape: tuple[int, int]) -> StateSpecs:
        """Adam's moments for a gradient of this shape, and a counter."""
        if self.states == "int8":
            return adamw8bit_states(shape, min_elements=0)
        return plain_adamw_states(shape, torch.float32)


class LowRankWeight:
    """A weight [m, n], its subspace and its moments, all zeros until they are assigned or loaded.

    The canonical `name` is, with the run's seed and the step, the key of random draws; `drawn_as` replaces it in
    the key of a second copy of a matrix, since both copies must be rounded alike.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, int],
        settings: LowRankSettings,
        device: torch.device,
        drawn_as: str | None = None,
    ) -> None:
        self.name, self.shape, self.device = name, torch.Size(shape), device
        self.grad: torch.Tensor | None = None
        """Sum of the step's projected gradients so far, fp32, or None before the first."""
        self.on_gradient: Callable[[LowRankWeight], None] | None = None
        """Called after each micro-batch's gradient, to take a step with it or to store it."""
        self.is_fused = False
        """Whether that takes the step: then the gradient is no sum, and keeps its type."""
        self.host: HostPart | None = None
        """The moments in host memory."""
        self.gradient_codes: object | None = None
        """The sum, where it is stored in codes."""
        self.on_search: Callable[[], None] | None = None
        """Called after each search for a subspace."""
        self.settings = settings
        self._drawn_as = drawn_as or name
        rank, smaller = rank_of(shape, settings.rank), min(shape)
        self.low_shape = low_rank_shape(shape, rank)
        self.subspace: LazySubspace | None = None
        if rank < smaller:
            self.subspace = LazySubspace((rank, smaller), device, settings.projections, settings.rule, settings.svd)
        self.storage: Int8Weight | FullWeight
        if settings.weights == "int8":
            self.storage = Int8Weight(shape, device)
        else:
            self.storage = FullWeight(shape, device, FLOATS[settings.weights])
        self.moments = new_states(settings.moment_states(self.low_shape), device)
        del self.moments["step"]
        self._num_updates = 0
        self._step = 0
        self._dtype = torch.float32

    def numel(self) -> int:
        """Elements of the weight."""
        return self.shape.numel()

    def copy_(self, values: torch.Tensor) -> None:
        """Store these values [m, n], of any float type."""
        self.storage.assign(values)

    def begin(self, step: int) -> bool:
        """Begin a step: later gradients belong to it. Returns whether a search for a subspace is due."""
        self._step = step
        return self.subspace is not None and self.subspace.is_due(step)

    @torch.no_grad()
    def take(self, gradient: torch.Tensor) -> None:
        """Project the gradient [m, n] of the step's next micro-batch and add it, in fp32 unless it is the only one.

        Without a basis, because no gradient so far was finite, the sum is NaN and the step is skipped.
        """
        self._dtype = gradient.dtype
        low = self._projected(gradient)
        low = low if self.is_fused else low.to(torch.float32)
        if self.grad is None:
            self.grad = low
        else:
            self.grad.add_(low)
        if self.on_gradient is not None:
            self.on_gradient(self)

    def _projected(self, gradient: torch.Tensor) -> torch.Tensor:
        if self.subspace is None:
            return gradient
        is_first = self.grad is None and self.gradient_codes is None
        if is_first and self.subspace.is_due(self._step):
            self.subspace.search(gradient, derive_seed(self.settings.seed, "subspace", self.name, self._step))
            if self.on_search is not None:
                self.on_search()
        basis = self.subspace.basis(gradient.dtype)
        if basis is None:
            return torch.full(self.low_shape, torch.nan, device=gradient.device)
        return project(gradient, basis)

    @torch.no_grad()
    def apply(self, step: int, lr: float, weight_decay: float) -> None:
        """Take the optimizer's step with the summed gradients, if there are any and a basis has been found.

        W ← (1 − η·λ)·W − η·scale·back(direction), in fp32, then rounded.
        """
        if self.grad is None:
            return
        basis = None if self.subspace is None else self.subspace.basis(self._dtype)
        if self.subspace is not None and basis is None:
            self.discard()
            return
        update = self._direction(self.grad)
        self.grad = None
        if self.subspace is not None and basis is not None:
            update = project_back(update.to(self._dtype), basis, self.shape)
            self.subspace.keep(step)
        rate = -lr * self.settings.scale
        self.storage.add(update, keep=1 - lr * weight_decay, rate=rate, key=self._rounding_key(step))

    def _direction(self, gradient: torch.Tensor) -> torch.Tensor:
        """Update the moments with a step's gradient; returns Adam's direction, fp32, to be descended.

            m ← β₁·m + (1 − β₁)·g,  v ← β₂·v + (1 − β₂)·g²
            direction = m / (1 − β₁ᵗ) / (√v / √(1 − β₂ᵗ) + ε)                (Kingma & Ba 2015, Alg. 1)

        t counts this weight's own steps. The step is that of tahq's AdamW, at rate −1 on a weight of 0, so it uses the
        same kernels, and the direction uses the moments before they are rounded to 8 bits.
        """
        self._num_updates += 1
        betas, epsilon = self.settings.betas, self.settings.epsilon
        group = {"lr": -1.0, "betas": betas, "eps": epsilon, "weight_decay": 0.0}
        numbers = AdamwNumbers.of(group, self._num_updates)
        direction = torch.zeros(gradient.shape, device=gradient.device)
        flat, flat_gradient = direction.view(-1), gradient.reshape(-1)
        take_step(flat, flat_gradient, self.moments, numbers)
        return direction

    def _rounding_key(self, step: int) -> int | None:
        """None: to nearest."""
        is_drawn = self.settings.weights == "int8" or self.settings.is_end
        if not (is_drawn and self.settings.is_stochastic):
            return None
        return derive_seed(self.settings.seed, "weight rounding", self._drawn_as, step)

    def discard(self) -> None:
        """Forget the step's gradients and the basis found in them."""
        self.grad = self.gradient_codes = None
        if self.subspace is not None:
            self.subspace.drop()

    def weight_tensors(self) -> dict[str, torch.Tensor]:
        """The weight's tensors in a checkpoint, by `<folder>/<canonical name>`; the tensors themselves."""
        return {f"model{ending}/{self.name}": tensor for ending, tensor in self.storage.tensors().items()}

    def states(self) -> dict[str, torch.Tensor]:
        """The states in a checkpoint, by `<state>/<canonical name>`; counters are copies."""
        states = self.moments | {"step": torch.tensor(self._num_updates)}
        if self.host is not None:
            states |= {name: item.values for name, item in self.host.states.items()}
        if self.subspace is not None:
            states |= self.subspace.tensors()
        return {f"{state}/{self.name}": tensor for state, tensor in states.items()}

    @torch.no_grad()
    def load(self, read: Callable[[str], torch.Tensor]) -> None:
        """Load weight and states, bit-exactly, from tensors by name; SnapshotError if one has another shape or type."""
        for name, tensor in self.weight_tensors().items():
            tensor.copy_(_checked(name, read(name), tensor))
        numbers: dict[str, torch.Tensor] = {}
        for name, tensor in self.states().items():
            value, state = _checked(name, read(f"optimizer/{name}"), tensor), name.partition("/")[0]
            if state in _NUMBERS:
                numbers[state] = value
            else:
                tensor.copy_(value)
        self._num_updates = int(numbers["step"])
        if self.subspace is not None:
            self.subspace.load(numbers)
        self.grad = None


def _checked(name: str, value: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    if value.shape != expected.shape or value.dtype != expected.dtype:
        raise SnapshotError(
            f"{name} is {value.dtype} {list(value.shape)} in the checkpoint, expected {expected.dtype} "
            f"{list(expected.shape)}: the checkpoint is from another model, or from other settings of training.qgalore"
        )
    return value
