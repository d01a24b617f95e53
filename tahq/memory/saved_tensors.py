"""Bytes that autograd keeps of one micro-batch, counted from a model's sizes.

Nothing is measured here: the counts follow from which tensors the operations of transformers' layers
save for their backward. Tests compare them with what autograd saves in fact.

Letters: T = B·S tokens of a micro-batch, C hidden channels, H query heads, K key and value heads, D
channels a head, I inner channels of the MLP, V vocabulary, a = 4 bytes an element in fp32, 2 under bf16
autocast. The residual stream, norms' statistics and softmax stay in fp32. Parameters are not counted, nor
the bf16 copies of matrices that autocast makes, which all micro-batches share (`weight_copies.py`): `copied_by_block`
and `copied_by_head` have those.

With `memory.activations: coat` blocks keep FP8 codes and their scales instead (`fp8_functions.py`), and no
copy of a matrix.
"""

import math
from dataclasses import dataclass

from tahq.memory.coat.fp8_codes import GROUP
from tahq.models.families import head_dim, num_kv_heads
from tahq.models.model_spec import ModelSpec
from tahq.models.partition import BlockRange

_FP32 = 4
_BF16 = 2
_FP8 = 1
_WRITTEN_OUT = "gelu_new"
"""GPT-2's own activation, in eight operations."""


@dataclass(frozen=True, slots=True)
class MicroBatchShape:
    """What a micro-batch is made of, and how it is computed.

    `copies_weights` False: what matrices multiply by under bf16 is decoded for each product, and not kept;
    `copies_head`: the same of the head's.
    """

    micro_batch: int
    seq_len: int
    bf16: bool = False
    coat: bool = False
    """`memory.activations: coat`."""
    coat_gradient_nbytes: int = 0
    """Bytes of an element of an output's gradient in FP8, in all its layouts; 0: it is not coded."""
    copies_weights: bool = True
    copies_head: bool = True

    @property
    def num_tokens(self) -> int:
        """T = B·S."""
        return self.micro_batch * self.seq_len

    @property
    def element_nbytes(self) -> int:
        """a: bytes of an element of what matrices multiply."""
        return _BF16 if self.bf16 else _FP32


def saved_by_slice(spec: ModelSpec, blocks: BlockRange, shape: MicroBatchShape, *, checkpoint_blocks: bool) -> int:
    """Bytes that one micro-batch in flight keeps in a stage.

    Without checkpointing: Σ `saved_by_block`, rotary tables, and the ends. With it: of each block
    its input, 4·T·C bytes, instead.
    """
    if checkpoint_blocks:
        inner = len(blocks) * _FP32 * shape.num_tokens * spec.hidden_size
    else:
        inner = sum(saved_by_block(spec, block, shape) for block in range(blocks.start, blocks.stop))
    first = saved_by_embedding(spec, shape) if blocks.first else 0
    last = saved_by_head(spec, shape) if blocks.last else 0
    return inner + rotary_tables(spec, shape) + first + last


def saved_by_block(spec: ModelSpec, block: int, shape: MicroBatchShape) -> int:
    """Bytes that one block keeps of a micro-batch.

    GPT-2: 8·T·C + 16·T of the two LayerNorms (input; mean and rstd), a·T·(6·C + 5·I) of what the
    matrices and the tanh GELU keep (norm outputs, Q, K, V, attention output; five of the MLP, two where the GELU is
    one operation, `gelu_pytorch_tanh`).
    Llama and its kin: 16·T·C + 8·T of the two RMSNorms (input, normalised input; rstd), their outputs
    once in fp32 (8·T·C), or once a matrix in bf16 (2·T·C each for Q, K, V, gate, up: 10·T·C),
    and a·T·(2·H·D + 2·K·D + 4·I). Qwen3 adds the norms of Q and K. Both add attention's statistics,
    see `_attention_weights`.
    With COAT instead of norms, outputs and MLP: see `_coat_block`; attention keeps what it keeps otherwise.
    """
    if shape.coat:
        return _coat_block(spec, shape) + _attention(spec, block, shape)
    norms = _layer_norm_block if spec.layout.rotary is None else _rms_norm_block
    return norms(spec, shape) + _attention(spec, block, shape)


def copied_by_block(spec: ModelSpec, shape: MicroBatchShape) -> int:
    """Bytes of bf16 copies of a block's matrices."""
    has_copies = shape.bf16 and shape.copies_weights and not shape.coat
    return _BF16 * spec.layout.block_weights(spec.hf_config) if has_copies else 0


def copied_by_head(spec: ModelSpec, shape: MicroBatchShape) -> int:
    """Bytes of the head's bf16 copy, 2·V·C."""
    return _BF16 * spec.hidden_size * spec.vocab_size if shape.bf16 and shape.copies_head else 0


def saved_by_embedding(spec: ModelSpec, shape: MicroBatchShape) -> int:
    """Bytes that the embedding keeps: int64 token ids, 8·T; positions, 8·S; dropout's mask, T·C."""
    layout = spec.layout
    dropped = layout.embedding_dropout is not None and getattr(spec.hf_config, layout.embedding_dropout) > 0
    positions = 8 * shape.seq_len if layout.positions is not None else 0
    return 8 * shape.num_tokens + positions + (shape.num_tokens * spec.hidden_size if dropped else 0)


