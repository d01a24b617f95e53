"""AQ-SGD: what changed in a sample since it was last sent."""
