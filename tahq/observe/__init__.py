"""What one sees of a run and what it leaves behind: metrics.jsonl, a live table or plain lines, a summary."""
