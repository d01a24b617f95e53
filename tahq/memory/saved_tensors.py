"""Bytes that autograd keeps of one micro-batch, counted from a model's sizes.

The counts follow from which tensors the operations of transformers' layers save for their backward; tests compare them
with what autograd saves.

Letters: T = B·S tokens of a micro-batch, C hidden channels, H query heads, K key and value heads, D channels per head,
I inner channels of the MLP, V vocabulary, a = 4 bytes per element in fp32, 2 under bf16 autocast, r = 4 bytes per
element of the residual stream, 2 where that is bf16. Norms' statistics and softmax stay in fp32. Parameters are not
counted, nor copies of matrices in the type of products, which all micro-batches share: see `copied_by_block` and
`copied_by_head`.

On CUDA norms and activations are kernels that keep their inputs and outputs (`fused`). With `memory.recompute` blocks
keep less (`memory/recompute.py`). With `memory.activations: coat` they keep FP8 codes
and their scales (`coat/fp8_flow.py`), and no copies; with `agoq` codes of some layers' inputs
(`agoq/stored_inputs.py`).

Between a split backward's input gradients, I, and its weight gradients, W, each product with a weight keeps its input
and the gradient of its output (`deferred_by_*`), with activation checkpointing too, since I recomputes each block.
"""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

import torch

from tahq.memory.coat.fp8_codes import GROUP
from tahq.memory.config import Recompute
from tahq.memory.dry_blocks import KeptBytes, kept_by_block, kinds_of_blocks
from tahq.memory.small_floats.block_codes import stored_nbytes
from tahq.models.families import head_dim, num_kv_heads
from tahq.models.keyed_dropout import MASK_ALIGNMENT
from tahq.models.model_spec import ModelSpec
from tahq.models.partition import BlockRange

_FP32 = 4
_BF16 = 2
_FP8 = 1
_MLP_AGAIN, _ATTENTION_AGAIN = ("ffn", "qkv", "att"), ("qkv", "att")
"""Levels of recomputation that compute a part of a block again as a whole."""
_WRITTEN_OUT = "gelu_new"  # GPT-2's own activation, in eight operations


@dataclass(frozen=True, slots=True)
class MicroBatchShape:
    """The sizes of a micro-batch, and how it is computed.

    `copies_weights` False: low-rank weights are decoded for each product under bf16, so no copy is kept;
    `copies_head`: the same for the head.
    """

    micro_batch: int
    seq_len: int
    bf16: bool = False
    on_cuda: bool = False
    coat: bool = False  # `memory.activations: coat`
    recompute: Recompute = "none"  # `memory.recompute`
    stored_bits: int | None = None  # Of `memory.activations: agoq`; None: inputs are kept unchanged
    stored_layers: Collection[str] = ()  # `memory.agoq.stored`, or what `recompute` keeps the inputs of
    fp8: bool = False  # `training.precision: fp8`
    codes_gradients: bool = False  # Whether the products of a backward take their output's gradient in FP8
    copies_weights: bool = True
    copies_head: bool = True
    loss_chunks: int = 1  # `memory.loss_chunks`
    has_z_loss: bool = False  # `training.z_loss` above 0
    weight_nbytes: int = 4  # Bytes per element of a matrix
    residual_nbytes: int = 4  # r
    packed: bool = False  # Whether rows have several records, which do not see each other

    @property
    def num_tokens(self) -> int:
        """T = B·S."""
        return self.micro_batch * self.seq_len

    @property
    def fused(self) -> bool:
        """Whether norms and activations are the kernels of `memory/recompute.py`."""
        return self.on_cuda and not self.coat and self.stored_bits is None

    @property
    def reads_copies(self) -> bool:
        """Whether products read bf16 copies of fp32 weights."""
        return self.bf16 and self.weight_nbytes == _FP32 and not self.fp8

    @property
    def element_nbytes(self) -> int:
        """a: bytes per element of matrix operands."""
        return _BF16 if self.bf16 else _FP32


def saved_by_slice(spec: ModelSpec, blocks: BlockRange, shape: MicroBatchShape) -> int:
    """Bytes that one micro-batch in flight keeps in a stage: Σ `saved_by_block`, what blocks share, and the ends.

    Of the blocks from the first that is trained on; of the embedding if it is trained.
    """
    trained = range(max(blocks.start, spec.first_trainable), blocks.stop)
    inner = sum(saved_by_block(spec, block, shape) for block in trained)
    first = saved_by_embedding(spec, shape) if blocks.first and spec.first_trainable == 0 else 0
    last = saved_by_head(spec, shape) if blocks.last else 0
    return inner + rotary_tables(spec, shape) + attention_masks(spec, trained, shape) + first + last


