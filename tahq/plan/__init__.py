"""Which hosts, in which order, with how many layers: measurements in, a plan and its predicted speed out."""
