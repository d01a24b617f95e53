"""From a cluster.yaml to running processes, and what keeps them running."""