def saved_by_head(spec: ModelSpec, shape: MicroBatchShape) -> int:
    """Bytes that final norm, head and loss keep.

    The norm's input (and, RMSNorm, normalised input) and statistics; its output, a·T·C; log-probabilities
    in fp32, 4·T·V, and their labels, 8·T, and number, 4.
    """
    tokens, hidden = shape.num_tokens, spec.hidden_size
    is_layer_norm = spec.layout.rotary is None
    norm = _FP32 * tokens * ((hidden + 2) if is_layer_norm else (2 * hidden + 1))
    loss = tokens * (_FP32 * spec.vocab_size + 8) + _FP32
    return norm + shape.element_nbytes * tokens * hidden + loss


def _layer_norm_block(spec: ModelSpec, shape: MicroBatchShape) -> int:
    """GPT-2's block without its attention: two LayerNorms, Q, K, V, output projection, tanh GELU."""
    tokens, hidden, config = shape.num_tokens, spec.hidden_size, spec.hf_config
    inner = int(config.n_inner or 4 * hidden)
    norms = 2 * _FP32 * tokens * (hidden + 2)
    masks = 2 * tokens * hidden if config.resid_pdrop > 0 else 0
    kept_inner = 5 if config.activation_function == _WRITTEN_OUT else 2
    return norms + masks + shape.element_nbytes * tokens * (2 * hidden + kept_inner * inner)


def _rms_norm_block(spec: ModelSpec, shape: MicroBatchShape) -> int:
    """A block of Llama's kind without its attention: two RMSNorms and a gated MLP."""
    tokens, hidden = shape.num_tokens, spec.hidden_size
    norms = 2 * _FP32 * tokens * (2 * hidden + 1)
    # Under autocast each of Q, K, V, gate and up makes its own bf16 copy of the norm's output.
    outputs = tokens * hidden * (5 * _BF16 if shape.bf16 else 2 * _FP32)
    mlp = shape.element_nbytes * tokens * 4 * int(spec.hf_config.intermediate_size)
    return norms + outputs + mlp + _query_key_norms(spec, shape)


def _coat_block(spec: ModelSpec, shape: MicroBatchShape) -> int:
    """A block of Llama's kind with FP8 flow, without its attention.

    Norm inputs, gate and up in groups of 16, with a bf16 scale each: T·(1 + 2/16)·(2·C + 2·I); norm outputs and
    the MLP's product with one scale: T·(2·C + I); rstd of two norms, 8·T; four scales in fp32, attention's among them.
    """
    tokens, hidden, inner = shape.num_tokens, spec.hidden_size, int(spec.hf_config.intermediate_size)
    grouped = sum(_FP8 * channels + _BF16 * math.ceil(channels / GROUP) for channels in (hidden, inner))
    return tokens * (2 * grouped + _FP8 * (2 * hidden + inner) + 2 * _FP32) + 4 * _FP32


def _query_key_norms(spec: ModelSpec, shape: MicroBatchShape) -> int:
    """Qwen3's RMSNorms of Q and K: input in fp32, normalised input, rstd a head."""
    if spec.family != "qwen3":
        return 0
    heads = int(spec.hf_config.num_attention_heads) + num_kv_heads(spec.hf_config)
    channels = head_dim(spec.hf_config)
    return shape.num_tokens * heads * (channels * (_FP32 + shape.element_nbytes) + _FP32)


def _attention(spec: ModelSpec, block: int, shape: MicroBatchShape) -> int:
    """Q, K, V and the output, a·T·D·(2·H + 2·K), and what the softmax needs.

    Keys and values are repeated for every query head (K = H) where the fused kernel cannot group them:
    with a mask or with dropout.
    """
    config = spec.hf_config
    heads, dropped = int(config.num_attention_heads), _attention_dropout(spec) > 0
    window = spec.layout.window(config, block)
    masked = window is not None and window <= shape.seq_len
    kv_heads = heads if dropped or masked else num_kv_heads(config)
    states = shape.element_nbytes * shape.num_tokens * head_dim(config) * (2 * heads + 2 * kv_heads)
    return states + _attention_weights(heads, shape, dropped=dropped, masked=masked)


def _attention_weights(heads: int, shape: MicroBatchShape, *, dropped: bool, masked: bool) -> int:
    """Fused: log-sum-exp in fp32, 4·T·H, and a mask of a·S² if there is a window.

    With dropout attention is written out: softmax in fp32, the mask in a byte and the dropped
    weights, (4 + 1 + a)·B·H·S², and the causal mask, S².
    """
    squared = shape.seq_len**2
    if dropped:
        return shape.micro_batch * heads * squared * (_FP32 + 1 + shape.element_nbytes) + squared
    return _FP32 * shape.num_tokens * heads + (shape.element_nbytes * squared if masked else 0)


def _attention_dropout(spec: ModelSpec) -> float:
    name = "attn_pdrop" if spec.layout.rotary is None else "attention_dropout"
    return float(getattr(spec.hf_config, name))


def rotary_tables(spec: ModelSpec, shape: MicroBatchShape) -> int:
    """Cosine and sine, [S, D] in fp32 each, shared by all blocks."""
    return 0 if spec.layout.rotary is None else 2 * _FP32 * shape.seq_len * head_dim(spec.hf_config)
