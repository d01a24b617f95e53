"""What can be known before a run: `tahq measure`, `tahq plan` and `--dry-run`."""
