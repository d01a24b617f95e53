"""AdamW with moments in fp32, bf16 or 8 bits: reference, kernels and states."""
