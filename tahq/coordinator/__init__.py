"""Who takes part, what is committed, how a run ends: pure cores, and one thin service around them."""
