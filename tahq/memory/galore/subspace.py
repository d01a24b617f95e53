"""Which subspace a gradient is projected into, and how long it stays: pure functions.

A gradient G [m, n] with m ≥ n is projected from the right, by its first r right singular vectors, else from the left
by its first r left ones. Either way the basis is [r, d] with d = min(m, n), a vector a row, the leading one first.

    m ≥ n:  R = G·Pᵀ  [m, r],  back  R·P
    m < n:  R = P·G   [r, n],  back  Pᵀ·R

The basis is found anew every `gap` steps. If the leading vector has stayed where it was each of the last `queue`
times, |cos| ≥ threshold, the gap doubles, up to a cap: a layer that has settled is looked at less often.
The sign of a singular vector is arbitrary, hence |cos|; the authors' code has cos, and takes half of the stable
layers for unstable. Only the leading vector is compared, as their code does: those further down have nearly equal
singular values, and turn among themselves without the subspace moving.

Source: GaLore (Zhao et al. 2024) Alg. 1; Q-GaLore §3.2.
"""

import math
from collections.abc import Sequence

import torch

OVERSAMPLING = 8
POWER_ITERATIONS = 2


def is_right(shape: Sequence[int]) -> bool:
    """Whether gradients of this shape are projected from the right."""
    return shape[0] >= shape[1]


def low_rank_shape(shape: Sequence[int], rank: int) -> tuple[int, int]:
    """Of a projected gradient: [m, r] or [r, n]."""
    return (shape[0], rank) if is_right(shape) else (rank, shape[1])


def project(gradient: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """A gradient [m, n] in the subspace of `basis` [r, d], both of one dtype."""
    return gradient @ basis.t() if is_right(gradient.shape) else basis @ gradient


def project_back(low: torch.Tensor, basis: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """What `project` gave, as [m, n] = `shape`."""
    return low @ basis if is_right(shape) else basis.t() @ low


def exact_basis(gradient: torch.Tensor, rank: int) -> torch.Tensor:
    """The first `rank` singular vectors on the smaller side, fp32 [rank, d], by a whole SVD."""
    u, _, vh = torch.linalg.svd(gradient.float(), full_matrices=False)
    basis: torch.Tensor = vh[:rank] if is_right(gradient.shape) else u[:, :rank].t()
    return basis.contiguous()


def randomised_basis(gradient: torch.Tensor, rank: int, seed: int) -> torch.Tensor:
    """About the same vectors from `rank` + 8 random combinations, multiplied by the gradient five times.

    Source: Halko, Martinsson & Tropp 2011, Alg. 4.4 and 5.1, with the SVD of the small matrix by its Gram matrix.

    Args:
        gradient: [m, n].
        rank: r.
        seed: of the combinations; drawn on the gradient's device.

    Returns:
        fp32 [rank, d].
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


def next_gap(gap: int, similarities: Sequence[float], *, queue: int, threshold: float, max_gap: int) -> int:
    """Steps until the basis is found anew.

    Doubled, up to `max_gap`, where all of the last `queue` similarities are at least `threshold`.
    (200, [.5, .5, .5, .5, .5], queue 5, threshold .4) -> 400; with one of them .3, or only four of them, 200.
    """
    if len(similarities) < queue or min(similarities[-queue:]) < threshold:
        return gap
    return min(2 * gap, max(gap, max_gap))


def rank_of(shape: Sequence[int], rank: int | None) -> int:
    """The rank for a weight of this shape: as given, or a quarter of the smaller dimension; in [1, d]."""
    smaller = min(shape)
    return max(1, min(smaller, math.ceil(smaller / 4) if rank is None else rank))
