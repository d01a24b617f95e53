"""`wf` on CUDA, the kernels that run before bits are allocated: means, energies, levels.

The tensor is read twice, for its exponent and the channels' sums and then, the means being known, for the energies of
tiles. Both walk down columns of tiles, so that a program meets few channels. Sums over tokens are fp64, of a fixed
number of parts in a fixed order, and taken before the exponent is known: a power of two changes none of their bits.
Energies are taken without the transform, which keeps them; a tile that is not finite has −1.

Shape letters: R tokens of a block of a column, G channels a tile.
"""

import triton
import triton.language as tl

from tahq.quant.gpu.small_scale import nearest_code
from tahq.quant.gpu.tiles import (
    INFINITY,
    as_floats,
    as_halves,
    from_half,
    magnitude_bits,
    power_of_two,
    store_measured,
    tensor_exponent,
)
from tahq.quant.tah.reference import TOP_EXPONENT
from tahq.quant.wf.reference import SAME_LEVEL

TOKENS_PER_PROGRAM = 8
"""Of the kernel that makes levels of energies."""
_TOKENS = tl.constexpr(TOKENS_PER_PROGRAM)
_TILES_AT_ONCE = tl.constexpr(128)
_SUMS_AT_ONCE = tl.constexpr(4096)
_TOP, _SAME_LEVEL = tl.constexpr(TOP_EXPONENT), tl.constexpr(SAME_LEVEL)


@triton.jit
def _as_doubles(pointer):
    """A pointer to words of 32 bits as one to fp64."""
    return pointer.to(tl.pointer_type(tl.float64), bitcast=True)


@triton.jit
def _locate_column(x, token, column, channels, tiles_per_token, G: tl.constexpr, PADDED: tl.constexpr):
    """Pointers [R, G] to the tiles of a column for tokens [R] of a contiguous tensor."""
    channel = tl.arange(0, G)[None, :]
    if PADDED:
        return x + (token.to(tl.int64) * channels + column * G)[:, None] + channel
    return x + ((token.to(tl.int64) * tiles_per_token + column) * G)[:, None] + channel


@triton.jit
def _is_real(token, stop, column, channels, G: tl.constexpr, PADDED: tl.constexpr):
    """Which channels [R, G] of a column there are, for tokens [R] up to `stop`."""
    if PADDED:
        return (token < stop)[:, None] & (column * G + tl.arange(0, G) < channels)[None, :]
    return (token < stop)[:, None] & (tl.arange(0, G) < G)[None, :]


@triton.jit(do_not_specialize=["num_tokens", "channels", "tiles_per_token", "num_parts", "tokens_per_part"])
def measure_kernel(
    x,
    work,
    num_tokens,
    channels,
    tiles_per_token,
    num_parts,
    tokens_per_part,
    sums_at,
    G: tl.constexpr,
    TOKENS: tl.constexpr,
    PADDED: tl.constexpr,
    CENTER: tl.constexpr,
):
    """Sums of channels over parts of the tokens, fp64, without tiles that are not finite; largest magnitudes."""
    largest_seen = tl.zeros([TOKENS], tl.int32)
    largest_finite = tl.zeros([TOKENS], tl.int32)
    for item in range(tl.program_id(0), tiles_per_token * num_parts, tl.num_programs(0)):
        part = item // tiles_per_token
        column = item - part * tiles_per_token
        stop = tl.minimum((part + 1) * tokens_per_part, num_tokens)
        total = tl.zeros([TOKENS, G], tl.float64)
        for first in range(part * tokens_per_part, stop, TOKENS):
            token = first + tl.arange(0, TOKENS)
            pointers = _locate_column(x, token, column, channels, tiles_per_token, G, PADDED)
            is_real = _is_real(token, stop, column, channels, G, PADDED)
            values = tl.load(pointers, mask=is_real, other=0.0).to(tl.float32)
            largest = tl.max(magnitude_bits(values), axis=1)
            is_finite = largest < INFINITY
            largest_seen = tl.maximum(largest_seen, largest)
            largest_finite = tl.maximum(largest_finite, tl.where(is_finite, largest, 0))
            if CENTER:
                total += tl.where(is_finite[:, None], values, 0.0).to(tl.float64)
        if CENTER:
            own = _as_doubles(work + sums_at) + (part.to(tl.int64) * tiles_per_token + column) * G
            tl.store(own + tl.arange(0, G), tl.sum(total, axis=0))
    store_measured(work, largest_seen, largest_finite)


