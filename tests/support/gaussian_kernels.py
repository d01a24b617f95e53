"""What the Triton kernels of `eden` and `wf` must share with the reference, interpreted and on CUDA alike."""

from collections.abc import Sequence

import torch

from support.codec_backends import decode, device_of, encode
from support.tile_agreement import Differences, as_bits, differences, layout_of
from tahq.quant import bit_planes, get_codec
from tahq.quant.backends import interprets_triton
from tahq.quant.gaussian import bit_allocation, tile_stream

BACKENDS = ("reference", "triton")


def decoded_dtypes() -> tuple[torch.dtype, ...]:
    """The interpreter cuts off where bf16 rounds, so that nothing is decoded to bf16 there."""
    exact = (torch.float32, torch.float16)
    return exact if interprets_triton() else (*exact, torch.bfloat16)


def check_kernels(spec: str, x: torch.Tensor, key: int = 0, dtypes: Sequence[torch.dtype] | None = None) -> Differences:
    """Both backends read both streams of x (on the CPU) to the same bits; what the streams differ in."""
    codecs = {backend: get_codec(spec, backend=backend) for backend in BACKENDS}
    streams = [encode(codec, x, backend, key) for backend, codec in codecs.items()]
    # the interpreter is slow: a stream that is the same byte for byte need not be read again
    for buf in streams[:1] if torch.equal(*streams) else streams:
        for dtype in dtypes or decoded_dtypes():
            ours, theirs = (decode(codec, buf, x.shape, backend, dtype, key) for backend, codec in codecs.items())
            assert (theirs.shape, theirs.dtype, theirs.is_contiguous()) == (x.shape, dtype, True)
            assert torch.equal(as_bits(ours), as_bits(theirs)), (spec, dtype)
    return differences(layout_of(spec, x.shape), *streams)


def check_allocation(levels: torch.Tensor, budget: int) -> None:
    """The kernels give tiles of these levels (int32 [T]) the widths that `bit_allocation` does, and count planes."""
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
    allocation.allocate_kernel[grid](
        work, buf, 0, count, budget - count, *places, work_at.starts, 0, RELATIVE=False, num_warps=8
    )
    expected = bit_allocation.allocate(levels, budget)
    starts = work[work_at.starts : work_at.starts + count + 1].cpu()
    assert torch.equal(starts.diff(), expected)
    assert starts[0] == 0
    packed = bit_planes.pack_numbers((expected - 1).to(torch.uint8), tile_stream.WIDTH_BITS)
    assert torch.equal(buf.cpu(), torch.nn.functional.pad(packed, (0, nbytes - len(packed))))
