"""Checkpoints of committed steps: written, copied to other hosts, chosen, read again."""
