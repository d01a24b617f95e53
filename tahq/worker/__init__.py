"""One worker process: one stage, from JOIN to BYE."""
