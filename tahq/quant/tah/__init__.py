"""TAH-Quant: the paper's codec, for activations."""
