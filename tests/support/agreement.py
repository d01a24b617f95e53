"""What two backends' streams of the same tensor may differ in, judged value by value, and counted."""

from dataclasses import dataclass

import torch

from tahq.quant.spec import CodecSpec, TahSpec
from tahq.quant.tah import reference as tah_reference
from tahq.quant.tah.stream import TahLayout, unpack
from tahq.quant.tiling import TOP_EXPONENT, largest_magnitude, top_exponent

ENTROPY_TOLERANCE = 1e-5


@dataclass
class Differences:
    """How much differed, of how much."""

    num_tiles: int = 0
    num_selections: int = 0
    num_codes: int = 0

    def __iadd__(self, other: "Differences") -> "Differences":
        self.num_tiles += other.num_tiles
        self.num_selections += other.num_selections
        self.num_codes += other.num_codes
        return self


def compare(spec: CodecSpec, x: torch.Tensor, reference: torch.Tensor, other: torch.Tensor) -> Differences:
    """Assert that two streams of x (all on the CPU) agree as backends must, and count what they may differ in."""
    assert reference.shape == other.shape
    assert torch.equal(reference[:16], other[:16]), "headers differ"
    if isinstance(spec, TahSpec) and x.numel():
        return _compare_tah(TahLayout.of(spec, x.shape), x, reference, other)
    assert torch.equal(reference, other)
    return Differences()


def _compare_tah(layout: TahLayout, x: torch.Tensor, reference: torch.Tensor, other: torch.Tensor) -> Differences:
    a, b = unpack(layout, reference), unpack(layout, other)
    assert torch.equal(a.transformed, b.transformed)
    assert torch.equal(a.pivot, b.pivot)
    assert torch.equal(a.zero_point.isnan(), b.zero_point.isnan())
    differs = a.high != b.high
    if differs.any():
        assert layout.spec.adaptive == "on"
        assert (_distance_to_border(layout, x)[differs] < ENTROPY_TOLERANCE).all(), "another selection"
    same = ~tah_reference.tile_by_tile(differs, layout.tiles_per_alloc).view(layout.grid)
    for name in ("scale", "zero_point"):
        ours, theirs = getattr(a, name)[same], getattr(b, name)[same]
        assert torch.equal(ours.view(torch.int16), theirs.view(torch.int16)), f"{name} differs"
    num_codes = int((a.codes[same] != b.codes[same]).sum())
    return Differences(layout.num_allocs, int(differs.sum()), num_codes)


def _distance_to_border(layout: TahLayout, x: torch.Tensor) -> torch.Tensor:
    """|entropy − that of the nearest tile on the other side of the border| in fp64, for each allocation tile [B, n].

    A backend whose entropies are off by less than half of the tolerance can exchange no others.
    """
    entropies = _entropies(layout, x)
    ranked = entropies.sort(dim=1, descending=layout.spec.select == "low").values
    last_low, first_high = ranked[:, layout.num_low - 1, None], ranked[:, layout.num_low, None]
    is_low = entropies >= last_low if layout.spec.select == "low" else entropies <= last_low
    return torch.where(is_low, first_high - entropies, entropies - last_low).abs()


def _entropies(layout: TahLayout, x: torch.Tensor) -> torch.Tensor:
    """fp64, of the values as they are coded: times 2^e, tiles that are not finite as zeros."""
    tiles = layout.tiling.split(x)
    finite = largest_magnitude(tiles).isfinite()
    exponent = top_exponent(tiles, finite, TOP_EXPONENT)
    y = torch.where(finite.unsqueeze(-1), tiles, 0.0).double().ldexp(exponent).abs()
    allocs = y.reshape(layout.tiling.num_samples, layout.allocs_per_sample, -1)
    share = allocs / (allocs.sum(dim=-1, keepdim=True) + tah_reference.EPSILON)
    return -(share * (share + tah_reference.EPSILON).log()).sum(dim=-1)
