"""Which allocation tiles get H bits, on CUDA: an exact selection by rank, without sorting.

A tile's entropy becomes a whole number, its key: ⌊H·2^20⌋, below 2^24, so that a rank is found by counting keys.
(Entropies closer than 2^-20 may count as equal, and then the lower index ranks first; sums of logarithms in fp32 are
no more exact than that.) The kernels look for the border: the key of rank ⌊(1−p)·n⌋, and how many of the keys equal to
it get L bits. Up to `MAX_KEYS_IN_REGISTERS` tiles per sample, one program per sample holds
all keys and bisects; beyond, histograms of the keys' bytes are counted, one byte after the other. Then every block
of keys learns how many keys above the border, and how many at it, lie in the blocks before.

The result is the place of every allocation tile among those with H bits, or −1 for L bits. Shape letters: n
allocation tiles per sample.
"""

import triton
import triton.language as tl

from tahq.quant.gpu.launch import Launch, slots
from tahq.quant.gpu.tiles import as_floats, power_of_two, tensor_exponent
from tahq.quant.stream import ALIGNMENT
from tahq.quant.tah.stream import TahLayout
from tahq.quant.tiling import TOP_EXPONENT

MAX_KEYS_IN_REGISTERS = 32768
KEYS_PER_PROGRAM = 2048
NUM_BINS, NUM_LEVELS = 256, 3
MAX_MEASURED = 1024
"""Programs of an encoder's first kernel: more, and smaller, than those of the other codecs, as they do more."""
WORDS_BEFORE_TILES = MAX_MEASURED + ALIGNMENT
"""Words of the work buffer before those of tiles: the programs' measurements, then the exponent of the tensor."""
NOT_FINITE = tl.constexpr(-128.0)
"""Stands for the entropy of a tile that is not finite."""
_BINS = tl.constexpr(NUM_BINS)
_LEVELS = tl.constexpr(NUM_LEVELS)
_BLOCK = tl.constexpr(KEYS_PER_PROGRAM)
_TALLIES = tl.constexpr(256)
_LARGEST_KEY = tl.constexpr((1 << 24) - 1)
_KEYS_PER_NAT = tl.constexpr(float(1 << 20))
_MEASURED = tl.constexpr(MAX_MEASURED)
_TILES_AT = tl.constexpr(WORDS_BEFORE_TILES)
_TOP = tl.constexpr(TOP_EXPONENT)
_EPSILON = tl.constexpr(1e-12)
_TINY = tl.constexpr(1e-37)


@triton.jit
def _store_exponent(work, exponent, is_flagged):
    """Store the result of `tensor_exponent`, so that no program of the last kernel has to compute it."""
    if tl.program_id(0) + tl.program_id(1) == 0:
        tl.store(work + _MEASURED, exponent)
        tl.store(work + _MEASURED + 1, is_flagged.to(tl.int32))


@triton.jit
def load_exponent(work):
    """The tensor's exponent, and whether a tile is not finite."""
    return tl.load(work + _MEASURED), tl.load(work + _MEASURED + 1) != 0


@triton.jit
def _load_tile(tile, is_real):
    """Entropy of tiles, 0 where they are not finite, and ‖α‖₁: a negative one stands for 2^64 times its magnitude."""
    entropy = tl.load(tile, mask=is_real, other=0.0)
    return tl.where(entropy == NOT_FINITE, 0.0, tl.abs(entropy)), tl.load(tile + 1, mask=is_real, other=0.0)


@triton.jit
def _scaled(mass, exponent):
    """‖α‖₁·2^e."""
    return tl.abs(mass) * power_of_two(exponent + tl.where(mass < 0, 64, 0))


@triton.jit
def _join_tiles(first, mass, is_real, exponent, tiles_per_alloc):
    """Entropy of allocation tiles from their tiles', Σ w·(H − log w), w = mass/total, and the total."""
    total = _scaled(mass, exponent)
    for k in range(1, tiles_per_alloc):
        _, mass = _load_tile(first + 4 * k, is_real)
        total += _scaled(mass, exponent)
    entropy = tl.zeros_like(total)
    for k in range(tiles_per_alloc):
        within, mass = _load_tile(first + 4 * k, is_real)
        weight = _scaled(mass, exponent) / tl.where(total > 0, total, 1.0)
        entropy += weight * (within - tl.log(tl.maximum(weight, _TINY)))
    return entropy, total


@triton.jit
def locate_measured(work, tiles):
    """Where the numbers of tiles are, fp32 [T, 4]: entropy, ‖α‖₁, minimum and maximum.

    An entropy is negative where a tile may have an outlier, NOT_FINITE where it is not finite.
    """
    return as_floats(work + _TILES_AT) + (4 * tiles[:, None] + tl.arange(0, 4)[None, :])


