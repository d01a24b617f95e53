"""COAT: FP8 optimizer states and FP8 activations."""