@triton.jit
def _half_means(sums, exponent, column, num_tokens, tiles_per_token, num_parts, G: tl.constexpr):
    """Means [G] of a column's channels times 2^e, as bits of fp16 (int32), never −0."""
    PARTS: tl.constexpr = _SUMS_AT_ONCE // G
    channel = tl.arange(0, G)[None, :]
    total = tl.zeros([G], tl.float64)
    for first in range(0, num_parts, PARTS):
        part = first + tl.arange(0, PARTS)[:, None]
        own = sums + (part.to(tl.int64) * tiles_per_token + column) * G + channel
        total += tl.sum(tl.load(own, mask=(part < num_parts) & (channel < G), other=0.0), axis=0)
    mean = total * power_of_two(exponent).to(tl.float64) / num_tokens.to(tl.float64)
    bits = mean.to(tl.float32).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return tl.where(bits == 0x8000, 0, bits)


@triton.jit(
    do_not_specialize=["num_measured", "num_tokens", "channels", "tiles_per_token", "num_parts", "tokens_per_part"]
)
def energy_kernel(
    x,
    work,
    buf,
    num_measured,
    num_tokens,
    channels,
    tiles_per_token,
    num_parts,
    tokens_per_part,
    sums_at,
    energies_at,
    mean_at,
    G: tl.constexpr,
    TOKENS: tl.constexpr,
    PADDED: tl.constexpr,
    CENTER: tl.constexpr,
):
    """Means, in the stream, and the mean square of every centered tile, −1 of one that is not finite."""
    exponent, _ = tensor_exponent(work, num_measured, _TOP)
    factor = power_of_two(exponent)
    for item in range(tl.program_id(0), tiles_per_token * num_parts, tl.num_programs(0)):
        part = item // tiles_per_token
        column = item - part * tiles_per_token
        stop = tl.minimum((part + 1) * tokens_per_part, num_tokens)
        mean = tl.zeros([G], tl.float32)
        if CENTER:
            sums = _as_doubles(work + sums_at)
            bits = _half_means(sums, exponent, column, num_tokens, tiles_per_token, num_parts, G)
            channel = column * G + tl.arange(0, G)
            if part == 0:
                tl.store(as_halves(buf + mean_at) + channel, bits.to(tl.int16), mask=channel < channels)
            mean = from_half(bits)
        for first in range(part * tokens_per_part, stop, TOKENS):
            token = first + tl.arange(0, TOKENS)
            pointers = _locate_column(x, token, column, channels, tiles_per_token, G, PADDED)
            is_real = _is_real(token, stop, column, channels, G, PADDED)
            values = tl.load(pointers, mask=is_real, other=0.0).to(tl.float32)
            is_finite = tl.max(magnitude_bits(values), axis=1) < INFINITY
            y = tl.where(is_finite[:, None], values * factor - mean[None, :], 0.0)
            energy = tl.where(is_finite, tl.sum(y * y, axis=1) * (1.0 / G), -1.0)
            tl.store(as_floats(work + energies_at) + token * tiles_per_token + column, energy, mask=token < stop)


@triton.jit
def _own_energies(energies, token, first, num_tokens, tiles_per_token):
    """Energies [tokens, tiles] from tile `first` of each token on, where they are, and which there are."""
    tile = first + tl.arange(0, _TILES_AT_ONCE)[None, :]
    is_real = (token[:, None] < num_tokens) & (tile < tiles_per_token)
    place = token[:, None] * tiles_per_token + tile
    return tl.maximum(tl.load(energies + place, mask=is_real, other=0.0), 0.0), place, is_real


@triton.jit(do_not_specialize=["num_tokens", "tiles_per_token"])
def level_kernel(work, num_tokens, tiles_per_token, energies_at, levels_at):
    """Levels of tiles in their tokens: code(√E) − code(√F) + 255, F being the mean of the token's E."""
    energies = as_floats(work + energies_at)
    token = tl.program_id(0) * _TOKENS + tl.arange(0, _TOKENS)
    total = tl.zeros([_TOKENS, _TILES_AT_ONCE], tl.float32)
    for first in range(0, tiles_per_token, _TILES_AT_ONCE):
        energy, _, _ = _own_energies(energies, token, first, num_tokens, tiles_per_token)
        total += energy
    sums = tl.sum(total, axis=1)
    of_token = nearest_code(tl.sqrt_rn(tl.div_rn(sums, tl.zeros_like(sums) + tiles_per_token.to(tl.float32))))
    for first in range(0, tiles_per_token, _TILES_AT_ONCE):
        energy, place, is_real = _own_energies(energies, token, first, num_tokens, tiles_per_token)
        level = nearest_code(tl.sqrt_rn(energy)) - of_token[:, None] + _SAME_LEVEL
        tl.store(work + levels_at + place, level, mask=is_real)
