"""What the streams of two backends of `eden` or `wf` may differ in, tile by tile, and what they must have in common."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import strategies as st

from support.boundary import FIXTURE, boundary
from support.codec_backends import decode, device_of, encode
from tahq.quant import bit_planes, get_codec
from tahq.quant.backends import interprets_triton
from tahq.quant.gaussian import bit_allocation, tile_stream
from tahq.quant.gaussian.tile_stream import TileLayout

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EXACT = (torch.float32, torch.float16)
"""What Triton's interpreter writes exactly: it cuts off where bf16 rounds."""
SHAPES = [(2, 5, 64), (3, 100), (2, 1001), (1, 1, 1), (7,), (2, 3, 2, 40), (1, 3, 1024), (5, 9, 8), (0, 8), (2, 0, 3)]
POWERS = (-149, -148, -140, -127, -126, -118, -40, 15, 16, 100, 127)
"""Of two, for the largest magnitude of a tensor: from fp32's least subnormal to its largest."""
EDGES = (0.0, -0.0, 1e-45, -1e-40, 2.0**-126, 6e-8, 65504.0, -65504.0, 1e5, 3.38e38, -3.4028235e38)
NOT_FINITE = (math.nan, math.inf, -math.inf)


@dataclass
class Differences:
    """How many tiles differed, of how many: in width; in scale, though of one width; in a code, though of one scale."""

    num_tiles: int
    widths: int
    scales: int
    codes: int
    largest_step: int
    """Between scales of tiles with as many bits, in codes."""
    means: int
    """Channels with another mean."""
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


def check(
    spec: str, x: torch.Tensor, key: int = 0, backend: str = "cpu", dtypes: Sequence[torch.dtype] = ()
) -> Differences | None:
    """Both backends read both streams of x (on the CPU) to the same bits; what the streams differ in."""
    codecs = {name: get_codec(spec, backend=name) for name in ("reference", backend)}
    written = [encode(codec, x, name, key) for name, codec in codecs.items()]
    # a stream that is the same byte for byte need not be read again
    for buf in written[:1] if torch.equal(*written) else written:
        for dtype in dtypes or (EXACT if backend == "triton" and interprets_triton() else DTYPES):
            ours, theirs = (decode(codec, buf, x.shape, name, dtype, key) for name, codec in codecs.items())
            assert (theirs.shape, theirs.dtype, theirs.is_contiguous()) == (x.shape, dtype, True)
            assert torch.equal(as_bits(ours), as_bits(theirs)), (spec, dtype)
    return differences(layout_of(spec, x.shape), *written) if x.numel() else None


def check_allocation(levels: torch.Tensor, budget: int) -> None:
    """The Triton kernels give tiles of these levels (int32 [T]) the widths that `bit_allocation` does, in order."""
    from tahq.quant.gaussian import triton_allocation as allocation
    from tahq.quant.gaussian.triton import Work

    device, count = device_of("triton"), len(levels)
    work_at = Work.of(count)
    work = torch.full((work_at.end,), -1, dtype=torch.int32, device=device)
    work[work_at.levels : work_at.levels + count] = levels.to(device)
    nbytes = -(-count * 3 // 128) * 16
    buf = torch.full((nbytes,), 0xAA, dtype=torch.uint8, device=device)
    grid = (-(-count // allocation.TILES_PER_PROGRAM),)
    places = (work_at.levels, work_at.counts)
    allocation.count_kernel[grid](work, 0, count, *places, RELATIVE=False, num_warps=8)
    numbers = (0, count, budget - count, *places, work_at.starts, 0)
    allocation.allocate_kernel[grid](work, buf, *numbers, RELATIVE=False, num_warps=8)
    expected = bit_allocation.allocate(levels, budget)
    starts = work[work_at.starts : work_at.starts + count + 1].cpu()
    assert starts[0] == 0
    assert torch.equal(starts.diff(), expected)
    packed = bit_planes.pack_numbers((expected - 1).to(torch.uint8), tile_stream.WIDTH_BITS)
    assert torch.equal(buf.cpu(), torch.nn.functional.pad(packed, (0, nbytes - len(packed))))


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