@triton.jit
def places_in(work, tile_slots):
    """Where the places of allocation tiles are; of large samples, the keys follow `alloc_slots` further on."""
    return work + _TILES_AT + 4 * tile_slots


@triton.jit
def _keys(work, num_measured, allocs, is_real, tiles_per_alloc, IS_SINGLE: tl.constexpr, REVERSE: tl.constexpr):
    """Keys in the order of rank; of lanes without a tile, one above all.

    With r = ‖a‖₁/(‖a‖₁ + ϵ), the shares p = r·|a|/‖a‖₁ have r times the entropy, and −r·log r.
    """
    first = as_floats(work + _TILES_AT) + allocs * (4 * tiles_per_alloc)
    entropy, mass = _load_tile(first, is_real)  # before the exponent, which has to be looked for
    exponent, is_flagged = tensor_exponent(work, num_measured, _TOP, _MEASURED)
    _store_exponent(work, exponent, is_flagged)
    total = _scaled(mass, exponent)
    if not IS_SINGLE:
        entropy, total = _join_tiles(first, mass, is_real, exponent, tiles_per_alloc)
    ratio = total / (total + _EPSILON)
    entropy = ratio * (entropy - tl.log(tl.maximum(ratio, _TINY)))
    key = tl.minimum(tl.maximum(entropy * _KEYS_PER_NAT, 0.0).to(tl.int32), _LARGEST_KEY)
    if REVERSE:
        key = _LARGEST_KEY - key
    return tl.where(is_real, key, _LARGEST_KEY + 1)


@triton.jit
def _own_lanes(allocs_per_sample):
    """This program's allocation tiles, [_BLOCK], and which of its lanes have one. Grid [blocks, samples]."""
    index = tl.program_id(0) * _BLOCK + tl.arange(0, _BLOCK)
    return tl.program_id(1) * allocs_per_sample + index, index < allocs_per_sample


@triton.jit
def _borders(work, tile_slots, alloc_slots):
    """Where the borders of samples are, and how many of the keys at them get L bits: two words per sample."""
    return places_in(work, tile_slots) + 2 * alloc_slots


@triton.jit
def _tallies(work, tile_slots, alloc_slots, sample, num_blocks, num_samples):
    """Where the tallies of a sample are, two words per block: how many of its keys are above the border, and at it."""
    return _borders(work, tile_slots, alloc_slots) + 2 * num_samples + sample * (2 * num_blocks)


@triton.jit
def _counts(work, tile_slots, alloc_slots):
    """Where the histograms of this program's sample are, of the first byte of its keys, the second and the third."""
    words = 2 * tl.num_programs(1) * (1 + tl.num_programs(0))
    return _borders(work, tile_slots, alloc_slots) + words + tl.program_id(1) * (_LEVELS * _BINS)


@triton.jit
def _load_keys(work, tile_slots, alloc_slots, allocs, is_real):
    keys = places_in(work, tile_slots) + alloc_slots
    return tl.load(keys + allocs, mask=is_real, other=_LARGEST_KEY + 1)


@triton.jit(do_not_specialize=["num_measured", "allocs_per_sample", "tiles_per_alloc"])
def key_kernel(
    work,
    tile_slots,
    alloc_slots,
    num_measured,
    allocs_per_sample,
    tiles_per_alloc,
    IS_SINGLE: tl.constexpr,
    REVERSE: tl.constexpr,
    COUNTED: tl.constexpr,
):
    """Keys of all allocation tiles, and the histogram of their first bytes if it is needed. Grid [blocks, samples]."""
    allocs, is_real = _own_lanes(allocs_per_sample)
    key = _keys(work, num_measured, allocs, is_real, tiles_per_alloc, IS_SINGLE, REVERSE)
    tl.store(places_in(work, tile_slots) + alloc_slots + allocs, key, mask=is_real)
    if COUNTED:
        _count(_counts(work, tile_slots, alloc_slots), key >> 16, is_real)


