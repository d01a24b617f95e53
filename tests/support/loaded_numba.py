"""Loads numba as it is imported, for the server of warm processes, which can only import."""

from tahq.quant.cpu.kernel import load_numba

load_numba()