def saved_by_block(spec: ModelSpec, block: int, shape: MicroBatchShape) -> int:
    """Bytes that one block keeps of a micro-batch.

    GPT-2: 2·r·T·C + 16·T for the two LayerNorms (input; mean and rstd), a·T·(6·C + 5·I) for the matrices and the tanh
    GELU (norm outputs, Q, K, V, attention output; five in the MLP, two where the GELU is one operation,
    `gelu_pytorch_tanh`). Llama and similar: (8 + 2·r)·T·C + 8·T for the two RMSNorms (input in fp32, normalised input
    in the stream's type; rstd), their outputs once in fp32 (8·T·C), or once per matrix in bf16 (2·T·C each for Q, K, V,
    gate, up: 10·T·C), and a·T·(2·H·D + 2·K·D + 4·I). Qwen3 adds the norms of Q and K. Both add attention's statistics,
    see `_attention`. `fused`: 2·r·T·C for the inputs of two norms, 2·a·T·C for their outputs, 2·a·T·I or 3·a·T·I for
    the MLP's activation. Under `fp8` norms' outputs, and the input of the MLP's last product, are one byte per element,
    once each. With
    COAT norms, their outputs and the MLP keep codes instead, see `_coat_block`; the layers in `stored_layers` keep
    their inputs, in AGoQ codes of them, and nothing else. A part that is computed again keeps its input, r·T·C.

    Beside a residual stream in bf16 CUDA's autocast also makes fp32 copies of LayerNorms' inputs, 2·T·C more for each,
    which are not counted.
    """
    stream = shape.residual_nbytes * shape.num_tokens * spec.hidden_size
    if shape.recompute == "block":
        return stream
    if spec.layout.layers_like is None:
        return _dry(spec, block, shape).saved
    return _saved_by_layers(spec, block, shape, stream) + _saved_by_adapters(spec, block, shape)


def _saved_by_layers(spec: ModelSpec, block: int, shape: MicroBatchShape, stream: int) -> int:
    if shape.coat:
        return _coat_block(spec, shape) + _attention(spec, block, shape)
    of_mlp = stream if shape.recompute in _MLP_AGAIN else _mlp_part(spec, shape)
    if shape.recompute not in _ATTENTION_AGAIN:
        return _attention_part(spec, block, shape) + of_mlp
    return stream + of_mlp + (_fused_output(spec, block, shape) if shape.recompute == "qkv" else 0)


def _saved_by_adapters(spec: ModelSpec, block: int, shape: MicroBatchShape) -> int:
    """At most so many bytes that a block's adapters keep beside the inputs of its products.

    With rank R, seven layers of N outputs and M inputs together: 7·a·T·R for the inputs of B; with dropout
    (1 + a)·T·M for masks and dropped inputs; with DoRA 2·a·T·N for what its norms are multiplied by.
    """
    adapter = spec.adapter
    if adapter is None or (adapter.layers is not None and block not in adapter.layers):
        return 0
    inner, width = _inner(spec), int(spec.hf_config.num_attention_heads) * head_dim(spec.hf_config)
    inputs = 5 * spec.hidden_size + width + inner
    dropped = (1 + shape.element_nbytes) * inputs if adapter.dropout else 0
    scaled = 2 * shape.element_nbytes * _outputs(spec) if adapter.dora else 0
    return shape.num_tokens * (7 * shape.element_nbytes * adapter.rank + dropped + scaled)


def _outputs(spec: ModelSpec) -> int:
    """N, outputs of a block's matrices."""
    config = spec.hf_config
    width = int(config.num_attention_heads) * head_dim(config)
    pairs = 1 if spec.layout.rotary is None else 2
    return 2 * spec.hidden_size + width + 2 * num_kv_heads(config) * head_dim(config) + pairs * _inner(spec)


def _dry(spec: ModelSpec, block: int, shape: MicroBatchShape) -> KeptBytes:
    stream = torch.float32 if shape.residual_nbytes == _FP32 else torch.bfloat16
    sizes = shape.micro_batch, shape.seq_len, stream
    return kept_by_block(spec, block, *sizes, bf16=shape.bf16, packed=shape.packed)


