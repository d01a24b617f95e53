"""Which workers take part, what is committed, how a run ends: pure functions, and a thin service around them."""
