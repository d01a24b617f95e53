"""What `eden` and `wf` do alike with one tile on the CPU: room for it, its codes as planes and back."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tahq.quant.cpu.kernel import kernel
from tahq.quant.cpu.levels import Ladder, Levels, read_levels, write_codes
from tahq.quant.cpu.numbers import Fp32Array, Values
from tahq.quant.cpu.planes import ByteArray, read_planes, write_planes
from tahq.quant.cpu.small_scale import scale_of
from tahq.quant.cpu.tiles import Grid, power_of_two
from tahq.quant.tiling import Tiling


class Field(NamedTuple):
    """A tensor in memory, and how its values and those that are transformed belong together.

    Attributes:
        values: of the tensor.
        grid: where its tiles lie.
        factor: 2^e in encoding, 2^−e in decoding.
        norm: fp32(1/√G).
    """

    values: Values
    grid: Grid
    factor: np.float32
    norm: np.float32

    @classmethod
    def of(cls, values: Values, tiling: Tiling, exponent: int) -> "Field":
        """A tensor that is multiplied by 2^exponent."""
        return cls(values, Grid.of(tiling), power_of_two(exponent), np.float32(tiling.group**-0.5))


class Scratch(NamedTuple):
    """Room for one tile.

    Attributes:
        z: fp32 [G], its values.
        magnitudes: fp32 [G], theirs.
        ladder: thresholds and levels of its width.
        codes: uint8 [G].
        words: uint64 [G/8], the memory of `codes`.
    """

    z: Fp32Array
    magnitudes: Fp32Array
    ladder: Ladder
    codes: ByteArray
    words: NDArray[np.uint64]

    @classmethod
    def of(cls, group: int) -> "Scratch":
        """Fresh memory, for one thread."""
        codes = np.empty(group, np.uint8)
        z, magnitudes = np.empty(group, np.float32), np.empty(group, np.float32)
        return cls(z, magnitudes, Ladder.of(group), codes, codes.view(np.uint64))


@kernel
def encode_planes(scratch: Scratch, bits: int, codes: ByteArray, start: int) -> None:
    """Codes of a tile from `scratch.z` and the ladder's indices, as `bits` planes from plane `start` on."""
    write_codes(scratch.z, bits, scratch.ladder.indices, scratch.codes)
    write_planes(scratch.words, 0, bits, codes, start * scratch.words.size)


@kernel
def decode_planes(codes: ByteArray, start: int, bits: int, scale: int, levels: Levels, scratch: Scratch) -> None:
    """scratch.z = the level of each code times the value of `scale`, which is finite."""
    scratch.words[:] = 0
    read_planes(codes, start * scratch.words.size, 0, bits, scratch.words)
    read_levels(levels.signed[bits], scratch.codes, scale_of(scale), scratch.z)
