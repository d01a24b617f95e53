"""What the streams of two backends of `eden` or `wf` may differ in, tile by tile, and what they must have in common."""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import strategies as st

from support.boundary import FIXTURE, boundary
from tahq.quant import get_codec
from tahq.quant.gaussian import tile_stream
from tahq.quant.gaussian.tile_stream import TileLayout

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = [(2, 5, 64), (3, 100), (2, 1001), (1, 1, 1), (7,), (2, 3, 2, 40), (1, 3, 1024), (5, 9, 8), (0, 8), (2, 0, 3)]
POWERS = (-149, -148, -140, -127, -126, -118, -40, 15, 16, 100, 127)
"""Of two, for the largest magnitude of a tensor: from fp32's least subnormal to its largest."""
EDGES = (0.0, -0.0, 1e-45, -1e-40, 2.0**-126, 6e-8, 65504.0, -65504.0, 1e5, 3.38e38, -3.4028235e38)
NOT_FINITE = (math.nan, math.inf, -math.inf)


@dataclass
class Differences:
    """How many tiles differed, of how many.

    Attributes:
        num_tiles: compared.
        widths: with another number of bits.
        scales: with another scale, though as many bits.
        codes: with another code, though of the same bits and scale.
        largest_step: between scales of tiles with as many bits, in codes.
        means: channels with another mean.
        same_bytes: whether nothing differed.
    """

    num_tiles: int
    widths: int
    scales: int
    codes: int
    largest_step: int
    means: int
    same_bytes: bool

    @property
    def share(self) -> float:
        """Of tiles that differ in anything."""
        return (self.widths + self.scales + self.codes) / self.num_tiles


def layout_of(spec: str, shape) -> TileLayout:
    return TileLayout.of(get_codec(spec).spec, tuple(shape))


def differences(layout: TileLayout, ours: torch.Tensor, theirs: torch.Tensor) -> Differences:
    """Asserts that headers and marks agree, and counts the rest."""
    assert torch.equal(ours[:16], theirs[:16]), "headers differ"
    a, b = tile_stream.unpack(layout, ours), tile_stream.unpack(layout, theirs)
    assert torch.equal(a.scale == 255, b.scale == 255), "other tiles are marked as not finite"
    same_width = a.width == b.width
    step = (a.scale.int() - b.scale.int()).abs() * same_width
    differs = (a.codes != b.codes).any(dim=-1) & same_width & (step == 0)
    means = 0 if a.mean is None else int((a.mean.view(torch.int16) != b.mean.view(torch.int16)).sum())
    return Differences(
        num_tiles=len(step),
        widths=int((~same_width).sum()),
        scales=int((step > 0).sum()),
        codes=int(differs.sum()),
        largest_step=int(step.max()) if len(step) else 0,
        means=means,
        same_bytes=torch.equal(ours, theirs),
    )


def as_bits(values: torch.Tensor) -> torch.Tensor:
    """Comparable to the bit; of NaN there is one."""
    return torch.where(values.isnan(), torch.nan, values).view({2: torch.int16, 4: torch.int32}[values.dtype.itemsize])


def check(spec: str, x: torch.Tensor, key: int = 0, threads: int = 1) -> Differences | None:
    """Both backends read both streams to the same bits, in every type; what the streams differ in."""
    reference, cpu = get_codec(spec, backend="reference"), get_codec(spec, backend="cpu", threads=threads)
    written = reference.encode(x, key=key), cpu.encode(x, key=key)
    for buf in written:
        for dtype in DTYPES:
            expected = reference.decode(buf, x.shape, dtype, key=key)
            values = cpu.decode(buf, x.shape, dtype, key=key)
            assert values.shape == x.shape
            assert values.dtype == dtype
            assert torch.equal(as_bits(values), as_bits(expected)), (spec, dtype)
    return differences(layout_of(spec, x.shape), *written) if x.numel() else None


def gaussians(shape, seed: int = 0, spread: float = 1.0) -> torch.Tensor:
    """Tokens of different energies, a few outliers, some tiles zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x *= torch.exp(spread * torch.randn((*shape[:-1], 1), generator=generator))
    x[torch.rand(shape, generator=generator) < 0.001] *= 50
    return x


def of_all_sizes(shape, seed: int = 0) -> list[torch.Tensor]:
    """The same values, times `POWERS`, with the largest magnitude 1 before."""
    x = gaussians(shape, seed).double()
    x /= x.abs().max()
    return [(x * 2.0**power).float() for power in POWERS]


def sinking(seed: int = 0) -> torch.Tensor:
    """Tiles of 256 whose energies fall until their squares underflow, and steps are subnormal or 0."""
    powers = torch.arange(0, 120, 3).view(-1, 1)
    return gaussians((40, 256), seed, spread=0.0) * 2.0**-powers


def with_not_finite(shape=(2, 3, 100), seed: int = 1) -> torch.Tensor:
    """A NaN, and an infinity of either sign."""
    x = gaussians(shape, seed)
    x[0, 1, 70], x[1, 0, 3], x[1, 2, 99] = NOT_FINITE
    return x


@st.composite
def any_tensors(draw) -> torch.Tensor:
    """Few different values, extreme ones among them, in any type and shape."""
    shape = (*draw(st.lists(st.integers(0, 4), max_size=2)), draw(st.integers(0, 140)))
    value = st.sampled_from(EDGES) | st.floats(width=32, allow_nan=False, allow_infinity=False)
    pool = draw(st.lists(value, min_size=1, max_size=6)) + draw(st.lists(st.sampled_from(NOT_FINITE), max_size=1))
    index = torch.randint(len(pool), shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 999))))
    return torch.tensor(pool, dtype=torch.float32)[index].to(draw(st.sampled_from(DTYPES)))


def fixture_tensors() -> dict[str, torch.Tensor]:
    """Activations and gradients at the boundaries of a trained GPT-2 small, bf16 [2, 512, 768]."""
    if not FIXTURE.exists():
        pytest.skip("no gpt2small_boundary.safetensors; set TAHQ_SHARED_DATA")
    return boundary()


def relative_error(values: torch.Tensor, x: torch.Tensor) -> float:
    difference, x = values.double() - x.double(), x.double()
    return math.sqrt(float(difference.square().sum() / x.square().sum()))
