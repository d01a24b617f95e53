"""What numba has compiled or loaded in this process."""

import sys


def compiled_kernels() -> dict[str, tuple[int, int]]:
    """Of every kernel of tahq's that was ever called: how many signatures it has, and how many were looked for."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("tahq.quant.")]
    kernels = {
        f"{value.__module__}.{value.__name__}": value
        for module in modules
        for value in vars(module).values()
        if hasattr(value, "nopython_signatures")
    }
    return {
        name: (
            len(kernel.nopython_signatures),
            sum(kernel.stats.cache_hits.values()) + sum(kernel.stats.cache_misses.values()),
        )
        for name, kernel in kernels.items()
        if kernel.nopython_signatures
    }
