"""`fixed` on the CPU in numba: two readings of the tensor, one of the stream, nothing of their size in between.

Encoding reads the tensor for its largest magnitudes, which decide the power of two and every scale, and again to
round and pack. Threads share ranges of groups. Streams and values equal the reference's to the bit.
"""

import torch

from tahq.errors import CodecError
from tahq.quant import stream
from tahq.quant.cpu.kernel import Team
from tahq.quant.cpu.numbers import Values
from tahq.quant.cpu.tiles import Grid, measure, power_of_two, top_exponent
from tahq.quant.fixed import stream as fixed_stream
from tahq.quant.fixed.cpu_kernels import Rule, Scratch, Sections, is_sound, read_groups, write_groups
from tahq.quant.fixed.reference import TOP_EXPONENT
from tahq.quant.fixed.stream import VERSION, FixedLayout


def encode(layout: FixedLayout, x: torch.Tensor, *, key: int = 0, threads: int = 1) -> torch.Tensor:
    """The stream of x, as `fixed.reference` and `fixed.stream` write it (TAH-Quant, Eq. 24).

    Args:
        layout: of x's shape.
        x: fp32, bf16 or fp16 on the CPU, of any strides, with at least one element; not written.
        key: of the draws of stochastic rounding.
        threads: how many may share the work.

    Returns:
        uint8 [nbytes].
    """
    values, grid, rule = Values.of(x), Grid.of(layout.tiling), Rule.of(layout, key)
    with Team(threads, x.numel()) as team:
        magnitudes = measure(values, layout.tiling, team)
        exponent = top_exponent(magnitudes.overall, TOP_EXPONENT)
        header = (VERSION, int(not magnitudes.all_finite), layout.log2_group, layout.spec.bits, exponent)
        buf = stream.new_stream(layout.sections.nbytes, header, x.device)
        sections, factor = Sections.of(layout, buf), power_of_two(exponent)

        def write(first: int, stop: int) -> None:
            of_tiles, scratch = magnitudes.of_tiles, Scratch.of(grid.group)
            write_groups(values, grid, rule, factor, of_tiles, first, stop, sections, scratch)

        team.share(layout.tiling.num_tiles, write)
    return buf


def decode(
    layout: FixedLayout, buf: torch.Tensor, dtype: torch.dtype, *, key: int = 0, threads: int = 1
) -> torch.Tensor:
    """The tensor of a stream.

    Args:
        layout: of the tensor's shape, with at least one element.
        buf: on the CPU; nothing in it is trusted.
        dtype: fp32, bf16 or fp16.
        key: ignored: a decoder needs no draws.
        threads: how many may share the work.

    Returns:
        A fresh, contiguous tensor of the layout's shape; a group that was not finite is NaN.

    Raises:
        CodecError: whatever `fixed.stream.unpack` refuses.
    """
    buf = stream.accept(buf, layout.sections.nbytes, layout.spec)
    is_flagged, exponent = fixed_stream.read_header(layout, buf)
    sections = Sections.of(layout, buf)
    _check(layout, buf, sections, is_flagged)
    x = torch.empty(layout.tiling.shape, dtype=dtype)
    values, grid, rule, factor = Values.of(x), Grid.of(layout.tiling), Rule.of(layout, key), power_of_two(-exponent)

    def read(first: int, stop: int) -> None:
        read_groups(values, grid, rule, factor, first, stop, sections, Scratch.of(grid.group))

    with Team(threads, x.numel()) as team:
        team.share(layout.tiling.num_tiles, read)
    return x


def _check(layout: FixedLayout, buf: torch.Tensor, sections: Sections, is_flagged: bool) -> None:
    """Refuse what the reference refuses, and let it say why: only a bad stream takes that slow way.

    Raises:
        CodecError: of `fixed.stream.unpack`.
    """
    if not is_sound(sections.scale, is_flagged) or layout.sections.has_dirty_filling(buf):
        fixed_stream.unpack(layout, buf)
        raise CodecError(f"{layout.spec}: damaged stream, though the reference takes it: please report this")
