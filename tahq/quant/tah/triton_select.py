"""Which allocation tiles get H bits, on CUDA: an exact selection by rank, without sorting.

A tile's entropy becomes a whole number, its key: ⌊H·2^20⌋, below 2^24, so that a rank is found by counting
keys. (Entropies closer than 2^-20 may so be taken for equal, and then the lower index ranks first, as of
equal ones; sums of logarithms in fp32 are not more exact than that.) Up to `MAX_KEYS_IN_REGISTERS` tiles a
sample, one program a sample holds all keys and bisects. Beyond, four small kernels count the keys' upper and
then lower twelve bits in histograms, which gives the border key and how many of its equals get L bits.

Each way leaves, for every allocation tile, its place among those with H bits, or −1 for L bits. Shape
letters: n allocation tiles a sample.
"""

import triton
import triton.language as tl

from tahq.quant.gpu.tiles import MAX_MEASURED, as_floats, power_of_two, tensor_exponent
from tahq.quant.tah.reference import TOP_EXPONENT

MAX_KEYS_IN_REGISTERS = 32768
KEYS_PER_PROGRAM = 4096
NUM_BINS = 4096
_BINS = tl.constexpr(NUM_BINS)
_BLOCK = tl.constexpr(KEYS_PER_PROGRAM)
_TALLIES = tl.constexpr(256)
_LARGEST_KEY = tl.constexpr((1 << 24) - 1)
_KEYS_PER_NAT = tl.constexpr(float(1 << 20))
_MEASURED = tl.constexpr(MAX_MEASURED)
_TOP = tl.constexpr(TOP_EXPONENT)
_EPSILON = tl.constexpr(1e-12)
_TINY = tl.constexpr(1e-37)


@triton.jit
def _scaled_mass(masses, tiles, is_real, exponent):
    """‖α‖₁·2^e of tiles; a negative mass stands for one of 2^64 times its magnitude."""
    mass = tl.load(masses + tiles, mask=is_real, other=0.0)
    return tl.abs(mass) * power_of_two(exponent + tl.where(mass < 0, 64, 0))


@triton.jit
def _entropy(entropies, masses, allocs, is_real, exponent, tiles_per_alloc, IS_SINGLE: tl.constexpr):
    """Entropy of allocation tiles from their tiles': Σ w·(H − log w), w = mass/total, then ϵ's share in it.

    With r = ‖a‖₁/(‖a‖₁ + ϵ), the shares p = r·|a|/‖a‖₁ have r times the entropy, and −r·log r.
    """
    first = allocs * tiles_per_alloc
    total = _scaled_mass(masses, first, is_real, exponent)
    if IS_SINGLE:
        entropy = tl.load(entropies + first, mask=is_real, other=0.0)
    else:
        for k in range(1, tiles_per_alloc):
            total += _scaled_mass(masses, first + k, is_real, exponent)
        entropy = tl.zeros_like(total)
        for k in range(tiles_per_alloc):
            weight = _scaled_mass(masses, first + k, is_real, exponent) / tl.where(total > 0, total, 1.0)
            within = tl.load(entropies + first + k, mask=is_real, other=0.0)
            entropy += weight * (within - tl.log(tl.maximum(weight, _TINY)))
    ratio = total / (total + _EPSILON)
    return ratio * (entropy - tl.log(tl.maximum(ratio, _TINY)))


@triton.jit
def entropies_in(work):
    """Where the entropies of tiles are; their masses follow `tile_slots` further on."""
    return as_floats(work + _MEASURED)


@triton.jit
def places_in(work, tile_slots):
    """Where the places of allocation tiles are; of large samples, the keys follow `alloc_slots` further on."""
    return work + _MEASURED + 2 * tile_slots


