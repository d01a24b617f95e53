"""The subspace into which a weight's gradients are projected: finding its basis, storing it, and how long it stays.

A gradient G [m, n] with m ≥ n is projected from the right, by its first r right singular vectors, otherwise from the
left by its first r left ones. Either way the basis is [r, d] with d = min(m, n), one vector per row, the leading one
first.

    m ≥ n:  R = G·Pᵀ  [m, r],  back  R·P
    m < n:  R = P·G   [r, n],  back  Pᵀ·R

The basis is searched anew every `gap` steps. If the leading vector has stayed similar, |cos| ≥ threshold, in each of
the last `queue` searches, the gap doubles, up to a limit. All matrices are searched in the first step; the second
search of each is due half a gap to one and a half gaps later, by its place in the model, so that each later step has
about an equal share of the searches (`LazyRule.spread`). The sign of a singular vector is arbitrary, hence |cos|; the
authors' code has cos, and takes half of the stable layers for unstable. Only the leading vector is compared, as in
their code: later ones have nearly equal singular values and rotate among themselves while the subspace stays.

A step with a search finds the new basis in the gradient of its *first* micro-batch and projects all of the step's
micro-batches by it; the basis is kept only if the step is applied. With NaN or infinity in the
gradient no basis is found, and a skipped step keeps none: the search is due again at the next step (decision 20).

An INT4 basis has a bf16 scale and a one-byte zero-point per 256 codes, 4.09 bits per number in all (the authors' code
uses a byte per code). Element 2i of the flattened basis is the low half of byte i, element 2i + 1 the high half.

Source: GaLore (Zhao et al. 2024) Alg. 1; Q-GaLore §3.2 and §3.3.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch

from tahq.memory.galore.stored_weight import GROUP, FullWeight, affine_kernels, decode, num_groups, scales
from tahq.memory.small_floats.block_codes import in_blocks

ProjectionType = Literal["int4", "bf16", "fp32"]
FLOATS = {"bf16": torch.bfloat16, "fp32": torch.float32}
_STEPS = 15
OVERSAMPLING = 8
POWER_ITERATIONS = 2
SvdMethod = Literal["exact", "randomised"]
_NEVER = -1
_NO_SIMILARITY = -1.0


def is_right(shape: Sequence[int]) -> bool:
    """Whether gradients of this shape are projected from the right."""
    return shape[0] >= shape[1]


def low_rank_shape(shape: Sequence[int], rank: int) -> tuple[int, int]:
    """The shape of a projected gradient: [m, r] or [r, n]."""
    return (shape[0], rank) if is_right(shape) else (rank, shape[1])


def project(gradient: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """A gradient [m, n] in the subspace of `basis` [r, d], both of one dtype."""
    return gradient @ basis.t() if is_right(gradient.shape) else basis @ gradient


def project_back(low: torch.Tensor, basis: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The inverse of `project` within the subspace: [m, n] = `shape`."""
    return low @ basis if is_right(shape) else basis.t() @ low


def exact_basis(gradient: torch.Tensor, rank: int) -> torch.Tensor:
    """The first `rank` singular vectors on the smaller side, fp32 [rank, d], by a full SVD."""
    u, _, vh = torch.linalg.svd(gradient.float(), full_matrices=False)
    basis: torch.Tensor = vh[:rank] if is_right(gradient.shape) else u[:, :rank].t()
    return basis.contiguous()


def randomised_basis(gradient: torch.Tensor, rank: int, seed: int) -> torch.Tensor:
    """About the same vectors from `rank` + 8 random combinations, multiplied by the gradient five times.

    The combinations are drawn on the gradient's device.

    Source: Halko, Martinsson & Tropp 2011, Alg. 4.4 and 5.1, with the SVD of the small matrix by its Gram matrix.
    """
    tall = gradient.float() if is_right(gradient.shape) else gradient.float().t()
    size = min(rank + OVERSAMPLING, tall.shape[1])
    generator = torch.Generator(tall.device).manual_seed(seed % 2**63)
    sample = torch.randn(tall.shape[0], size, generator=generator, device=tall.device)
    inner = torch.linalg.qr(tall.t() @ sample).Q
    for _ in range(POWER_ITERATIONS):
        inner = torch.linalg.qr(tall.t() @ (tall @ inner)).Q
    outer = tall @ inner
    _, vectors = torch.linalg.eigh(outer.t() @ outer)  # ascending
    basis: torch.Tensor = (inner @ vectors.flip(1)[:, :rank]).t()
    return basis.contiguous()


