"""The subspace of one weight: its basis, when it is looked for again, and what was found on the way.

A step at which a search is due finds the new basis in the gradient of its *first* micro-batch and projects all of the
step's micro-batches by it; it is kept only if the step is applied. A gradient with NaN or infinity finds nothing, and
a step that is skipped keeps nothing: the search is then due again at the next step.
(docs/dev/decisions.md, 20)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from tahq.memory.galore.projection import Projection, ProjectionType, new_projection
from tahq.memory.galore.subspace import exact_basis, next_gap, randomised_basis, similarity

SvdMethod = Literal["exact", "randomised"]
_NEVER = -1
_NO_SIMILARITY = -1.0


@dataclass(frozen=True, slots=True)
class LazyRule:
    """How often a basis is looked for.

    `gap`: steps from one search to the next, at first; `max_gap`: at most. `queue` similarities in a row of at least
    `threshold` double it; `is_lazy` False: never.
    """

    gap: int = 200
    max_gap: int = 3200
    queue: int = 5
    threshold: float = 0.4
    is_lazy: bool = True


class LazySubspace:
    """A basis [r, d] and its history.

    Args:
        shape: (r, d).
        device: where it lies.
        kind: how the basis is kept.
        rule: how often it is looked for.
        svd: how.
    """

    def __init__(
        self, shape: tuple[int, int], device: torch.device, kind: ProjectionType, rule: LazyRule, svd: SvdMethod
    ) -> None:
        self.gap = rule.gap
        self.refreshed_at = _NEVER
        """Step of the last search; -1: there has been none."""
        self.num_searches = 0
        self._shape, self._device, self._kind, self._rule, self._svd = shape, device, kind, rule, svd
        self._kept = new_projection(kind, shape, device)
        self._found: Projection | None = None
        self._similarities: list[float] = []

    def is_due(self, step: int) -> bool:
        """Whether a basis is looked for at this step."""
        return self.refreshed_at == _NEVER or step - self.refreshed_at >= self.gap

    def search(self, gradient: torch.Tensor, seed: int) -> None:
        """Find a basis in a gradient [m, n]; in one that is not finite, none."""
        if not bool(torch.isfinite(gradient).all()):
            return
        rank = self._shape[0]
        basis = exact_basis(gradient, rank) if self._svd == "exact" else randomised_basis(gradient, rank, seed)
        self._found = new_projection(self._kind, self._shape, self._device)
        self._found.assign(basis)

    def basis(self, dtype: torch.dtype) -> torch.Tensor | None:
        """What this step projects by; None where none has ever been found."""
        if self._found is not None:
            return self._found.decoded(dtype)
        return None if self.refreshed_at == _NEVER else self._kept.decoded(dtype)

    @property
    def found_nbytes(self) -> int:
        """What is kept until COMMIT of a step that has found a basis."""
        return 0 if self._found is None else sum(tensor.nbytes for tensor in self._found.tensors().values())

    def keep(self, step: int) -> None:
        """The step is applied: what it found, if anything, stays."""
        if self._found is None:
            return
        if self.refreshed_at != _NEVER:
            self._note(similarity(self._kept.decoded(torch.float32), self._found.decoded(torch.float32)))
        for name, tensor in self._kept.tensors().items():
            tensor.copy_(self._found.tensors()[name])
        self.refreshed_at, self._found = step, None
        self.num_searches += 1

    def drop(self) -> None:
        """The step is not applied: forget what it found."""
        self._found = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """By the name of the state in a snapshot; tensors of numbers are copies."""
        missing = [_NO_SIMILARITY] * (self._rule.queue - len(self._similarities))
        numbers = {
            "gap": torch.tensor([self.gap, self.refreshed_at, self.num_searches]),
            "similarities": torch.tensor([*self._similarities, *missing], dtype=torch.float64),
        }
        return self._kept.tensors() | numbers

    def load(self, states: Mapping[str, torch.Tensor]) -> None:
        """Take the numbers of a snapshot; the tensors have been copied already."""
        self.gap, self.refreshed_at, self.num_searches = (int(number) for number in states["gap"])
        self._similarities = [x for x in states["similarities"].tolist() if x != _NO_SIMILARITY]
        self._found = None

    def _note(self, cosine: float) -> None:
        self._similarities = [*self._similarities, cosine][-self._rule.queue :]
        if self._rule.is_lazy:
            self.gap = next_gap(
                self.gap,
                self._similarities,
                queue=self._rule.queue,
                threshold=self._rule.threshold,
                max_gap=self._rule.max_gap,
            )
