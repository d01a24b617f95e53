"""Tensors in host memory: `memory.offload`."""
