"""What the `triton` backends share."""
