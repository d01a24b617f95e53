"""The codecs `eden` and `wf`: Gaussian-optimal levels, widths of tiles, small scales, the stream, the kernels."""
