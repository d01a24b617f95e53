"""The FP8 optimizer: against torch's AdamW, against the reference, over every shape, and across snapshots."""

import pytest
import torch
from support.fp8_adamw_reference import adamw_reference, decode_reference, encode_reference
from support.fp8_moments import Trained, magnitudes_of, moment_format
from torch.nn import Parameter

from tahq.memory.coat.fp8_adamw import CHUNK_GROUPS, Fp8AdamW, step_in_torch
from tahq.memory.coat.fp8_adamw_numba import step_on_cpu
from tahq.memory.coat.fp8_groups import E4M3, E5M2, GROUP, UNEXPANDED, as_groups
from tahq.memory.config import Fp8AdamWConfig
from tahq.pipeline.config import TrainingConfig
from tahq.pipeline.update.optimizer import build_optimizer, load_optimizer_tensors, optimizer_nbytes, optimizer_tensors

STEPS = {"torch": step_in_torch, "cpu": step_on_cpu}
SIZES = [1, 127, 128, 4097, 33 * 77]
CONFIGS = [
    Fp8AdamWConfig(),
    Fp8AdamWConfig(expand_first=False, expand_second=False),
    Fp8AdamWConfig(first="e5m2", expand_second=False),
    Fp8AdamWConfig(second="e5m2", expand_first=False),
]
RATE, BETAS, DECAY = 1e-3, (0.9, 0.95), 0.1
every_config = pytest.mark.parametrize("stored", CONFIGS, ids=lambda each: "-".join(map(str, dict(each).values())))


def formats_of(stored: Fp8AdamWConfig):
    names = {"e4m3": E4M3, "e5m2": E5M2}
    return tuple(
        moment_format(names[name], expand)
        for name, expand in ((stored.first, stored.expand_first), (stored.second, stored.expand_second))
    )


def gradient(shape, step: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(step))


def take_steps(optimizer, parameter: Parameter, steps: range, scale: float = 1.0) -> None:
    for step in steps:
        parameter.grad = gradient(parameter.shape, step, scale)
        optimizer.step()


def trained_pair(shape, stored: Fp8AdamWConfig, steps: int, scale: float = 1.0):
    """Weights after some steps of ours and of torch's, and those before."""
    start = torch.randn(shape, generator=torch.Generator().manual_seed(99))
    ours, theirs = Parameter(start.clone()), Parameter(start.clone())
    groups = [{"params": [ours], "weight_decay": DECAY}]
    take_steps(Fp8AdamW(groups, stored, lr=RATE, betas=BETAS), ours, range(steps), scale)
    reference = torch.optim.AdamW([theirs], lr=RATE, betas=BETAS, weight_decay=DECAY, foreach=False)
    take_steps(reference, theirs, range(steps), scale)
    return ours.detach(), theirs.detach(), start


def test_first_step_is_torchs():
    """Moments are zero before, and used before they are quantised: 8 operations, each rounded by 2⁻²⁴ relative."""
    for shape in SIZES:
        ours, theirs, start = trained_pair(shape, Fp8AdamWConfig(), 1)
        tolerance = 8 * 2.0**-24 * start.abs().max().item()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6], ids=str)
