"""The fused kernel against plain torch in Triton's interpreter; on CUDA, tests/gpu/test_fp8_adamw.py."""

import pytest
import torch
from support.fp8_moments import Trained, Unaligned, awkward_groups, moment_format, numbers_of, same_bits

from tahq.memory.coat.fp8_adamw import step_in_torch
from tahq.memory.coat.fp8_groups import E4M3, E5M2, StoredGroups, encode
from tahq.quant.backends import interprets_triton

pytestmark = [
    pytest.mark.skipif(not interprets_triton(), reason="needs TRITON_INTERPRET=1; test_interpreted_kernels.py sets it"),
    # numpy reports what a device computes silently: logarithms of 0, ∞ − ∞.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
FORMATS = {
    "coat": (moment_format(E4M3, True), moment_format(E4M3, True)),
    "plain": (moment_format(E4M3, False), moment_format(E4M3, False)),
    "e5m2 first": (moment_format(E5M2, True), moment_format(E4M3, False)),
    "e5m2 second": (moment_format(E4M3, False), moment_format(E5M2, True)),
}
every_format = pytest.mark.parametrize("formats", FORMATS.values(), ids=FORMATS)
acceptance = pytest.mark.acceptance


def step_in_triton(*arguments) -> None:
    from tahq.memory.coat.fp8_adamw_kernels import step_on_cuda

    step_on_cuda(*arguments)


def assert_equal_steps(numel, formats, steps=3, gradient_scale=1.0, trained=Trained):
    got = trained(step_in_triton, numel, formats).take_steps(range(1, steps + 1), gradient_scale)
    expected = Trained(step_in_torch, numel, formats).take_steps(range(1, steps + 1), gradient_scale)
    for left, right in zip(got.tensors(), expected.tensors(), strict=True):
        assert torch.equal(left, right)
    got.assert_nothing_else_was_written()


@every_format
@pytest.mark.parametrize("numel", [300, *(pytest.param(n, marks=acceptance) for n in (1, 127, 128, 4097, 33 * 77))])
def test_steps_are_equal_to_the_bit_and_write_nothing_else(numel, formats):
    """300 elements are a full program and a partial one."""
    assert_equal_steps(numel, formats, steps=2 if numel == 300 else 3)


@acceptance
def test_tensors_at_any_address():
    assert_equal_steps(4100, FORMATS["coat"], steps=2, trained=Unaligned)


@acceptance
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-22, 1e-19, 1e15], ids=str)
def test_gradients_of_every_size(scale):
    assert_equal_steps(4097, FORMATS["coat"], gradient_scale=scale)


@pytest.mark.parametrize(
    "formats", [FORMATS["coat"], *(pytest.param(each, marks=acceptance) for each in list(FORMATS.values())[1:])]
)
def test_groups_of_every_sort(formats):
    """As old moments, and as gradients: zeros, constants, subnormal, huge, not finite."""
    groups = torch.cat(list(awkward_groups(2).values()))
    outcomes = []
    for step in (step_in_triton, step_in_torch):
        stored = [encode(x, by) for x, by in zip((groups, groups.abs()), formats, strict=True)]
        moments = tuple(
            StoredGroups(codes.view(-1), scales, powers if by.expand else None)
            for (codes, scales, powers), by in zip(stored, formats, strict=True)
        )
        weights = torch.ones(groups.numel())
        gradients = groups.flip(0).reshape(-1)
        step(weights, gradients, moments, formats, numbers_of(2, 1e-3, (0.9, 0.95), 1e-8, 0.1))
        kept = [part for moment in moments for part in (moment.codes, moment.scales, moment.powers)]
        outcomes.append([weights, *(part.float() for part in kept if part is not None)])
    for left, right in zip(*outcomes, strict=True):
        assert same_bits(left, right)
