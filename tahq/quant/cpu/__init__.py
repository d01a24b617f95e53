"""Parts that the `cpu` backends (numba) of all codecs share."""