def recomputed_by_block(spec: ModelSpec, block: int, shape: MicroBatchShape) -> int:
    """The most bytes that a block's parts keep while its backward has computed them again.

    Norms and activations that are computed one by one are not counted.
    """
    if shape.recompute == "block":
        return saved_by_block(spec, block, replace(shape, recompute="none"))
    if spec.layout.layers_like is None:
        return 0
    plain = replace(shape, recompute="none", stored_layers=())
    of_mlp = _mlp_part(spec, plain) if shape.recompute in _MLP_AGAIN else 0
    return max(of_mlp, _attention_part(spec, block, plain) if shape.recompute in _ATTENTION_AGAIN else 0)


def _stored(shape: MicroBatchShape, channels: int, element_nbytes: int) -> int:
    """Bytes of T·channels stored numbers, of `element_nbytes` each where they are kept unchanged."""
    num = shape.num_tokens * channels
    return num * element_nbytes if shape.stored_bits is None else stored_nbytes(num, shape.stored_bits)


def copied_by_block(spec: ModelSpec, shape: MicroBatchShape) -> int:
    """Bytes of a block's matrices in the type of products, where that is another."""
    has_copies = shape.element_nbytes != shape.weight_nbytes and shape.copies_weights and not (shape.coat or shape.fp8)
    return shape.element_nbytes * spec.layout.block_weights(spec.hf_config) if has_copies else 0


def copied_by_head(spec: ModelSpec, shape: MicroBatchShape) -> int:
    """The same for the head, a·V·C."""
    has_copy = shape.element_nbytes != shape.weight_nbytes and shape.copies_head
    return shape.element_nbytes * spec.hidden_size * spec.vocab_size if has_copy else 0


def saved_by_embedding(spec: ModelSpec, shape: MicroBatchShape) -> int:
    """Bytes that the embedding keeps: int64 token ids, 8·T; positions, 8·S, packed 8·T; dropout's mask, T·C."""
    layout = spec.layout
    dropped = layout.embedding_dropout is not None and getattr(spec.hf_config, layout.embedding_dropout) > 0
    positions = 8 * _num_positions(shape) if layout.positions is not None else 0
    return 8 * shape.num_tokens + positions + (shape.num_tokens * spec.hidden_size if dropped else 0)


def saved_by_head(spec: ModelSpec, shape: MicroBatchShape) -> int:
    """Bytes that final norm, head and loss keep.

    The norm's input (RMSNorm: and normalised input) and statistics, as in a block; its output, a·T·C; log-probabilities
    in fp32, 4·T·V, their labels, 8·T, and their number, 4; with z-loss logits in fp32 too, and per token their log-sum,
    its square's input and whether it is labelled. On CUDA: of these only the logits' gradient, a·T·V. In chunks: the
    gradient of the norm's output instead, 4·T·C. Capped logits are kept once more, a·T·V.
    """
    tokens, hidden = shape.num_tokens, spec.hidden_size
    norm = _norm_input(spec, shape, fused=False)
    if shape.loss_chunks > 1:
        return norm + _FP32 * tokens * hidden
    loss = (_kept_logits(shape) + _capped(spec, shape)) * tokens * spec.vocab_size
    if not shape.on_cuda:
        loss += tokens * (8 + (9 if shape.has_z_loss else 0)) + _FP32
    return norm + shape.element_nbytes * tokens * hidden + loss


def _capped(spec: ModelSpec, shape: MicroBatchShape) -> int:
    """Bytes per logit that are kept to differentiate the cap of logits (`soft_capped`)."""
    return 0 if getattr(spec.hf_config, "final_logit_softcapping", None) is None else shape.element_nbytes


def _kept_logits(shape: MicroBatchShape) -> int:
    """Bytes per logit that the loss keeps."""
    if shape.on_cuda:
        return shape.element_nbytes
    return 2 * _FP32 if shape.has_z_loss else _FP32


