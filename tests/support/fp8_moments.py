"""Groups, moments and steps for tests of the FP8 optimizer, on any device."""

import torch

from tahq.memory.adam.loop import AdamwNumbers
from tahq.memory.coat.fp8_groups import UNEXPANDED, MomentFormat, StoredMoment, encode, moment_format, num_groups

FORMATS = {
    "coat": (("e4m3", True), ("e4m3", True)),
    "plain": (("e4m3", False), ("e4m3", False)),
    "e5m2 first": (("e5m2", True), ("e4m3", False)),
    "e5m2 second": (("e4m3", False), ("e5m2", True)),
}
"""Of both moments: formats, and whether ranges are expanded."""
CPU = torch.device("cpu")


def formats_of(name: str, device: torch.device = CPU) -> tuple[MomentFormat, MomentFormat]:
    first, second = (moment_format(*each, device) for each in FORMATS[name])
    return first, second


def parts_of(moments: tuple[StoredMoment, StoredMoment]) -> list[torch.Tensor]:
    """All tensors of both."""
    return [part for moment in moments for part in moment[:3] if part is not None]


def step_on_groups(step, groups: torch.Tensor, formats: str, device: torch.device = CPU) -> list[torch.Tensor]:
    """Weights and moments after a step from moments, and by gradients, of this sort; on the CPU."""
    moments = []
    for x, by, on_cpu in zip((groups, groups.abs()), formats_of(formats, device), formats_of(formats), strict=True):
        codes, scales, powers = (part.to(device) for part in encode(x, on_cpu))
        moments.append(StoredMoment(codes.view(-1), scales, powers if by.expand else None, by))
    weights = torch.ones(groups.numel(), device=device)
    gradients = groups.flip(0).reshape(-1).to(device)
    step(weights, gradients, tuple(moments), numbers_of(2, 1e-3, (0.9, 0.95), 1e-8, 0.1))
    return [part.cpu().float() for part in (weights, *parts_of(tuple(moments)))]


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
    """Weights and moments in eight bits after some steps by `step`, all [N], in the middle of longer buffers."""

    MARGIN = 512

    def __init__(self, step, numel: int, formats: str, device: torch.device = CPU) -> None:
        self._step, self._numel, self._device = step, numel, device
        groups = num_groups(numel)
        generator = torch.Generator().manual_seed(numel)
        self.weights = self._placed(torch.randn(numel, generator=generator))
        self.moments = tuple(
            StoredMoment(
                self._placed(torch.zeros(numel, dtype=torch.uint8)),
                self._placed(torch.zeros(groups, dtype=torch.bfloat16)),
                self._placed(torch.full((groups,), UNEXPANDED, dtype=torch.uint8)) if by.expand else None,
                by,
            )
            for by in formats_of(formats, device)
        )

    def take_steps(self, steps: range, scale: float = 1e-3) -> "Trained":
        for step in steps:
            generator = torch.Generator().manual_seed(7919 * self._numel + step)
            gradients = scale * torch.randn(self._numel, generator=generator)
            gradients *= torch.randn(self._numel, generator=generator).exp()
            gradients[step :: 5 * self._numel // 7 + 1] = 0.0
            numbers = numbers_of(step, 1e-3, (0.9, 0.95), 1e-8, 0.1)
            self._step(self.weights, gradients.to(self._device), self.moments, numbers)
        return self

    def tensors(self) -> list[torch.Tensor]:
        """Weights and all that is kept of both moments, on the CPU."""
        return [part.cpu() for part in (self.weights, *parts_of(self.moments))]

    def assert_nothing_else_was_written(self) -> None:
        """The bytes before and behind every tensor are what they were."""
        for part in (self.weights, *parts_of(self.moments)):
            whole = torch.empty(0, dtype=torch.uint8, device=part.device).set_(part.untyped_storage())
            margin = self.MARGIN
            assert (whole[:margin] == 0xAA).all()
            assert (whole[margin + part.nbytes :] == 0xAA).all()

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor:
        margin = self.MARGIN
        whole = torch.full((tensor.nbytes + 2 * margin,), 0xAA, dtype=torch.uint8, device=self._device)
        inner = whole[margin : margin + tensor.nbytes].view(tensor.dtype)
        return inner.copy_(tensor)
