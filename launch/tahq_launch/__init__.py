"""From cluster.yaml to running processes: the command line, the launcher, the dry run."""
