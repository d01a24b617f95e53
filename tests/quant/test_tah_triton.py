"""The parts of `tah` in Triton that other codecs lack, in Triton's interpreter; see `test_codecs_triton.py`."""

import pytest
import torch
from support.interpreter import in_interpreter
from support.kernel_checks import awkward, check_encoding, check_round_trip

from tahq.errors import CodecError
from tahq.quant import get_codec
from tahq.quant.tah import reference as tah_reference
from tahq.quant.tah.stream import TahLayout

pytestmark = in_interpreter


@pytest.fixture
def tah_triton():
    from tahq.quant.tah import triton as tah_triton

    tah_triton.plan.cache_clear()
    yield tah_triton
    tah_triton.plan.cache_clear()


@pytest.mark.parametrize(
    "spec", ["tah:alloc=128,int4=0.4", "tah:alloc=token,select=low", "tah:alloc=token,adaptive=off"]
)
def test_allocation_tiles_of_several_tiles(spec):
    check_round_trip(spec, awkward((2, 3, 384)))


def test_entropy_of_tiny_tiles_counts_epsilon():
    """Tiles whose ‖y‖₁ is near 1e-12 rank below others of the same shape of distribution."""
    x = torch.randn(1, 40, 64, generator=torch.Generator().manual_seed(3))
    x *= 2.0 ** -torch.arange(0, 80, 2).view(1, 40, 1)
    check_round_trip("tah:int4=0.5", x)


def test_offsets_far_above_the_range_are_clamped():
    """A zero-point in fp16 may lie above the minimum by many steps: codes below 0 and above the largest."""
    x = 1000 + torch.rand(2, 4, 64, generator=torch.Generator().manual_seed(1)) * 0.3
    check_round_trip("tah", x)


@pytest.mark.parametrize("bits", [(3, 4), (2, 8)])
def test_quotients_in_the_middle_of_two_codes_round_to_even(bits):
    x = (torch.arange(512, dtype=torch.float32) % 61 * 0.5).view(1, 8, 64)
    x[..., 0], x[..., 1] = 0.0, 2.0 ** bits[1] - 1
    check_round_trip(f"tah:low={bits[0]},high={bits[1]},tau=inf", x)


def test_equal_entropies_are_ranked_by_index():
    x = awkward((1, 64), seed=7).repeat(1, 10, 1)
    check_round_trip("tah:int4=0.5", x)
    assert check_encoding("tah:int4=0.5", x)[16:18].tolist() == [0b11100000, 0b11]
    assert check_encoding("tah:int4=0.5,select=low", x)[16:18].tolist() == [0b11100000, 0b11]


def run_selection(tah_triton, spec: str, entropies: torch.Tensor) -> torch.Tensor:
    """Places [B, n] that the selection gives to tiles of these entropies, whose masses are 1."""
    layout = TahLayout.of(get_codec(spec).spec, (*entropies.shape, 8))
    plan = tah_triton.plan(layout)
    selection, slots = tah_triton.selection, tah_triton.launch.slots
    count = layout.tiling.num_tiles
    tiles_at, places_at = selection.WORDS_BEFORE_TILES, selection.WORDS_BEFORE_TILES + 4 * slots(count)
    work = torch.zeros(plan.encode_words, dtype=torch.int32)
    work[0] = torch.tensor(1.0).view(torch.int32)
    measured = work[tiles_at : tiles_at + 4 * count].view(torch.float32).view(count, 4)
    measured[:, 0], measured[:, 1] = entropies.flatten(), 1.0
    for _, kernel in plan.encode[1:-1]:
        kernel(work)
    return work[places_at : places_at + count].view(entropies.shape)


@pytest.mark.parametrize("is_counted", [False, True])
@pytest.mark.parametrize(
    ("select", "samples", "n", "num_distinct", "int4"),
    [
        ("high", 1, 1, 1, "0.8"),
        ("low", 3, 5, 2, "0.8"),
        ("high", 2, 9000, 9000, "0.8"),
        ("low", 2, 9000, 7, "1/3"),
        ("high", 2, 9000, 7, "1/3"),
        ("high", 1, 9000, 1, "0.5"),
        ("low", 2, 4097, 99, "0"),
        ("high", 2, 4096, 99, "1"),
    ],
)
def test_selection_equals_the_references(tah_triton, monkeypatch, is_counted, select, samples, n, num_distinct, int4):
    """In one program's registers, and by counting, which large samples take, over several blocks."""
    if is_counted:
        monkeypatch.setattr(tah_triton.selection, "MAX_KEYS_IN_REGISTERS", 0)
    ladder = torch.arange(num_distinct) * (2.0 / num_distinct)  # steps are far more than 2^-20
    index = torch.randint(num_distinct, (samples, n), generator=torch.Generator().manual_seed(n))
    entropies = ladder[index]
    spec = f"tah:group=8,int4={int4},select={select}"
    num_low = TahLayout.of(get_codec(spec).spec, (samples, n, 8)).num_low
    high = tah_reference.select_high(entropies if select == "high" else -entropies, num_low)
    places = run_selection(tah_triton, spec, entropies)
    assert torch.equal(places >= 0, high)
    assert torch.equal(places[high], torch.arange(int(high.sum()), dtype=torch.int32))


def test_large_samples_are_selected_by_counting(tah_triton, monkeypatch):
    monkeypatch.setattr(tah_triton.selection, "MAX_KEYS_IN_REGISTERS", 32)
    check_encoding("tah:group=8,alloc=16", awkward((2, 20, 32)))
    small, large = (TahLayout.of(get_codec("tah").spec, (1, n, 64)) for n in (32, 33))
    assert len(tah_triton.plan(small).encode) == 5
    assert len(tah_triton.plan(large).encode) == 7


def test_bit_map_of_ones_is_refused_and_reads_nothing_outside():
    spec, shape = "tah:group=8", (1, 4, 64)
    buf = get_codec(spec).encode(awkward(shape))
    buf[16 : 16 + 4] = 0xFF
    with pytest.raises(CodecError, match="the bit map must give H bits to"):
        get_codec(spec, backend="triton").decode(buf, shape)
