"""What tahq's AdamWs share with torch's, and their kernels, on CUDA and in Triton's interpreter, with plain torch.

Moments, codes and scales to the bit; weights to the bit in the interpreter, where roots are rounded correctly.
"""

import math
from collections.abc import Callable

import torch
from torch.nn import Parameter

from support.samples import normal
from tahq.memory.adam.adamw import (
    adamw8bit_states,
    bind_adamw8bit,
    plain_adamw_states,
    step_in_torch,
    take_step,
    takes_plain_kernel,
)
from tahq.memory.adam.blockwise8 import BLOCK, SMALLEST_SCALE, borders, encode
from tahq.memory.adam.loop import AdamwNumbers, State, StateSpecs, new_states

GROUP = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
CPU = torch.device("cpu")


def distances(build, shape, rates, gradient, steps: int = 50) -> tuple[torch.Tensor, torch.Tensor]:
    """After some steps: |x − x of torch's AdamW|, and the length of the latter's path, both in rates."""
    ours, theirs = Parameter(normal(shape, 0)), Parameter(normal(shape, 0))
    optimizer, reference = build([ours]), torch.optim.AdamW([theirs], foreach=False, **rates)
    path = torch.zeros(shape)
    for step in range(steps):
        before = theirs.detach().clone()
        ours.grad, theirs.grad = gradient(shape, step), gradient(shape, step)
        optimizer.step()
        reference.step()
        path += (theirs.detach() - before).abs()
    return (ours - theirs).detach().abs() / rates["lr"], path / rates["lr"]


def _sometimes_infinite(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    x = normal(shape, seed)
    x.view(-1)[5], x.view(-1)[-1] = math.inf, math.nan
    return x


GRADIENTS: dict[str, Callable[[tuple[int, ...], int], torch.Tensor]] = {
    "normal": normal,
    "many magnitudes": lambda shape, seed: normal(shape, seed) * 10 ** (3 * normal(shape, seed + 500)),
    "zeros": lambda shape, seed: torch.zeros(shape),
    "mostly zeros": lambda shape, seed: torch.where(normal(shape, seed) > 2, normal(shape, seed), 0.0),
    "constant": lambda shape, seed: torch.full(shape, -3.5),
    "tiny": lambda shape, seed: 1e-17 * normal(shape, seed),
    "subnormal": lambda shape, seed: 1e-40 * normal(shape, seed),
    "huge": lambda shape, seed: 1e18 * normal(shape, seed),
    "overflowing": lambda shape, seed: 1e30 * normal(shape, seed),
    "not finite": _sometimes_infinite,
}


def bound_step(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    state: State,
    numbers: AdamwNumbers,
    block: int,
    key: int | None = None,
) -> None:
    """One step by the kernels."""
    is_plain = takes_plain_kernel(weight, gradient, state["exp_avg"], state["exp_avg_sq"])
    assert is_plain or bind_adamw8bit(weight, gradient, state, block) is not None
    take_step(weight, gradient, state, numbers, block, key)


def check_8bit(
    shape: tuple[int, ...],
    device: torch.device,
    *,
    block: int = BLOCK,
    gradients: str = "normal",
    weight_dtype: torch.dtype = torch.float32,
    gradient_dtype: torch.dtype = torch.float32,
) -> None:
    """Assert that some steps on `device` give the weights, codes and scales of plain torch on the CPU."""
    size = (math.prod(shape),)
    states, weight = adamw8bit_states(size, block, 0), normal(size, 0).to(weight_dtype)
    _check(states, weight, device, block, lambda step: GRADIENTS[gradients](size, step).to(gradient_dtype))


def check_plain(
    shape: tuple[int, ...],
    device: torch.device,
    dtype: torch.dtype,
    *,
    gradients: str = "normal",
    weight_dtype: torch.dtype = torch.float32,
    gradient_dtype: torch.dtype = torch.float32,
    is_stochastic: bool = False,
) -> None:
    """The same with moments of fp32 or bf16."""
    size = (math.prod(shape),)
    states, weight = plain_adamw_states(size, dtype), normal(size, 0).to(weight_dtype)
    gradient = lambda step: GRADIENTS[gradients](size, step).to(gradient_dtype)  # noqa: E731
    _check(states, weight, device, BLOCK, gradient, is_stochastic=is_stochastic)


def _check(
    states: StateSpecs,
    weight: torch.Tensor,
    device: torch.device,
    block: int,
    gradient_of: Callable[[int], torch.Tensor],
    *,
    is_stochastic: bool = False,
) -> None:
    expected, found = ({"weights": weight.to(on, copy=True)} | new_states(states, on) for on in (CPU, device))
    for step in range(1, 4):
        gradient, numbers = gradient_of(step), AdamwNumbers.of(GROUP, step)
        key = 2**63 + step if is_stochastic else None
        step_in_torch(expected["weights"], gradient, expected, numbers, block, key)
        bound_step(found["weights"], gradient.to(device), found, numbers, block, key)
        _assert_same(found, expected)


def check_every_border(device: torch.device, signed: bool) -> None:
    """Moments on either side of, and on, every border between two codes, at scales from the smallest to the largest.

    The gradient is zero and β is 1, so that the kernel rounds the moment that it has read, which is one of the
    map's: so moments are given as gradients, with β₁ = β₂ = 0 and 1 − β = 1 in their place.
    """
    edges = borders(signed)
    near = torch.cat([edges, torch.nextafter(edges, torch.tensor(2.0)), torch.nextafter(edges, torch.tensor(0.0))])
    near = (torch.cat([near, -near]) if signed else near).repeat(2)  # for a program that is filled and one that is not
    numbers = AdamwNumbers(0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1e-8)
    for scale in (SMALLEST_SCALE, 3e-9, 0.7, 1.9999999, 2.0**126, 3.4e38):
        wanted = (near * scale).clamp(-scale, scale)
        gradient = wanted if signed else wanted.sqrt()
        rows = torch.nn.functional.pad(gradient, (0, -len(gradient) % (BLOCK - 1))).view(-1, BLOCK - 1)
        top = torch.full((len(rows), 1), scale if signed else math.sqrt(scale))
        gradient = torch.cat([top, rows], dim=1).reshape(-1)
        codes, scales = encode(gradient if signed else gradient.square(), signed)
        weight, found = torch.zeros(gradient.shape), new_states(adamw8bit_states(gradient.shape, BLOCK, 0), device)
        bound_step(weight.to(device), gradient.to(device), found, numbers, BLOCK)
        name = "exp_avg" if signed else "exp_avg_sq"
        _assert_same(found, {name: codes, f"{name}_scale": scales})


def _assert_same(found: State, expected: State) -> None:
    for name, theirs in expected.items():
        ours = found[name]
        wide, wide_theirs = ours.cpu().float(), theirs.float()
        if name == "weights" and ours.is_cuda:
            # Three steps of at most 10 rates (|m̂| ≤ 10·√v̂) of 2⁻²⁰, and three roundings of the weight itself.
            bound = 3 * (10 * GROUP["lr"] * 2**-20 + wide_theirs.abs() * torch.finfo(theirs.dtype).eps)
            same = (wide - wide_theirs).abs() <= bound
        else:
            same = wide == wide_theirs
        same |= wide.isnan() & wide_theirs.isnan()
        assert same.all(), f"{name}: {int((~same).sum())} of {same.numel()} differ"
