"""Measuring a cluster: which pairs of hosts measure when, the measuring connections, and the results."""
