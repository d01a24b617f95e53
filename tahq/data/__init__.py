"""Text and token files, as the same micro-batches on every worker: tokenizer, dataset, batches."""
