"""A worker that measures in place of training: its compute, its codecs, and its ways to the others."""