@triton.jit(do_not_specialize=["allocs_per_sample", "num_low"])
def bisect_kernel(work, tile_slots, alloc_slots, allocs_per_sample, num_low, BLOCK: tl.constexpr):
    """The border and the tallies of one sample a program: the smallest key that `num_low` keys do not exceed."""
    index = tl.arange(0, BLOCK)
    sample = tl.program_id(0)
    is_real = index < allocs_per_sample
    key = _load_keys(work, tile_slots, alloc_slots, sample * allocs_per_sample + index, is_real)
    border = tl.min(key, axis=0)
    most = tl.max(tl.where(is_real, key, 0), axis=0)
    while border < most:
        middle = (border + most) // 2
        is_enough = tl.sum((key <= middle).to(tl.int32), axis=0) >= num_low
        most = tl.where(is_enough, middle, most)
        border = tl.where(is_enough, border, middle + 1)
    borders = _borders(work, tile_slots, alloc_slots) + 2 * sample
    tl.store(borders, border)
    tl.store(borders + 1, num_low - tl.sum((key < border).to(tl.int32), axis=0))
    blocks = tl.reshape(tl.where(is_real, key, -1), [BLOCK // _BLOCK, _BLOCK])
    block = tl.arange(0, BLOCK // _BLOCK)
    num_blocks = tl.cdiv(allocs_per_sample, _BLOCK)
    tallies = _tallies(work, tile_slots, alloc_slots, sample, num_blocks, tl.num_programs(0)) + 2 * block
    tl.store(tallies, tl.sum((blocks > border).to(tl.int32), axis=1), mask=block < num_blocks)
    tl.store(tallies + 1, tl.sum((blocks == border).to(tl.int32), axis=1), mask=block < num_blocks)


@triton.jit
def _find_prefix(counts, rank, LEVELS: tl.constexpr):
    """The first LEVELS bytes of the key that has this rank, and its rank among the keys that begin so."""
    prefix = 0
    for level in tl.static_range(LEVELS):
        counted = tl.cumsum(tl.load(counts + level * _BINS + tl.arange(0, _BINS)), axis=0)
        is_below = counted < rank
        prefix = prefix * _BINS + tl.sum(is_below.to(tl.int32), axis=0)
        rank -= tl.max(tl.where(is_below, counted, 0), axis=0)
    return prefix, rank


@triton.jit
def _count(counts, bytes_, is_counted):
    """Add to a histogram how often each byte [_BLOCK] occurs."""
    number = tl.histogram(tl.where(is_counted, bytes_, 0), _BINS)
    bin = tl.arange(0, _BINS)
    number -= tl.where(bin == 0, _BLOCK - tl.sum(is_counted.to(tl.int32), axis=0), 0)
    tl.atomic_add(counts + bin, number, mask=number > 0, sem="relaxed")


@triton.jit(do_not_specialize=["allocs_per_sample", "num_low"])
def count_kernel(work, tile_slots, alloc_slots, allocs_per_sample, num_low, LEVEL: tl.constexpr):
    """Histogram of byte LEVEL (1 or 2) of the keys that agree with the border in the bytes before."""
    allocs, is_real = _own_lanes(allocs_per_sample)
    key = _load_keys(work, tile_slots, alloc_slots, allocs, is_real)
    counts = _counts(work, tile_slots, alloc_slots)
    prefix, _ = _find_prefix(counts, num_low, LEVEL)
    is_counted = is_real & (key >> (24 - 8 * LEVEL) == prefix)
    _count(counts + LEVEL * _BINS, (key >> (16 - 8 * LEVEL)) & (_BINS - 1), is_counted)


@triton.jit(do_not_specialize=["allocs_per_sample", "num_low"])
def tally_kernel(work, tile_slots, alloc_slots, allocs_per_sample, num_low):
    """The tallies of this program's block; the border, which every program of a sample finds."""
    allocs, is_real = _own_lanes(allocs_per_sample)
    key = _load_keys(work, tile_slots, alloc_slots, allocs, is_real)
    border, num_ties_low = _find_prefix(_counts(work, tile_slots, alloc_slots), num_low, _LEVELS)
    sample, block, num_blocks = tl.program_id(1), tl.program_id(0), tl.num_programs(0)
    tallies = _tallies(work, tile_slots, alloc_slots, sample, num_blocks, tl.num_programs(1)) + 2 * block
    tl.store(tallies, tl.sum((is_real & (key > border)).to(tl.int32), axis=0))
    tl.store(tallies + 1, tl.sum((is_real & (key == border)).to(tl.int32), axis=0))
    if block == 0:
        borders = _borders(work, tile_slots, alloc_slots) + 2 * sample
        tl.store(borders, border)
        tl.store(borders + 1, num_ties_low)


@triton.jit
def _sum_before(tallies):
    """Sums of the tallies of the blocks before this program's."""
    above, equal = tl.zeros([_TALLIES], tl.int32), tl.zeros([_TALLIES], tl.int32)
    for start in range(0, tl.program_id(0), _TALLIES):
        block = start + tl.arange(0, _TALLIES)
        is_before = block < tl.program_id(0)
        above += tl.load(tallies + 2 * block, mask=is_before, other=0)
        equal += tl.load(tallies + 2 * block + 1, mask=is_before, other=0)
    return tl.sum(above, axis=0), tl.sum(equal, axis=0)


@triton.jit(do_not_specialize=["allocs_per_sample", "num_low"])
def place_kernel(work, tile_slots, alloc_slots, allocs_per_sample, num_low):
    """Place of each tile among those with H bits, −1 for L, counted on from the blocks before."""
    allocs, is_real = _own_lanes(allocs_per_sample)
    key = _load_keys(work, tile_slots, alloc_slots, allocs, is_real)
    sample, num_samples = tl.program_id(1), tl.num_programs(1)
    borders = _borders(work, tile_slots, alloc_slots) + 2 * sample
    border, num_ties_low = tl.load(borders), tl.load(borders + 1)
    before, ties_before = _sum_before(_tallies(work, tile_slots, alloc_slots, sample, tl.num_programs(0), num_samples))
    is_above, is_equal = is_real & (key > border), is_real & (key == border)
    both = is_above.to(tl.int32) + (is_equal.to(tl.int32) << 16)
    counted = tl.cumsum(both, axis=0) - both  # of each kind at most a block's keys
    ties = ties_before + (counted >> 16)
    place = sample * (allocs_per_sample - num_low) + before + (counted & 0xFFFF) + tl.maximum(ties - num_ties_low, 0)
    is_high = is_above | (is_equal & (ties >= num_ties_low))
    tl.store(places_in(work, tile_slots) + allocs, tl.where(is_high, place, -1), mask=is_real)


@triton.jit(
    do_not_specialize=["num_measured", "num_allocs", "allocs_per_sample", "num_low", "numerator", "denominator"]
)
def spread_kernel(work, tile_slots, num_measured, num_allocs, allocs_per_sample, num_low, numerator, denominator):
    """Places where L bits are spread evenly: of the first i tiles, ⌊i·share⌋ have them."""
    exponent, is_flagged = tensor_exponent(work, num_measured, _TOP, _MEASURED)
    _store_exponent(work, exponent, is_flagged)
    allocs = tl.program_id(0) * _BLOCK + tl.arange(0, _BLOCK)
    sample = allocs // allocs_per_sample
    index = (allocs - sample * allocs_per_sample).to(tl.int64)
    low_before = (index * numerator // denominator).to(tl.int32)
    is_low = ((index + 1) * numerator // denominator).to(tl.int32) > low_before
    place = sample * (allocs_per_sample - num_low) + index.to(tl.int32) - low_before
    tl.store(places_in(work, tile_slots) + allocs, tl.where(is_low, -1, place), mask=allocs < num_allocs)


def launches(layout: TahLayout, tile_slots: int, num_measured: int) -> tuple[list[Launch], int, int]:
    """The kernels that select; words of borders and tallies, and of histograms, which begin as zeros."""
    n, num_low, num_samples = layout.allocs_per_sample, layout.num_low, layout.tiling.num_samples
    if layout.spec.adaptive == "off":
        share = layout.even_share
        grid = (-(-layout.num_allocs // KEYS_PER_PROGRAM), 1, 1)
        numbers = (tile_slots, num_measured, layout.num_allocs, n, num_low, share.numerator, share.denominator)
        return [Launch(spread_kernel, grid, numbers, {"num_warps": 8, "num_stages": 1})], 0, 0
    is_counted = n > MAX_KEYS_IN_REGISTERS  # too large for one program to find a sample's border
    num_blocks, alloc_slots = -(-n // KEYS_PER_PROGRAM), slots(layout.num_allocs)
    grid, ranked = (num_blocks, num_samples, 1), (tile_slots, alloc_slots, n, num_low)
    keyed = (tile_slots, alloc_slots, num_measured, n, layout.tiles_per_alloc)
    options = {"num_warps": 4, "num_stages": 1}
    rule = {"IS_SINGLE": layout.tiles_per_alloc == 1, "REVERSE": layout.spec.select == "low", "COUNTED": is_counted}
    kernels = [Launch(key_kernel, grid, keyed, rule | options)]
    if is_counted:
        kernels += [Launch(count_kernel, grid, ranked, {"LEVEL": level} | options) for level in (1, 2)]
        kernels.append(Launch(tally_kernel, grid, ranked, options))
    else:
        block = max(KEYS_PER_PROGRAM, 1 << (n - 1).bit_length())
        in_registers = {"BLOCK": block, "num_warps": max(4, block // 2048), "num_stages": 1}
        kernels.append(Launch(bisect_kernel, (num_samples, 1, 1), ranked, in_registers))
    kernels.append(Launch(place_kernel, grid, ranked, options))
    num_counts = NUM_LEVELS * NUM_BINS * num_samples if is_counted else 0
    return kernels, 2 * num_samples * (1 + num_blocks), num_counts
