"""One step of AdamW in plain torch, each operation rounded once: the reference of the kernels.

    m ← β₁·m + (1 − β₁)·g                     v ← β₂·v + (1 − β₂)·g²
    x ← x·(1 − η·λ) − η/(1 − β₁^t) · m / (√v/√(1 − β₂^t) + ε)     (Loshchilov & Hutter 2019, Alg. 2)

This is torch's AdamW except for the order of some operations, which is fixed so that kernels can give bit-equal
moments: no multiply-add is fused, and the numbers of a step are computed once, in fp64, and rounded to fp32.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

SLICE = 1 << 18
"""Elements computed at a time, so that temporaries stay small: a multiple of every block."""


class AdamwNumbers(NamedTuple):
    """The scalars of one step of one parameter, in the order of the kernels' arguments."""

    beta1: float
    rest1: float
    """1 − β₁."""
    beta2: float
    rest2: float
    """1 − β₂."""
    decay: float
    """1 − η·λ."""
    rate: float
    """η/(1 − β₁^t)."""
    root_factor: float
    """1/√(1 − β₂^t)."""
    epsilon: float

    @classmethod
    def of(cls, group: Mapping[str, Any], step: int) -> "AdamwNumbers":
        """From an optimizer's group (`lr`, `betas`, `eps`, `weight_decay`) and the step t = 1, 2, …."""
        (beta1, beta2), lr = group["betas"], group["lr"]
        return cls(
            beta1=beta1,
            rest1=1 - beta1,
            beta2=beta2,
            rest2=1 - beta2,
            decay=1 - lr * group["weight_decay"],
            rate=lr / (1 - beta1**step),
            root_factor=1 / math.sqrt(1 - beta2**step),
            epsilon=group["eps"],
        )


def slices(num_elements: int) -> Iterator[slice]:
    """Pieces of at most SLICE elements."""
    return (slice(start, min(start + SLICE, num_elements)) for start in range(0, num_elements, SLICE))


def adamw_step(
    weight: torch.Tensor, gradient: torch.Tensor, m: torch.Tensor, v: torch.Tensor, numbers: AdamwNumbers
) -> None:
    """Take one step in place, slice by slice, in fp32; weight and moments [N] in bf16 are rounded to nearest."""
    for here in slices(weight.numel()):
        wide_m, wide_v = m[here].float(), v[here].float()
        adamw_slice(weight[here], gradient[here], wide_m, wide_v, numbers)
        if m.dtype != torch.float32:
            m[here].copy_(wide_m)
            v[here].copy_(wide_v)


def adamw_slice(
    weight: torch.Tensor, gradient: torch.Tensor, m: torch.Tensor, v: torch.Tensor, numbers: AdamwNumbers
) -> None:
    """The same for one slice, with fp32 moments that are not rounded."""
    gradient = gradient.float()
    m.mul_(numbers.beta1).add_(gradient * numbers.rest1)
    v.mul_(numbers.beta2).add_(gradient.square().mul_(numbers.rest2))
    # torch's own fp32 root is off by a unit here and there on CPUs; that of fp64, rounded, never is.
    denominator = v.double().sqrt_().float().mul_(numbers.root_factor).add_(numbers.epsilon)
    change = denominator.reciprocal_().mul_(m).mul_(numbers.rate)
    weight.copy_(weight.float() * numbers.decay - change)
