"""Groups, moments and steps for tests of the FP8 optimizer, on any device."""

import torch

from tahq.memory.adam.step import AdamwNumbers
from tahq.memory.coat.fp8_groups import UNEXPANDED, EightBitFormat, MomentFormat, StoredGroups, make_tables, num_groups


def moment_format(format: EightBitFormat, expand: bool, device: str = "cpu") -> MomentFormat:
    return MomentFormat(format, expand, make_tables(format).to(torch.device(device)))


def magnitudes_of(format: EightBitFormat) -> torch.Tensor:
    return torch.tensor(format.magnitudes, dtype=torch.float64)


def awkward_groups(num: int = 40) -> dict[str, torch.Tensor]:
    """fp32 [num, 128] of every sort."""
    generator = torch.Generator().manual_seed(3)

    def normal() -> torch.Tensor:
        return torch.randn(num, 128, generator=generator)

    def powers(low: int, high: int, *shape: int) -> torch.Tensor:
        return 10.0 ** torch.randint(low, high, shape, generator=generator)

    made = {
        "gaussian": normal(),
        "of every size": normal() * powers(-30, 30, num, 1),
        "40 orders of magnitude in a group": normal() * powers(-20, 20, num, 128),
        "all of fp32 in a group": normal() * 10.0 ** (75 * torch.rand(num, 128, generator=generator) - 38),
        "subnormal": normal() * 1e-40,
        "least subnormal": normal().sign() * 2.0**-149,
        "huge": normal().sign() * (1 + normal().abs().clamp(max=3) / 2) * 1e38,
        "largest": torch.full((num, 128), torch.finfo(torch.float32).max),
        "zeros": torch.zeros(num, 128),
        "minus zeros": torch.full((num, 128), -0.0),
        "constant": normal()[:, :1].expand(-1, 128).contiguous(),
        "almost constant": 1 + normal() * 1e-6,
        "two values": normal().sign() + 3 * (normal() > 1),
    }
    made["mostly zeros"] = normal() * (torch.rand(num, 128, generator=generator) < 0.03)
    made["one element"] = torch.zeros(num, 128)
    made["one element"][:, 0] = normal()[:, 0]
    bad = normal()
    bad[::3, 5], bad[1::3, 7], bad[2::3, 127] = torch.nan, torch.inf, -torch.inf
    bad[0] = torch.nan
    made["not finite"] = bad
    return made


def numbers_of(step: int, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> AdamwNumbers:
    """The numbers of a step of an optimizer with these settings."""
    return AdamwNumbers.of({"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}, step)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equality of values, NaN equal to NaN."""
    return torch.equal(left.isnan(), right.isnan()) and torch.equal(left.nan_to_num(), right.nan_to_num())


class Trained:
    """Weights and moments in eight bits after some steps, all [N], in the middle of longer buffers.

    Args:
        step: what takes a step.
        numel: N.
        formats: of both moments.
        device: where all of it is; gradients are the same everywhere.
    """

    MARGIN = 512

    def __init__(self, step, numel: int, formats: tuple[MomentFormat, MomentFormat], device: str = "cpu") -> None:
        self._step, self._formats, self._numel, self._device = step, formats, numel, device
        groups = num_groups(numel)
        generator = torch.Generator().manual_seed(numel)
        self.weights = self._placed(torch.randn(numel, generator=generator))
        self.moments = tuple(
            StoredGroups(
                self._placed(torch.zeros(numel, dtype=torch.uint8)),
                self._placed(torch.zeros(groups, dtype=torch.bfloat16)),
                self._placed(torch.full((groups,), UNEXPANDED, dtype=torch.uint8)) if by.expand else None,
            )
            for by in formats
        )

    def take_steps(self, steps: range, scale: float = 1e-3) -> "Trained":
        for step in steps:
            generator = torch.Generator().manual_seed(7919 * self._numel + step)
            gradients = scale * torch.randn(self._numel, generator=generator)
            gradients *= torch.randn(self._numel, generator=generator).exp()
            gradients[step :: 5 * self._numel // 7 + 1] = 0.0
            numbers = numbers_of(step, 1e-3, (0.9, 0.95), 1e-8, 0.1)
            self._step(self.weights, gradients.to(self._device), self.moments, self._formats, numbers)
        return self

    def tensors(self) -> list[torch.Tensor]:
        """Weights and all that is kept of both moments, on the CPU."""
        kept = [part for moment in self.moments for part in (moment.codes, moment.scales, moment.powers)]
        return [part.cpu() for part in (self.weights, *kept) if part is not None]

    def assert_nothing_else_was_written(self) -> None:
        """The bytes before and behind every tensor are what they were."""
        for part in (self.weights, *(p for m in self.moments for p in (m.codes, m.scales, m.powers) if p is not None)):
            whole = torch.empty(0, dtype=torch.uint8, device=part.device).set_(part.untyped_storage())
            margin = self.MARGIN
            assert (whole[:margin] == 0xAA).all()
            assert (whole[margin + part.nbytes :] == 0xAA).all()

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor:
        margin = self.MARGIN
        whole = torch.full((tensor.nbytes + 2 * margin,), 0xAA, dtype=torch.uint8, device=self._device)
        inner = whole[margin : margin + tensor.nbytes].view(tensor.dtype)
        return inner.copy_(tensor)


class Unaligned(Trained):
    """The same, where no tensor begins at a multiple of 16 bytes."""

    MARGIN = 516