def head_workspace(spec: ModelSpec, shape: MicroBatchShape, *, adds_in_place: bool) -> int:
    """The most bytes that head and loss of one micro-batch take beside what `saved_by_head` counts.

    On CUDA nothing, or the logits of a chunk, the norm's output, 4·T·C, and the chunk's rows as they are multiplied,
    with their gradient. Elsewhere the loss: gradients of log-probabilities and of logits, 8·T·V,
    with z-loss 4·T·V more; then the logits' gradient, a·T·V, and the head's, a·C·V, of which bf16 needs a copy in fp32,
    4·C·V, to be added. That of low-rank weights is counted by `stage_memory`. In chunks: what the loss keeps of the
    largest one, too.

    `adds_in_place`: that copy is not made, because the backward is split, or is counted with stored gradients.
    """
    element, cast = shape.element_nbytes, _FP32 if shape.bf16 else 0
    logits = -(-shape.num_tokens // shape.loss_chunks) * spec.vocab_size
    capped = _capped(spec, shape) * logits if shape.loss_chunks > 1 else 0
    weights = spec.vocab_size * spec.hidden_size if shape.copies_head and spec.adapter is None else 0
    if shape.on_cuda:
        rows = shape.num_tokens * _FP32 + 2 * element * -(-shape.num_tokens // shape.loss_chunks)
        return element * logits + 2 * capped + rows * spec.hidden_size if shape.loss_chunks > 1 else 0
    of_loss = (3 if shape.has_z_loss else 2) * _FP32 * logits
    if shape.loss_chunks > 1:
        are_kept = shape.has_z_loss and not shape.bf16  # the logits themselves, then
        of_loss += (_kept_logits(shape) + (0 if are_kept else element)) * logits
        return capped + max(of_loss, element * logits + (element + cast) * weights)
    is_cast = not adds_in_place and shape.recompute in ("none", "block")
    of_weights = max(element * (logits + weights), (element + cast * is_cast) * weights)
    return max(of_loss, of_weights - _kept_logits(shape) * logits)


def _attention_part(spec: ModelSpec, block: int, shape: MicroBatchShape) -> int:
    """The first norm, Q, K, V, attention and its output projection."""
    return _norm(spec, shape, 3) + _query_key_norms(spec, shape) + _attention(spec, block, shape) + _mask(spec, shape)


def _mlp_part(spec: ModelSpec, shape: MicroBatchShape) -> int:
    """The second norm and the MLP."""
    return _norm(spec, shape, 2) + _mlp(spec, shape) + _mask(spec, shape)


def _norm(spec: ModelSpec, shape: MicroBatchShape, num_products: int) -> int:
    """A norm's input and statistics, in RMSNorm also the normalised input, and its output."""
    output = _norm_output(spec, shape, num_products)
    return output if "norms" in shape.stored_layers else _norm_input(spec, shape, fused=shape.fused) + output


def _norm_input(spec: ModelSpec, shape: MicroBatchShape, *, fused: bool) -> int:
    stream, hidden = shape.residual_nbytes, spec.hidden_size
    if fused:
        return shape.num_tokens * stream * hidden
    if spec.layout.rotary is None:
        return shape.num_tokens * (stream * hidden + 2 * _FP32)
    return shape.num_tokens * ((_FP32 + stream) * hidden + _FP32)


def _norm_output(spec: ModelSpec, shape: MicroBatchShape, num_products: int) -> int:
    """A norm's output, of which in Llama's layers each product makes its bf16 copy; or codes; or what recomputes it."""
    elements = shape.num_tokens * spec.hidden_size
    if "norms" in shape.stored_layers:
        return _stored(shape, spec.hidden_size, shape.residual_nbytes)
    if shape.fp8:
        return _FP8 * elements
    if spec.layout.rotary is None or shape.fused:
        return shape.element_nbytes * elements
    return elements * (num_products * _BF16 if shape.bf16 else _FP32)


def _mlp(spec: ModelSpec, shape: MicroBatchShape) -> int:
    """The MLP's activation, and its output, which the last product takes.

    Tanh GELU in GPT-2; gate, up and SiLU(gate) elsewhere.
    """
    config, inner, is_gpt2 = spec.hf_config, _inner(spec), spec.layout.rotary is None
    if "mlp" in shape.stored_layers:
        return (1 if is_gpt2 else 2) * _stored(shape, inner, shape.element_nbytes)
    if is_gpt2:
        num = 4 if config.activation_function == _WRITTEN_OUT and not shape.fused else 1
    else:
        num = 2 if shape.fused and config.hidden_act == "silu" else 3
    return shape.num_tokens * inner * (num * shape.element_nbytes + _input_nbytes(shape))


def _input_nbytes(shape: MicroBatchShape) -> int:
    """Per element of the input of a product that nothing else keeps."""
    return _FP8 if shape.fp8 else shape.element_nbytes


def _mask(spec: ModelSpec, shape: MicroBatchShape) -> int:
    """The mask of dropout in front of the residual stream, which GPT-2 has."""
    is_dropped = spec.layout.rotary is None and spec.hf_config.resid_pdrop > 0
    return shape.num_tokens * spec.hidden_size if is_dropped else 0


def _inner(spec: ModelSpec) -> int:
    """I."""
    config = spec.hf_config
    if spec.layout.rotary is None:
        return int(config.n_inner or 4 * spec.hidden_size)
    return int(config.intermediate_size)


def _coat_block(spec: ModelSpec, shape: MicroBatchShape) -> int:
    """A block like Llama's with FP8 flow, without its attention.

    Norm inputs, gate and up in groups of 16, with a bf16 scale each: T·(1 + 2/16)·(2·C + 2·I); norm outputs and
    the MLP's product with one scale: T·(2·C + I); rstd of two norms, 8·T; four scales in fp32, attention's among them.
    """
    tokens, hidden, inner = shape.num_tokens, spec.hidden_size, int(spec.hf_config.intermediate_size)
    grouped = sum(_FP8 * channels + _BF16 * math.ceil(channels / GROUP) for channels in (hidden, inner))
    return tokens * (2 * grouped + _FP8 * (2 * hidden + inner) + 2 * _FP32) + 4 * _FP32


def _query_key_norms(spec: ModelSpec, shape: MicroBatchShape) -> int:
    """Qwen3's RMSNorms of Q and K: input in fp32, normalised input, rstd per head."""
    if spec.family != "qwen3":
        return 0
    query_heads, kv_heads = int(spec.hf_config.num_attention_heads), num_kv_heads(spec.hf_config)
    heads, channels = query_heads + kv_heads, head_dim(spec.hf_config)
    if "norms" in shape.stored_layers:
        return _stored(shape, (query_heads + kv_heads) * channels, shape.element_nbytes)
    if shape.fused:
        return shape.num_tokens * heads * channels * shape.element_nbytes
    return shape.num_tokens * heads * (channels * (_FP32 + shape.element_nbytes) + _FP32)


def _attention(spec: ModelSpec, block: int, shape: MicroBatchShape) -> int:
    """Q, K, V and the output, a·T·D·(2·H + 2·K), and the softmax's part.

    Fused: log-sum-exp in fp32, 4·T·H. With dropout: softmax in fp32, the mask in bytes and the dropped weights,
    (4 + 1 + a)·B·H·S²; the causal mask, S², or of packed rows B·S². With a mask, dropout, or in fp32 on CUDA keys and
    values are repeated for every query head: kernels cannot group them.
    """
    config, squared, element = spec.hf_config, shape.seq_len**2, shape.element_nbytes
    heads, window = int(config.num_attention_heads), spec.layout.window(config, block)
    if "attention" in shape.stored_layers:
        channels = (number * head_dim(config) for number in (heads, num_kv_heads(config)))
        return 2 * sum(_stored(shape, each, element) for each in channels)
    if _has_dropout(spec):
        num_masks = shape.micro_batch if shape.packed else 1
        kv_heads, softmax = heads, shape.micro_batch * heads * squared * (_FP32 + 1 + element) + num_masks * squared
    else:
        is_grouped = not _is_masked(window, shape) and (shape.bf16 or not shape.on_cuda)
        kv_heads = num_kv_heads(config) if is_grouped else heads
        softmax = _FP32 * shape.num_tokens * heads
    return element * shape.num_tokens * head_dim(config) * (2 * heads + 2 * kv_heads) + softmax


def _is_masked(window: int | None, shape: MicroBatchShape) -> bool:
    """Whether attention needs more than the causal mask, which kernels have by themselves."""
    return shape.packed or (window is not None and window <= shape.seq_len)


def attention_masks(spec: ModelSpec, blocks: Iterable[int], shape: MicroBatchShape) -> int:
    """The masks that blocks share: of each window a·S², or of packed rows a·B·S², rows at multiples of 16 elements.

    Attention that is written out keeps none of them, but in bytes, unless it is computed again; counted are they all.
    """
    windows = {spec.layout.window(spec.hf_config, block) for block in blocks}
    num = sum(_is_masked(window, shape) for window in windows) * (shape.micro_batch if shape.packed else 1)
    return num * shape.element_nbytes * shape.seq_len * -(-shape.seq_len // MASK_ALIGNMENT) * MASK_ALIGNMENT


def _fused_output(spec: ModelSpec, block: int, shape: MicroBatchShape) -> int:
    """Output and log-sum-exp of fused attention, a·T·H·D + 4·T·H; nothing with dropout, which is not fused."""
    heads = int(spec.hf_config.num_attention_heads)
    each = shape.element_nbytes * head_dim(spec.hf_config) + _FP32
    return 0 if _has_dropout(spec) else shape.num_tokens * heads * each


def _has_dropout(spec: ModelSpec) -> bool:
    return float(getattr(spec.hf_config, "attn_pdrop" if spec.layout.rotary is None else "attention_dropout")) > 0


def rotary_tables(spec: ModelSpec, shape: MicroBatchShape) -> int:
    """Cosine and sine, [S, D] in fp32 each, or packed [T, D], shared by all blocks."""
    return 0 if spec.layout.rotary is None else 2 * _FP32 * _num_positions(shape) * head_dim(spec.hf_config)


def _num_positions(shape: MicroBatchShape) -> int:
    """S, or where each packed row has its own T."""
    return shape.num_tokens if shape.packed else shape.seq_len


def deferred_by_slice(spec: ModelSpec, blocks: BlockRange, shape: MicroBatchShape) -> int:
    """Bytes that one micro-batch keeps in a stage between I and W."""
    inner = blocks.num_trained(spec.first_trainable) * deferred_by_block(spec, shape)
    return inner + (deferred_by_head(spec, shape) if blocks.last else 0)


def deferred_by_block(spec: ModelSpec, shape: MicroBatchShape) -> int:
    """Bytes that a block keeps between I and W; N = 2·C + H·D + 2·K·D + 2·I outputs of the seven matrices of a Llama
    block.

    GPT-2: a·T·(3·C + I) for inputs and a·T·(5·C + I) for gradients. Llama and similar: the norms' outputs as they are
    saved, 8·T·C in fp32 and 10·T·C in bf16, a·T·(H·D + I) for attention's output and the MLP's product, a·T·N for
    gradients. With COAT, and under `fp8`, all of these but attention's output in FP8, T·(2·C + I + N). With AGoQ inputs
    that are recomputed are codes. Of blocks with other layers, those of the one that keeps most.
    """
    if spec.layout.layers_like is None:
        kinds = kinds_of_blocks(spec)
        return max(_dry(spec, kinds.index(kind), shape).deferred for kind in set(kinds))
    tokens, hidden, config, element = shape.num_tokens, spec.hidden_size, spec.hf_config, shape.element_nbytes
    inner, width = _inner(spec), int(config.num_attention_heads) * head_dim(config)
    is_gpt2 = spec.layout.rotary is None
    gradients = tokens * _outputs(spec) * (_FP8 if shape.codes_gradients else element)
    if shape.coat:
        return tokens * (2 * hidden + inner + element * width) + gradients
    # what was computed again as a whole keeps its inputs
    again = replace(shape, stored_layers=())
    of_attention = again if shape.recompute in _ATTENTION_AGAIN else shape
    of_mlp = again if shape.recompute in _MLP_AGAIN else shape
    norms = _norm_output(spec, of_attention, 3) + _norm_output(spec, of_mlp, 2)
    has_codes = "attention" in of_attention.stored_layers
    attention = _stored(shape, width, element) if has_codes else element * tokens * width
    stored_mlp = (1 if is_gpt2 else 2) * _stored(shape, inner, element)
    mlp = stored_mlp if "mlp" in of_mlp.stored_layers else _input_nbytes(shape) * tokens * inner
    return norms + attention + mlp + gradients


def deferred_by_head(spec: ModelSpec, shape: MicroBatchShape) -> int:
    """Bytes of the head: its input and the gradient of the logits, a·T·(C + V); none where its loss is in chunks."""
    if shape.loss_chunks > 1:
        return 0
    return shape.element_nbytes * shape.num_tokens * (spec.hidden_size + spec.vocab_size)
