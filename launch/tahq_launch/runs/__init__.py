"""Commands around a run: which there are, how they stand, their logs, stopping them, fetching their checkpoints."""
