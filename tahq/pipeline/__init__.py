"""Schedule, stage, boundary, engine, commit and snapshot: one training step through the pipeline."""
