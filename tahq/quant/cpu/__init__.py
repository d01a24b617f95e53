"""What the `cpu` backends (numba) share."""
