"""One step of AdamW on moments in FP8, in plain torch.

The order of operations is a contract: single sums, products, quotients and roots in fp32, each rounded once, none
fused, so that every device and kernel gives the same codes, scales and powers to the bit. So it does weights, but for
CUDA's kernel, which takes root and quotient as the device approximates them (`fp8_adamw_triton.UPDATE_ERROR`).

    m ← m + (1 − β₁)·(g − m);   v ← β₂·v + ((1 − β₂)·g)·g
    w ← w·(1 − η·λ) − η/(1 − β₁ᵗ) · (m / (√v · 1/√(1 − β₂ᵗ) + ε))

The root's correction is a factor, since torch divides by a number in one way on a CPU and in another on CUDA. Else
this is torch's AdamW: decay is decoupled, ε stands outside the root (COAT's Eq. 1 has it inside). The weights use m and
v as they are before they are quantised.
"""

from itertools import pairwise

import torch

from tahq.memory.adam.step import AdamwNumbers
from tahq.memory.coat.fp8_groups import GROUP, MomentFormat, StoredGroups, as_groups, decode, encode

CHUNK_GROUPS = 512
"""Groups that are in fp32 at a time, a quarter of a megabyte: temporaries stay small, and in the cache."""


def step_in_torch(
    weights: torch.Tensor,
    gradients: torch.Tensor,
    moments: tuple[StoredGroups, StoredGroups],
    formats: tuple[MomentFormat, MomentFormat],
    numbers: AdamwNumbers,
) -> None:
    """Take one step, in place, on any device.

    Args:
        weights: fp32 [N], contiguous.
        gradients: fp32 [N].
        moments: m and v, with codes [N].
        formats: theirs, with tables on the same device.
        numbers: of this step.
    """
    count = weights.numel()
    starts = [*range(0, count, CHUNK_GROUPS * GROUP), count]
    for start, stop in pairwise(starts):
        chunks = tuple(_part(moment, start, stop) for moment in moments)
        first, second = (
            decode(as_groups(chunk.codes), chunk.scales, chunk.powers, by)
            for chunk, by in zip(chunks, formats, strict=True)
        )
        part = weights[start:stop]
        updated, *new = _adamw(as_groups(part), as_groups(gradients[start:stop]), first, second, numbers)
        part.copy_(updated.view(-1)[: stop - start])
        for chunk, values, by in zip(chunks, new, formats, strict=True):
            _store(chunk, values, by)


def _adamw(
    weights: torch.Tensor, gradients: torch.Tensor, first: torch.Tensor, second: torch.Tensor, numbers: AdamwNumbers
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    first = first + (gradients - first) * numbers.rest1
    second = second * numbers.beta2 + (gradients * numbers.rest2) * gradients
    # torch's square root of fp32 errs by an ulp on a CPU; that of fp64 is right once it is rounded.
    denominator = second.double().sqrt().float() * numbers.root_factor + numbers.epsilon
    return weights * numbers.decay - (first / denominator) * numbers.rate, first, second


def _part(moment: StoredGroups, start: int, stop: int) -> StoredGroups:
    """A view of the groups of elements from `start`, a multiple of 128, to `stop`."""
    groups = slice(start // GROUP, -(-stop // GROUP))
    powers = moment.powers[groups] if moment.powers is not None else None
    return StoredGroups(moment.codes[start:stop], moment.scales[groups], powers)


def _store(moment: StoredGroups, values: torch.Tensor, by: MomentFormat) -> None:
    codes, scales, powers = encode(values, by)
    moment.codes.copy_(codes.view(-1)[: moment.codes.numel()])
    moment.scales.copy_(scales)
    if moment.powers is not None:
        moment.powers.copy_(powers)
