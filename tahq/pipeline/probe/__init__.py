"""Measures what lossy codecs do to a model's gradients, against Assumption 4.4 of TAH-Quant."""
