"""Part of bench_layer.py: products with quantisation in their epilogue, or dequantisation in their prologue, against
cuBLAS with a kernel of its own for that (AGoQ Table 11)."""

import statistics

import torch
from coat_norms import Work
from harness import milliseconds

CALLS = 3
SHAPES = [(16384, 14336, 4096), (16384, 4096, 14336), (16384, 4096, 12288), (16384, 4096, 4096)]
"""m, k, n of the paper."""
NAMES = (
    *("cuBLAS", "Triton", "cuBLAS, then quantised", "Triton, quantised in it"),
    *("dequantised, then cuBLAS", "Triton, dequantised in it"),
)
BITS = 4


def variants(m: int, k: int, n: int, device: torch.device) -> dict[str, Work]:
    """What is timed; products of both ways differ by their order of summation, codes of one result do not."""
    from coded_gemm_kernels import decoding_product, product

    from tahq.memory.agoq.stored_triton import dequantize, quantize

    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(size, k, device=device, generator=generator).bfloat16() for size in (m, n))
    coded = quantize(a, BITS)
    c, codes = product(a, b, BITS)
    if codes is None or not torch.equal(codes.codes, quantize(c, BITS).codes):
        raise AssertionError("codes made within the product differ from those of its result")
    works: tuple[Work, ...] = (
        lambda: a @ b.t(),
        lambda: product(a, b, None),
        lambda: quantize(a @ b.t(), BITS),
        lambda: product(a, b, BITS),
        lambda: dequantize(coded, a.shape, a.dtype) @ b.t(),
        lambda: decoding_product(coded, b, m),
    )
    return dict(zip(NAMES, works, strict=True))


def gemm_rows(shape: tuple[int, int, int], device: torch.device, repeats: int) -> list[str]:
    """Median milliseconds of each, and what fusion gains over the sequential version with cuBLAS."""
    works, times = variants(*shape, device), dict[str, list[float]]()
    for name, work in works.items():
        work()  # compiled, and tuned
        times[name] = []
    for _ in range(repeats):
        for name, work in works.items():
            times[name].append(milliseconds(work, device, CALLS))
    ms = [statistics.median(each) for each in times.values()]
    return [*map(str, shape), *(f"{each:.2f}" for each in ms), f"{ms[2] / ms[3]:.2f}×", f"{ms[4] / ms[5]:.2f}×"]
