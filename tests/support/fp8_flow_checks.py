"""What the kernels of the FP8 precision flow must share with the reference, in the interpreter and on CUDA alike."""

import torch

from support.kernel_checks import awkward
from tahq.memory.coat import fp8_flow_reference as reference
from tahq.memory.coat.fp8_codes import E4M3, E5M2, GroupCodes, TensorCodes

# A sigmoid that differs in its last bits moves a product of three numbers by less than this, relatively.
FP32_ROUNDINGS = 2.0**-20
EPSILON = 1e-5


def matrices(tokens: int, channels: int) -> dict[str, torch.Tensor]:
    """What may meet a quantiser, fp32 [T, C]."""
    generator = torch.Generator().manual_seed(tokens + channels)
    gaussian = torch.randn(tokens, channels, generator=generator)
    outliers = gaussian.clone()
    outliers[torch.rand(tokens, channels, generator=generator) < 0.01] *= 300
    bad = gaussian.clone()
    bad.view(-1)[torch.randint(bad.numel(), (3,), generator=generator)] = torch.tensor(
        [torch.nan, torch.inf, -torch.inf]
    )
    made = {"gaussian": gaussian, "outliers": outliers, "awkward": awkward((tokens, channels))}
    made |= {
        "zeros": torch.zeros(tokens, channels),
        "constant": torch.full((tokens, channels), -3.5),
        "not finite": bad,
    }
    made["tiny"] = gaussian * 2.0**-130
    made["huge"] = gaussian.clamp(-3, 3) * 2.0**125
    return made


