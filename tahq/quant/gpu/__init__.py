"""Parts that the `triton` backends of all codecs share."""