@pytest.mark.parametrize("shape", [1, 127, 128, 4097, (33, 77), (5, 3, 129)], ids=str)
def test_fifty_steps_stay_near_torchs_adamw(shape, scale):
    """How far rounding of moments may move the weights, E4M3 with both moments expanded.

    A group of 128 Gaussian gradients has R = max/min of |m| of some 500, so k ≈ 12.3/ln 500 ≈ 2, and the half step of
    E4M3, 2⁻⁴, is q = 2⁻⁴/2 = 3.1 % of a value at most (for normal codes), q/√3 = 1.8 % on average; v, an average
    of 20 squares, has R ≈ 10, k ≈ 5 and half a percent. Roundings are independent, and the moment passes them on with
    β₁: the error of m is 1.8 %·β₁/√(1 − β₁²) = 3.7 % of m, that of √v 0.7 %·β₂/√(1 − β₂²)/2 ≈ 1 %. So an update, η·|u|
    with |u| ≈ 0.25 on average, is wrong by 0.04·η·0.25 = 0.01·η; errors last for 1/(1 − β₁) = 10 steps, so 50 of them
    add up to about √(50·10·2)·0.01·η = 0.3·η. Bounds: that in the mean, and six times that at most
    for the thousands of weights (normal: 4 σ, and the smallest of a group have subnormal codes).
    """
    ours, theirs, start = trained_pair(shape, Fp8AdamWConfig(), 50, scale)
    error = (ours - theirs).abs()
    moved = (theirs - start).abs().mean().item()
    assert error.mean().item() < 0.3 * RATE
    assert error.max().item() < 1.8 * RATE
    assert error.mean().item() < 0.05 * moved


@every_config
def test_every_format_learns_as_torchs_adamw_does(stored):
    """Half a step of E5M2 is 2⁻³, and not divided by k without expansion: 7 % on average, four times as above."""
    ours, theirs, start = trained_pair((64, 65), stored, 50)
    moved = theirs - start
    assert ((ours - start) * moved).sum() / moved.square().sum() == pytest.approx(1, abs=0.05)
    assert (ours - theirs).abs().mean().item() < 1.2 * RATE


@every_config
@pytest.mark.parametrize("numel", [*SIZES, CHUNK_GROUPS * GROUP + 5])
@pytest.mark.parametrize("name", STEPS)
def test_steps_are_the_references_to_the_bit(name, numel, stored):
    formats = formats_of(stored)
    got = Trained(STEPS[name], numel, formats).take_steps(range(1, 4))
    expected = Trained(step_by_reference, numel, formats).take_steps(range(1, 4))
    for left, right in zip(got.tensors(), expected.tensors(), strict=True):
        assert torch.equal(left, right)
    got.assert_nothing_else_was_written()


def step_by_reference(weights, gradients, moments, formats, numbers):
    """`adamw_reference` between the paper's formulas, on what `Trained` gives to a step."""
    count = weights.numel()
    values = [
        decode_reference(
            as_groups(moment.codes),
            moment.scales,
            moment.powers if moment.powers is not None else torch.full(moment.scales.shape, UNEXPANDED),
            magnitudes_of(by.format),
        )
        for moment, by in zip(moments, formats, strict=True)
    ]
    step = round(torch.tensor(1 - RATE / numbers.rate).log().item() / torch.tensor(0.9).log().item())
    updated, *new = adamw_reference(
        as_groups(weights),
        as_groups(gradients),
        tuple(values),
        step=step,
        lr=RATE,
        betas=BETAS,
        epsilon=1e-8,
        weight_decay=DECAY,
    )
    weights.copy_(updated.view(-1)[:count])
    for moment, by, value in zip(moments, formats, new, strict=True):
        codes, scales, powers = encode_reference(value, magnitudes_of(by.format), expand=by.expand)
        moment.codes.copy_(codes.view(-1)[:count])
        moment.scales.copy_(scales)
        if moment.powers is not None:
            moment.powers.copy_(powers)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-22, 1e-19, 1e15], ids=str)
def test_gradients_of_every_size(name, scale):
    """v is subnormal, or 0, below 10⁻¹⁹; near 10¹⁹ it is near the largest fp32."""
    formats = formats_of(Fp8AdamWConfig())
    got = Trained(STEPS[name], 4097, formats).take_steps(range(1, 4), scale)
    expected = Trained(step_by_reference, 4097, formats).take_steps(range(1, 4), scale)
    for left, right in zip(got.tensors(), expected.tensors(), strict=True):
        assert left.isfinite().all()
        assert torch.equal(left, right)


def config(stored: Fp8AdamWConfig | None = None) -> TrainingConfig:
    return TrainingConfig(steps=10, optimizer="fp8_adamw", lr=RATE, fp8_adamw=stored or Fp8AdamWConfig())


