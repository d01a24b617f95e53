"""`memory:` of cluster.yaml: how a stage holds less."""

from typing import Literal

from tahq.units import Section

COAT_FAMILIES = ("llama", "qwen2", "mistral")
"""Families whose block is Llama's: two RMSNorms, a gated SiLU, nothing between projections and rotary embedding."""


class CoatConfig(Section):
    """`memory.coat`: choices of `activations: coat`."""

    backward_products: Literal["e5m2", "e4m3", "bf16"] = "e5m2"
    """What a linear layer's backward multiplies the gradient of its output as; gradients themselves stay bf16."""
    keep_weight_codes: bool = True
    """Keep the weights' FP8 codes for all micro-batches of a step; else only their scales, the weights being coded
    again for every product."""


class MemoryConfig(Section):
    """What a stage keeps, and as what."""

    activations: Literal["none", "coat"] = "none"
    """`none`: as torch saves them; `coat`: FP8 (COAT), for Llama and models built like it."""
    coat: CoatConfig = CoatConfig()
