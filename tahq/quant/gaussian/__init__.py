"""What `eden` and `wf` share: Gaussian-optimal levels, widths of tiles, small scales, the stream."""