@triton.jit
def _key(
    work,
    tile_slots,
    num_measured,
    allocs,
    is_real,
    tiles_per_alloc,
    IS_SINGLE: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """Keys in the order of rank; of lanes without a tile, one above all."""
    exponent, _ = tensor_exponent(work, num_measured, _TOP)
    entropies = entropies_in(work)
    entropy = _entropy(entropies, entropies + tile_slots, allocs, is_real, exponent, tiles_per_alloc, IS_SINGLE)
    key = tl.minimum(tl.maximum(entropy * _KEYS_PER_NAT, 0.0).to(tl.int32), _LARGEST_KEY)
    if REVERSE:
        key = _LARGEST_KEY - key
    return tl.where(is_real, key, _LARGEST_KEY + 1)


@triton.jit
def _place(key, border, num_ties_low, above_before, equal_before):
    """Place of each tile among those with H bits, −1 for L: `num_ties_low` of the keys at the border get L."""
    is_high = (key > border) | ((key == border) & (equal_before >= num_ties_low))
    return tl.where(is_high, above_before + tl.maximum(equal_before - num_ties_low, 0), -1)


@triton.jit(do_not_specialize=["num_measured", "allocs_per_sample", "num_low", "tiles_per_alloc"])
def select_kernel(
    work,
    tile_slots,
    num_measured,
    allocs_per_sample,
    num_low,
    tiles_per_alloc,
    IS_SINGLE: tl.constexpr,
    REVERSE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a sample: bisect for the smallest key that `num_low` keys do not exceed."""
    index = tl.arange(0, BLOCK)
    is_real = index < allocs_per_sample
    first = tl.program_id(0) * allocs_per_sample
    key = _key(work, tile_slots, num_measured, first + index, is_real, tiles_per_alloc, IS_SINGLE, REVERSE)
    border = tl.min(key, axis=0)
    most = tl.max(tl.where(is_real, key, 0), axis=0)
    while border < most:
        middle = (border + most) // 2
        is_enough = tl.sum((key <= middle).to(tl.int32), axis=0) >= num_low
        most = tl.where(is_enough, middle, most)
        border = tl.where(is_enough, border, middle + 1)
    above, equal = ((key > border) & is_real).to(tl.int32), (key == border).to(tl.int32)
    num_ties_low = num_low - tl.sum((key < border).to(tl.int32), axis=0)
    both = above + (equal << 16)
    before = tl.cumsum(both, axis=0) - both  # of each kind at most 32,767
    place = _place(key, border, num_ties_low, before & 0xFFFF, before >> 16)
    high_before = tl.program_id(0) * (allocs_per_sample - num_low)
    tl.store(places_in(work, tile_slots) + first + index, tl.where(place < 0, -1, high_before + place), mask=is_real)


@triton.jit
def _find_bin(counts, rank):
    """The first bin up to which `rank` keys are counted, and how many of them are in this bin."""
    counted = tl.cumsum(tl.load(counts + tl.arange(0, _BINS)), axis=0)
    is_below = counted < rank
    bin = tl.sum(is_below.to(tl.int32), axis=0)
    return bin, rank - tl.max(tl.where(is_below, counted, 0), axis=0)


@triton.jit
def _find_border(counts, num_low):
    """The border key of this program's sample, and how many of the keys that equal it get L bits."""
    upper, rank = _find_bin(counts, num_low)
    lower, num_ties_low = _find_bin(counts + _BINS, rank)
    return upper * _BINS + lower, num_ties_low


@triton.jit
def _own_lanes(allocs_per_sample):
    """This program's allocation tiles, [_BLOCK], and which of its lanes have one. Grid [blocks, samples]."""
    index = tl.program_id(0) * _BLOCK + tl.arange(0, _BLOCK)
    return tl.program_id(1) * allocs_per_sample + index, index < allocs_per_sample


@triton.jit
def _own_counts(work, tile_slots, alloc_slots):
    """The histograms of this program's sample: upper bits, then lower ones."""
    return places_in(work, tile_slots) + 2 * alloc_slots + tl.program_id(1) * (2 * _BINS)


@triton.jit
def _own_tallies(work, tile_slots, alloc_slots):
    """Pairs of tallies of this program's sample, a pair a block."""
    counts = places_in(work, tile_slots) + 2 * alloc_slots
    return counts + tl.num_programs(1) * (2 * _BINS) + tl.program_id(1) * tl.num_programs(0) * 2


@triton.jit
def _own_keys(work, tile_slots, alloc_slots, allocs, is_real):
    keys = places_in(work, tile_slots) + alloc_slots
    return tl.load(keys + allocs, mask=is_real, other=_LARGEST_KEY + 1)


@triton.jit(do_not_specialize=["num_measured", "allocs_per_sample", "tiles_per_alloc"])
def count_upper_kernel(
    work,
    tile_slots,
    alloc_slots,
    num_measured,
    allocs_per_sample,
    tiles_per_alloc,
    IS_SINGLE: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """Keys of all allocation tiles; histogram of their upper twelve bits."""
    allocs, is_real = _own_lanes(allocs_per_sample)
    key = _key(work, tile_slots, num_measured, allocs, is_real, tiles_per_alloc, IS_SINGLE, REVERSE)
    tl.store(places_in(work, tile_slots) + alloc_slots + allocs, key, mask=is_real)
    bins = _own_counts(work, tile_slots, alloc_slots) + key // _BINS
    tl.atomic_add(bins, tl.full([_BLOCK], 1, tl.int32), mask=is_real, sem="relaxed")


@triton.jit(do_not_specialize=["allocs_per_sample", "num_low"])
def count_lower_kernel(work, tile_slots, alloc_slots, allocs_per_sample, num_low):
    """Histogram of the lower twelve bits of the keys whose upper ones are the border's."""
    allocs, is_real = _own_lanes(allocs_per_sample)
    key = _own_keys(work, tile_slots, alloc_slots, allocs, is_real)
    counts = _own_counts(work, tile_slots, alloc_slots)
    upper, _ = _find_bin(counts, num_low)
    is_counted = is_real & (key // _BINS == upper)
    bins = counts + _BINS + key % _BINS
    tl.atomic_add(bins, tl.full([_BLOCK], 1, tl.int32), mask=is_counted, sem="relaxed")


@triton.jit(do_not_specialize=["allocs_per_sample", "num_low"])
def tally_kernel(work, tile_slots, alloc_slots, allocs_per_sample, num_low):
    """How many keys of each block lie above the border, and how many at it."""
    allocs, is_real = _own_lanes(allocs_per_sample)
    key = _own_keys(work, tile_slots, alloc_slots, allocs, is_real)
    border, _ = _find_border(_own_counts(work, tile_slots, alloc_slots), num_low)
    own = _own_tallies(work, tile_slots, alloc_slots) + 2 * tl.program_id(0)
    tl.store(own, tl.sum((is_real & (key > border)).to(tl.int32), axis=0))
    tl.store(own + 1, tl.sum((is_real & (key == border)).to(tl.int32), axis=0))


@triton.jit
def _sum_before(tallies):
    """Sum of the tallies of the blocks before this program's."""
    total = tl.zeros([_TALLIES], tl.int32)
    for start in range(0, tl.program_id(0), _TALLIES):
        block = start + tl.arange(0, _TALLIES)
        total += tl.load(tallies + 2 * block, mask=block < tl.program_id(0), other=0)
    return tl.sum(total, axis=0)


@triton.jit(do_not_specialize=["allocs_per_sample", "num_low"])
def place_kernel(work, tile_slots, alloc_slots, allocs_per_sample, num_low):
    """Places, counted on from those of the blocks before."""
    allocs, is_real = _own_lanes(allocs_per_sample)
    key = _own_keys(work, tile_slots, alloc_slots, allocs, is_real)
    border, num_ties_low = _find_border(_own_counts(work, tile_slots, alloc_slots), num_low)
    above, equal = (is_real & (key > border)).to(tl.int32), (is_real & (key == border)).to(tl.int32)
    tallies = _own_tallies(work, tile_slots, alloc_slots)
    above_before = tl.cumsum(above, axis=0) - above + _sum_before(tallies)
    equal_before = tl.cumsum(equal, axis=0) - equal + _sum_before(tallies + 1)
    high_before = tl.program_id(1) * (allocs_per_sample - num_low)
    place = _place(key, border, num_ties_low, above_before, equal_before)
    tl.store(places_in(work, tile_slots) + allocs, tl.where(place < 0, -1, high_before + place), mask=is_real)


@triton.jit(do_not_specialize=["num_allocs", "allocs_per_sample", "num_low", "numerator", "denominator"])
def spread_kernel(work, tile_slots, num_allocs, allocs_per_sample, num_low, numerator, denominator):
    """Places where L bits are spread evenly: of the first i tiles, ⌊i·share⌋ have them."""
    allocs = tl.program_id(0) * _BLOCK + tl.arange(0, _BLOCK)
    sample = allocs // allocs_per_sample
    index = (allocs - sample * allocs_per_sample).to(tl.int64)
    low_before = (index * numerator // denominator).to(tl.int32)
    is_low = ((index + 1) * numerator // denominator).to(tl.int32) > low_before
    place = sample * (allocs_per_sample - num_low) + index.to(tl.int32) - low_before
    tl.store(places_in(work, tile_slots) + allocs, tl.where(is_low, -1, place), mask=allocs < num_allocs)
