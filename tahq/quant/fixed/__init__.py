"""Group-wise fixed point."""