def stage_optimizer(parameters, stored=None):
    return build_optimizer(config(stored), parameters, lambda name, parameter: parameter.ndim > 1)


@every_config
def test_states_have_two_bytes_a_parameter_and_six_a_group(stored):
    parameters = {"w": Parameter(torch.ones(3, 100)), "b": Parameter(torch.ones(1))}
    optimizer = stage_optimizer(parameters, stored)
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    states = optimizer_tensors(optimizer, parameters)
    num_powers = stored.expand_first + stored.expand_second
    assert optimizer_nbytes(config(stored), [(3, 100), (1,)]) == 2 * 301 + 4 * (2 * 2 + num_powers)
    assert states["exp_avg/w"].shape == states["exp_avg_sq/w"].shape == (3, 100)
    kinds = {"exp_avg": torch.uint8, "exp_avg_scale": torch.bfloat16, "exp_avg_power": torch.uint8}
    for name, tensor in states.items():
        if not name.startswith("step/"):
            assert tensor.dtype == kinds[name.partition("/")[0].replace("_sq", "")]
    assert optimizer_nbytes(config(), [(1000, 1000)]) == pytest.approx(2.047e6, rel=1e-4)


def test_parameter_without_a_gradient_has_states_and_stays():
    parameters = {"w": Parameter(torch.ones(3, 100)), "unused": Parameter(torch.ones(2, 130))}
    optimizer = stage_optimizer(parameters)
    for step in range(2):
        parameters["w"].grad = gradient((3, 100), step)
        optimizer.step()
    assert torch.equal(parameters["unused"], torch.ones(2, 130))
    states = optimizer_tensors(optimizer, parameters)
    assert not states["exp_avg/unused"].any()
    assert states["step/unused"] == 0
    again = stage_optimizer(parameters)
    load_optimizer_tensors(config(), again, parameters, states)
    assert optimizer_tensors(again, parameters).keys() == states.keys()


@every_config
def test_resumed_is_uninterrupted_to_the_bit(stored):
    whole = Parameter(torch.ones(7, 61))
    uninterrupted = stage_optimizer({"w": whole}, stored)
    take_steps(uninterrupted, whole, range(6))
    first = Parameter(torch.ones(7, 61))
    before = stage_optimizer({"w": first}, stored)
    take_steps(before, first, range(3))
    second = Parameter(first.detach().clone())
    after = stage_optimizer({"w": second}, stored)
    load_optimizer_tensors(config(stored), after, {"w": second}, optimizer_tensors(before, {"w": first}))
    take_steps(after, second, range(3, 6))
    assert torch.equal(whole, second)
    expected = optimizer_tensors(uninterrupted, {"w": whole})
    for name, tensor in optimizer_tensors(after, {"w": second}).items():
        assert torch.equal(tensor, expected[name]), name


def test_parameter_that_is_not_contiguous_is_updated():
    ours, theirs = Parameter(torch.ones(6, 50).t()), Parameter(torch.ones(50, 6))
    assert not ours.is_contiguous()
    for parameter in (ours, theirs):
        take_steps(stage_optimizer({"w": parameter}), parameter, range(2))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e30], ids=str)
def test_moments_that_are_not_finite_are_stored_as_nan_and_spoil_no_neighbour(bad):
    """10³⁰ squared is beyond fp32. The engine skips steps with NaN; a state that has one shows in the next loss."""
    parameter = Parameter(torch.ones(300))
    optimizer = stage_optimizer({"w": parameter})
    parameter.grad = torch.ones(300)
    parameter.grad[7] = bad
    optimizer.step()
    optimizer.step()
    assert parameter.isnan().nonzero().flatten().tolist() == [7]
    assert optimizer.state[parameter]["exp_avg_sq"][7] & 0x7F == 0x7F


def test_half_precision_is_refused():
    with pytest.raises(ValueError, match=r"takes parameters in torch\.float32, got one in torch\.bfloat16"):
        Fp8AdamW([Parameter(torch.ones(3).bfloat16())], Fp8AdamWConfig())
