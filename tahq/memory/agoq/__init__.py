"""AGoQ: activations and gradients in 4 to 8 bits."""