def similarity(old: torch.Tensor, new: torch.Tensor) -> float:
    """|cos| of the leading vectors of two bases [r, d]; 0.0 where one is all zeros."""
    a, b = old[0].double(), new[0].double()
    lengths = float(a.norm() * b.norm())
    return min(1.0, abs(float(a @ b)) / lengths) if lengths > 0 else 0.0


def rank_of(shape: Sequence[int], rank: int | None) -> int:
    """The rank for a weight of this shape: as given, or a quarter of the smaller dimension; in [1, d]."""
    smaller = min(shape)
    return max(1, min(smaller, math.ceil(smaller / 4) if rank is None else rank))


class Int4Projection:
    """r vectors of d numbers in INT4, all zeros until they are assigned or loaded."""

    def __init__(self, shape: tuple[int, int], device: torch.device) -> None:
        self.shape = shape
        numel = shape[0] * shape[1]
        self.packed = torch.zeros(-(-numel // 2), dtype=torch.uint8, device=device)
        self.zero = torch.zeros(num_groups(numel), dtype=torch.uint8, device=device)
        self.scale = torch.zeros(num_groups(numel), dtype=torch.bfloat16, device=device)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors themselves; see `Int8Weight.tensors`."""
        return {"": self.packed, "_zero": self.zero, "_scale": self.scale}

    def assign(self, basis: torch.Tensor) -> None:
        """Round fp32 [r, d] to nearest; an element moves by half a step at most.

        Both ends of the range round to the same side only if both lie halfway: the code 16 that this can give is at
        most half a step off once it is clamped to 15.
        """
        groups = in_blocks(basis.reshape(-1).float(), GROUP)
        scale, zero = scales(groups, _STEPS)
        zero = zero.round_()
        codes = (groups / scale[:, None]).round_().add_(zero[:, None]).clamp_(0, _STEPS)
        self.packed.copy_(pack(codes.to(torch.uint8).view(-1)[: basis.numel()]))
        self.zero.copy_(zero)
        self.scale.copy_(scale)

    def decoded(self, dtype: torch.dtype) -> torch.Tensor:
        """[r, d], in new memory."""
        kernels = affine_kernels(self.packed)
        if kernels is not None:
            out: torch.Tensor = kernels.decoded4(self, dtype)
            return out
        numel = self.shape[0] * self.shape[1]
        codes = in_blocks(unpack(self.packed, numel), GROUP)
        return decode(codes, self.zero, self.scale, dtype).view(-1)[:numel].view(self.shape)


Projection = Int4Projection | FullWeight


def new_projection(kind: ProjectionType, shape: tuple[int, int], device: torch.device) -> Projection:
    """An empty basis, all zeros."""
    return Int4Projection(shape, device) if kind == "int4" else FullWeight(shape, device, FLOATS[kind])


def pack(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [N] below 16 -> uint8 [⌈N/2⌉]: codes 1, 2, 3 are bytes 0x21, 0x03."""
    if codes.numel() % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    pairs = codes.view(-1, 2)
    return pairs[:, 0] | pairs[:, 1] << 4


def unpack(packed: torch.Tensor, count: int) -> torch.Tensor:
    """The inverse of `pack`, uint8 [count]."""
    return torch.stack((packed & 15, packed >> 4), dim=1).view(-1)[:count]


@dataclass(frozen=True, slots=True)
class LazyRule:
    """How often a basis is searched.

    `gap`: initial steps between searches; `max_gap`: their limit. `queue` similarities in a row of at least `threshold`
    double the gap; `is_lazy` False: never. `first_gap`: steps from the first search to the second; None: `gap`.
    """

    gap: int = 200
    max_gap: int = 3200
    queue: int = 5
    threshold: float = 0.4
    is_lazy: bool = True
    first_gap: int | None = None

    def spread(self, place: int, count: int) -> "LazyRule":
        """The rule of matrix `place` of the model's `count`: its second search is half to one and a half gaps later.

        The mean stays `gap`, as in the papers, so the number of searches does too, and no two bases are compared that
        are less than half a gap apart.
        """
        return replace(self, first_gap=self.gap // 2 + 1 + self.gap * place // count)

    def next_gap(self, gap: int, similarities: Sequence[float]) -> int:
        """Steps until the next search.

        Doubled, up to `max_gap`, where all of the last `queue` similarities are at least `threshold`.
        (200, [.5, .5, .5, .5, .5], queue 5, threshold .4) -> 400; with one of them .3, or only four of them, 200.
        """
        latest = similarities[-self.queue :]
        if not self.is_lazy or len(latest) < self.queue or min(latest) < self.threshold:
            return gap
        return min(2 * gap, max(gap, self.max_gap))


class LazySubspace:
    """A basis [r, d] and its history.

    `kind`: of the stored basis; `rule`: how often it is searched; `svd`: how it is computed.
    """

    def __init__(
        self, shape: tuple[int, int], device: torch.device, kind: ProjectionType, rule: LazyRule, svd: SvdMethod
    ) -> None:
        self.gap = rule.first_gap or rule.gap
        self.refreshed_at = _NEVER  # Step of the last search; -1: there has been none
        self.num_searches = 0
        self._rule, self._svd, self._rank = rule, svd, shape[0]
        self._new = partial(new_projection, kind, shape, device)
        self._kept = self._new()
        self._found: Projection | None = None
        self._similarities: list[float] = []

    def is_due(self, step: int) -> bool:
        """Whether a search is due at this step."""
        return self.refreshed_at == _NEVER or step - self.refreshed_at >= self.gap

    def search(self, gradient: torch.Tensor, seed: int) -> None:
        """Find a basis in a gradient [m, n], unless it is not finite."""
        if not bool(torch.isfinite(gradient).all()):
            return
        rank, is_exact = self._rank, self._svd == "exact"
        self._found = self._new()
        self._found.assign(exact_basis(gradient, rank) if is_exact else randomised_basis(gradient, rank, seed))

    def basis(self, dtype: torch.dtype) -> torch.Tensor | None:
        """This step's basis; None until one has been found."""
        if self._found is not None:
            return self._found.decoded(dtype)
        return None if self.refreshed_at == _NEVER else self._kept.decoded(dtype)

    @property
    def found_nbytes(self) -> int:
        """Bytes kept until COMMIT of a step that has found a basis."""
        return 0 if self._found is None else sum(tensor.nbytes for tensor in self._found.tensors().values())

    def keep(self, step: int) -> None:
        """Keep the basis that the step has found, if any, because the step is applied."""
        if self._found is None:
            return
        if self.refreshed_at != _NEVER:
            cosine = similarity(self._kept.decoded(torch.float32), self._found.decoded(torch.float32))
            self._similarities = [*self._similarities, cosine][-self._rule.queue :]
            gap = self._rule.gap if self.num_searches == 1 else self.gap
            self.gap = self._rule.next_gap(gap, self._similarities)
        for name, tensor in self._kept.tensors().items():
            tensor.copy_(self._found.tensors()[name])
        self.refreshed_at, self._found = step, None
        self.num_searches += 1

    def drop(self) -> None:
        """Forget the basis that the step has found, because the step is not applied."""
        self._found = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """By the name of the state in a checkpoint; numbers are copies."""
        missing = [_NO_SIMILARITY] * (self._rule.queue - len(self._similarities))
        return {f"projection{ending}": tensor for ending, tensor in self._kept.tensors().items()} | {
            "gap": torch.tensor([self.gap, self.refreshed_at, self.num_searches]),
            "similarities": torch.tensor([*self._similarities, *missing], dtype=torch.float64),
        }

    def load(self, states: Mapping[str, torch.Tensor]) -> None:
        """Load the numbers from a checkpoint; the tensors have been copied already."""
        self.gap, self.refreshed_at, self.num_searches = (int(number) for number in states["gap"])
        self._similarities = [x for x in states["similarities"].tolist() if x != _NO_SIMILARITY]
        self._found = None
