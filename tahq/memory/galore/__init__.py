"""GaLore and Q-GaLore: low-rank gradients, INT8 weights, INT4 projections."""
