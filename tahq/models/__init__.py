"""A Hugging Face causal language model cut into stages."""
