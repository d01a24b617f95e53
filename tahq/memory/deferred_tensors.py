"""Bytes that a split backward keeps of one micro-batch from its input gradient, I, to its weight gradients, W.

Of every product with a weight what `DeferredGradients` needs: its input and the gradient of its output. With
checkpointing too, since I computes each block again and leaves these behind. Counted as `saved_tensors.py` counts, and
in its letters; N = 2·C + H·D + 2·K·D + 2·I are the output channels of the seven matrices of a Llama block.
"""

from tahq.memory.saved_tensors import MicroBatchShape
from tahq.models.families import head_dim, num_kv_heads
from tahq.models.model_spec import ModelSpec
from tahq.models.partition import BlockRange

_BF16 = 2
_FP32 = 4


def deferred_by_slice(spec: ModelSpec, blocks: BlockRange, shape: MicroBatchShape) -> int:
    """Bytes that one micro-batch keeps in a stage between I and W: those of its blocks, and the head's."""
    return len(blocks) * deferred_by_block(spec, shape) + (deferred_by_head(spec, shape) if blocks.last else 0)


def deferred_by_block(spec: ModelSpec, shape: MicroBatchShape) -> int:
    """Bytes of a block.

    GPT-2: a·T·(3·C + I) of inputs and a·T·(5·C + I) of gradients. Llama and its kin: the norms' outputs as they are
    saved, 8·T·C in fp32 and 10·T·C in bf16, a·T·(H·D + I) of attention's output and the MLP's product, a·T·N of
    gradients. With COAT all of these but attention's output in FP8, T·(2·C + I), and T·N times what an element of a
    gradient takes (`coat_gradient_nbytes`).
    """
    tokens, hidden, config, element = shape.num_tokens, spec.hidden_size, spec.hf_config, shape.element_nbytes
    if spec.layout.rotary is None:
        return element * tokens * (8 * hidden + 2 * int(config.n_inner or 4 * hidden))
    inner, width = int(config.intermediate_size), int(config.num_attention_heads) * head_dim(config)
    outputs = 2 * hidden + width + 2 * num_kv_heads(config) * head_dim(config) + 2 * inner
    if shape.coat:
        return tokens * (2 * hidden + inner + element * width + (shape.coat_gradient_nbytes or element) * outputs)
    norms = hidden * (5 * _BF16 if shape.bf16 else 2 * _FP32)
    return tokens * (norms + element * (width + inner + outputs))


def deferred_by_head(spec: ModelSpec, shape: MicroBatchShape) -> int:
    """Bytes of the head: its input and the gradient of the logits, a·T·(C + V)."""
    return shape.element_nbytes * shape.num_tokens * (spec.hidden_size + spec.vocab_size)
