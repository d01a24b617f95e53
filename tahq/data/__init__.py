"""Text and token files, as the same micro-batches on every worker that needs them.

`tokenizer.load_tokenizer` → `dataset.load_dataset` → `batches.BatchSource`. Nothing is imported here,
so that reading a configuration costs neither numpy nor torch.
"""
