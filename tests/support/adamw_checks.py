"""What kernels of our AdamWs must share with plain torch, for tests on CUDA and in Triton's interpreter alike.

Moments, codes and scales to the bit; weights to the bit in the interpreter, where roots are rounded correctly.
"""

import math
from collections.abc import Callable

import torch

from tahq.memory.adam.adamw import adamw8bit_step
from tahq.memory.adam.blockwise8 import BLOCK, SMALLEST_SCALE, borders, encode, num_blocks, zero_codes
from tahq.memory.adam.step import AdamwNumbers, adamw_step

GROUP = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
CPU = torch.device("cpu")


def _normal(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _sometimes_infinite(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    x = _normal(shape, seed)
    x.view(-1)[5], x.view(-1)[-1] = math.inf, math.nan
    return x


GRADIENTS: dict[str, Callable[[tuple[int, ...], int], torch.Tensor]] = {
    "normal": _normal,
    "many magnitudes": lambda shape, seed: _normal(shape, seed) * 10 ** (3 * _normal(shape, seed + 500)),
    "zeros": lambda shape, seed: torch.zeros(shape),
    "mostly zeros": lambda shape, seed: torch.where(_normal(shape, seed) > 2, _normal(shape, seed), 0.0),
    "constant": lambda shape, seed: torch.full(shape, -3.5),
    "tiny": lambda shape, seed: 1e-17 * _normal(shape, seed),
    "subnormal": lambda shape, seed: 1e-40 * _normal(shape, seed),
    "huge": lambda shape, seed: 1e18 * _normal(shape, seed),
    "overflowing": lambda shape, seed: 1e30 * _normal(shape, seed),
    "not finite": _sometimes_infinite,
}


def step_8bit(weight, gradient, *states, block: int = BLOCK) -> None:
    """One step by the kernels; `states` end with the step's numbers."""
    from tahq.memory.adam import kernels

    *tensors, numbers = states
    kernels.bind_adamw8bit(weight, gradient, *tensors, block)(gradient, numbers.in_order())


def check_8bit(
    shape: tuple[int, ...],
    device: torch.device,
    *,
    gradients: str = "normal",
    block: int = BLOCK,
    weight_dtype: torch.dtype = torch.float32,
    gradient_dtype: torch.dtype = torch.float32,
    steps: int = 3,
) -> None:
    """Assert that some steps on `device` give the weights, codes and scales of plain torch on the CPU."""
    size = (math.prod(shape),)
    expected = [
        _normal(size, 0).to(weight_dtype),
        zero_codes(size, True, CPU),
        zero_codes(size, False, CPU),
        torch.zeros(num_blocks(size, block)),
        torch.zeros(num_blocks(size, block)),
    ]
    found = [each.to(device, copy=True) for each in expected]
    for step in range(1, steps + 1):
        gradient, numbers = GRADIENTS[gradients](size, step).to(gradient_dtype), AdamwNumbers.of(GROUP, step)
        adamw8bit_step(expected[0], gradient, *expected[1:], numbers, block)
        step_8bit(found[0], gradient.to(device), *found[1:], numbers, block=block)
        _assert_same(("weights", "codes of m", "codes of v", "scales of m", "scales of v"), found, expected)


def check_plain(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> None:
    """The same with moments of fp32 or bf16."""
    from tahq.memory.adam import kernels

    size = (math.prod(shape),)
    expected = [_normal(size, 0), torch.zeros(size, dtype=dtype), torch.zeros(size, dtype=dtype)]
    found = [each.to(device, copy=True) for each in expected]
    for step in range(1, 4):
        gradient, numbers = _normal(size, step), AdamwNumbers.of(GROUP, step)
        adamw_step(expected[0], gradient, *expected[1:], numbers)
        kernels.bind_plain_adamw(found[0], on_device := gradient.to(device), *found[1:])(on_device, numbers.in_order())
        _assert_same(("weights", "m", "v"), found, expected)


def check_every_border(device: torch.device, signed: bool) -> None:
    """Moments on either side of, and on, every border between two codes, at scales from the smallest to the largest.

    The gradient is zero and β is 1, so that the kernel rounds the moment that it has read, which is one of the
    map's: so moments are given as gradients, with β₁ = β₂ = 0 and 1 − β = 1 in their place.
    """
    edges = borders(signed)
    near = torch.cat([edges, torch.nextafter(edges, torch.tensor(2.0)), torch.nextafter(edges, torch.tensor(0.0))])
    near = (torch.cat([near, -near]) if signed else near).repeat(2)  # for a program that is filled and one that is not
    numbers = AdamwNumbers(0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1e-8)
    for scale in (SMALLEST_SCALE, 1.5 * SMALLEST_SCALE, 1e-30, 3e-9, 0.7, 1.0, 1.9999999, 3.0, 1e17, 2.0**126, 3.4e38):
        wanted = (near * scale).clamp(-scale, scale)
        gradient = wanted if signed else wanted.sqrt()
        rows = torch.nn.functional.pad(gradient, (0, -len(gradient) % (BLOCK - 1))).view(-1, BLOCK - 1)
        top = torch.full((len(rows), 1), scale if signed else math.sqrt(scale))
        gradient = torch.cat([top, rows], dim=1).reshape(-1)
        size, values = gradient.shape, gradient if signed else gradient.square()
        codes, scales = encode(values, signed)
        found = [torch.zeros(size), zero_codes(size, True, CPU), zero_codes(size, False, CPU)]
        found += [torch.zeros(len(rows)), torch.zeros(len(rows))]
        found = [each.to(device) for each in found]
        step_8bit(found[0], gradient.to(device), *found[1:], numbers)
        which = (found[1], found[3]) if signed else (found[2], found[4])
        _assert_same(("codes", "scales"), list(which), [codes, scales])


def _assert_same(names: tuple[str, ...], found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for name, ours, theirs in zip(names, found, expected, strict=True):
        wide, wide_theirs = ours.cpu().float(), theirs.float()
        if name == "weights" and ours.is_cuda:
            # Three steps of at most 10 rates (|m̂| ≤ 10·√v̂) of 2⁻²⁰, and three roundings of the weight itself.
            bound = 3 * (10 * GROUP["lr"] * 2**-20 + wide_theirs.abs() * torch.finfo(theirs.dtype).eps)
            same = (wide - wide_theirs).abs() <= bound
        else:
            same = wide == wide_theirs
        same |= wide.isnan() & wide_theirs.isnan()
        assert same.all(), f"{name}: {int((~same).sum())} of {same.numel()} differ"
