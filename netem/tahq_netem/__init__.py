"""Slow networks on one machine: namespaces, shaped links, sweeps, plots."""
