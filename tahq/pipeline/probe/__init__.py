"""What lossy codecs do to a model's gradients, measured against Assumption 4.4 of TAH-Quant."""