def values(codes: torch.Tensor) -> torch.Tensor:
    """FP8 codes as fp32 on the CPU."""
    return codes.cpu().float()


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal numbers, any NaN being equal to any."""
    return torch.equal(
        *(torch.where(each.isnan(), 12345.0, each) for each in (left.cpu().float(), right.cpu().float()))
    )


def check_groups(kernels, x: torch.Tensor, got: GroupCodes) -> None:
    expected = reference.quantize_groups(x.cpu())
    assert same(got.scales, expected.scales)
    assert same(values(got.codes), values(expected.codes))


def assert_neighbours(
    got: torch.Tensor, expected: torch.Tensor, scale: torch.Tensor, exact: torch.Tensor, terms: torch.Tensor
) -> None:
    """Codes differ only where a number, but for an error of its `terms`, lies halfway between them."""
    left, right = values(got), values(expected)
    different = ~((left == right) | (left.isnan() & right.isnan()))
    halfway = (left + right) / 2 * scale.cpu().double()
    assert ((exact - halfway).abs() <= 2.0**-18 * terms)[different].all()


def check_layouts(codes: TensorCodes, layouts: str) -> None:
    assert (codes.row_codes is None) == (layouts == "columns")
    assert (codes.column_codes is None) == (layouts == "rows")
    if layouts == "both":
        assert torch.equal(codes.row_codes.view(torch.uint8).t(), codes.column_codes.view(torch.uint8))


def check_tensor_codes(kernels, x: torch.Tensor) -> None:
    """One scale: scales and codes of both formats equal to the bit, in every layout."""
    for fp8 in (E4M3, E5M2):
        scale = kernels.tensor_scale(kernels.group_maxima(x), fp8)
        expected_scale = reference.tensor_scale(reference.group_maxima(x.cpu()), fp8)
        assert same(scale, expected_scale)
        expected = reference.quantize_tensor(x.cpu(), expected_scale, fp8, "rows")
        for layouts in ("rows", "columns", "both"):
            got = kernels.quantize_tensor(x, scale, fp8, layouts)
            check_layouts(got, layouts)
            assert same(values(got.rows), values(expected.rows))


def check_norm(kernels, x: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor) -> None:
    """Forward, output and backward of a norm, from the residual stream on."""
    got = kernels.norm_forward(x, added, weight, EPSILON)
    total = x.cpu() if added is None else x.cpu() + added.cpu()
    assert same(got.total, total)
    check_groups(kernels, total, got.codes)
    expected = reference.norm_forward(x.cpu(), None if added is None else added.cpu(), weight.cpu(), EPSILON)
    assert same_within(got.rstd, expected.rstd, FP32_ROUNDINGS)
    scale = kernels.tensor_scale(got.maxima, E4M3)
    assert same_within(scale, reference.tensor_scale(expected.maxima), FP32_ROUNDINGS)
    coded = GroupCodes(got.codes.codes.cpu(), got.codes.scales.cpu())
    for layouts in ("rows", "both"):
        y = kernels.norm_output(got.codes, got.rstd, weight, scale, layouts)
        check_layouts(y, layouts)
        on_cpu = reference.norm_output(coded, got.rstd.cpu(), weight.cpu(), scale.cpu(), "rows")
        assert same(values(y.rows), values(on_cpu.rows))
    if total.isfinite().all():
        check_norm_backward(kernels, got.codes, got.rstd, weight)


def check_norm_backward(kernels, codes: GroupCodes, rstd: torch.Tensor, weight: torch.Tensor) -> None:
    tokens, channels = codes.codes.shape
    generator = torch.Generator().manual_seed(5)
    made = [torch.randn(tokens, channels, generator=generator) for _ in range(4)]
    on_device = [each.to(weight.device) for each in made]
    coded = GroupCodes(codes.codes.cpu(), codes.scales.cpu())
    for count in (1, 2, 3):
        got = kernels.norm_backward(on_device[:count], codes, rstd, weight, on_device[3])
        expected = reference.norm_backward(made[:count], coded, rstd.cpu(), weight.cpu(), made[3])
        for left, right in zip(got, expected, strict=True):
            # Sums of up to `channels` (or `tokens`) numbers in another order.
            torch.testing.assert_close(left.cpu(), right, rtol=1e-4, atol=1e-5 * max(float(right.abs().max()), 1e-30))


def check_gated(kernels, gate: torch.Tensor, up: torch.Tensor) -> None:
    """Forward, output and backward of SiLU(gate)·up."""
    of_gate, of_up, maxima = kernels.gated_forward(gate, up)
    check_groups(kernels, gate.cpu(), of_gate)
    check_groups(kernels, up.cpu(), of_up)
    expected_gate, expected_up, expected_maxima = reference.gated_forward(gate.cpu(), up.cpu())
    scale = kernels.tensor_scale(maxima, E4M3)
    expected_scale = reference.tensor_scale(expected_maxima)
    assert same_within(scale, expected_scale, FP32_ROUNDINGS)
    opened = reference.dequantize_groups(expected_gate).double()
    product = opened * opened.sigmoid() * reference.dequantize_groups(expected_up)
    for layouts in ("rows", "both"):
        p = kernels.gated_output(of_gate, of_up, scale, layouts)
        check_layouts(p, layouts)
        on_reference = reference.gated_output(expected_gate, expected_up, expected_scale, "rows")
        assert_neighbours(p.rows, on_reference.rows, expected_scale, product, product.abs())
    check_gated_backward(kernels, of_gate, of_up)


def check_gated_backward(kernels, gate: GroupCodes, up: GroupCodes) -> None:
    """Gradients as they are, and as codes."""
    on_cpu = [GroupCodes(each.codes.cpu(), each.scales.cpu()) for each in (gate, up)]
    gradient = torch.randn(gate.codes.shape, generator=torch.Generator().manual_seed(6))
    flowing = gradient.to(gate.codes.device)
    expected = reference.gated_backward(gradient, *on_cpu)
    both_terms = gated_terms(gradient, *on_cpu)
    for left, right, terms in zip(kernels.gated_backward(flowing, gate, up), expected, both_terms, strict=True):
        least = max(float(right.nan_to_num(0, 0, 0).abs().max()) * 2.0**-30, 2.0**-140)  # few bits below 2⁻¹²⁶
        finite = right.isfinite()
        assert same(left.cpu()[~finite], right[~finite])
        assert ((left.cpu() - right).abs() <= 16 * FP32_ROUNDINGS * terms + least)[finite].all()
    maxima, expected_maxima = kernels.gated_maxima(flowing, gate, up), reference.gated_maxima(gradient, *on_cpu)
    for of, bits, of_groups, exact, terms in zip(
        ("gate", "up"), maxima, expected_maxima, expected, both_terms, strict=True
    ):
        scale, expected_scale = kernels.tensor_scale(bits, E5M2), reference.tensor_scale(of_groups, E5M2)
        assert same_within(scale, expected_scale, 16 * FP32_ROUNDINGS)
        for layouts in ("rows", "both"):
            got = kernels.gated_gradient(flowing, gate, up, of, scale, E5M2, layouts)
            check_layouts(got, layouts)
            on_reference = reference.gated_gradient(gradient, *on_cpu, of, expected_scale, E5M2, "rows")
            assert_neighbours(got.rows, on_reference.rows, expected_scale, exact, terms)


def gated_terms(gradient: torch.Tensor, gate: GroupCodes, up: GroupCodes) -> tuple[torch.Tensor, torch.Tensor]:
    """What the gradients of gate and up are sums of, in magnitude: SiLU's slope is 0 where two terms cancel out."""
    opened, raised = reference.dequantize_groups(gate), reference.dequantize_groups(up)
    open = opened.sigmoid()
    of_gate = (gradient * raised).abs() * open * (1 + opened.abs() * (1 - open))
    return of_gate.nan_to_num(), (gradient * opened * open).abs().nan_to_num()


def same_within(left: torch.Tensor, right: torch.Tensor, relative: float, absolute: float = 0.0) -> bool:
    """Equal but for a relative difference; NaN and infinity in the same places."""
    return torch.allclose(left.cpu().float(), right.cpu().float(), rtol=relative, atol=absolute, equal_nan=True)


def check_rotation(kernels, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(2, 5, 3, 12, generator=generator)
    cosine, sine = torch.rand(1, 5, 12, generator=generator), torch.rand(1, 5, 12, generator=generator)
    for transposed in (False, True):
        got = kernels.rotated(x.to(device), cosine.to(device), sine.to(device), x.dtype, transposed=transposed)
        torch.testing.assert_close(got.cpu(), reference.rotated(x, cosine, sine, x.dtype, transposed=transposed))
