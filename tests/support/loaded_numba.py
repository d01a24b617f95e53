"""Importing this module loads numba: the server of warm processes takes modules only."""

from tahq.quant.cpu.kernel import load_numba

load_numba()
