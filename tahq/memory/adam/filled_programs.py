"""Loads and stores of kernels that run without masks in programs that are filled, and with them in the last one."""

import triton
import triton.language as tl


@triton.jit
def load_once(pointers, is_real, other, MASKED: tl.constexpr):
    """What is read once: it leaves the cache before tables do."""
    if MASKED:
        return tl.load(pointers, mask=is_real, other=other, eviction_policy="evict_first")
    return tl.load(pointers, eviction_policy="evict_first")


@triton.jit
def store(pointers, values, is_real, MASKED: tl.constexpr):
    """Values where they are real."""
    if MASKED:
        tl.store(pointers, values, mask=is_real)
    else:
        tl.store(pointers, values)
