"""Sweeps: sweep.yaml, its points, their measurement, results, tables and plots."""
