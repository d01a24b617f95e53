"""How workers take their stages, and whom they reach."""
