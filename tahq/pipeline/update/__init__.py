"""From accumulated gradients to new weights."""
