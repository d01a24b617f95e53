"""The counted bytes against those that autograd saves."""

from dataclasses import replace
from itertools import product
from types import FunctionType

import pytest
import torch
from support.small_slices import MICRO_BATCH, SEQ_LEN, VOCAB, make_slice, make_spec, saved_storages
from torch import nn

from tahq.memory.agoq.stored_inputs import store_inputs
from tahq.memory.coat import fp8_codes
from tahq.memory.coat.fp8_codes import OutputGradient, WeightCodes
from tahq.memory.config import EXACTLY_STORED, AgoqConfig, CoatConfig, Fp8Config, Recompute
from tahq.memory.galore.low_rank_weight import LowRankSettings, LowRankWeight
from tahq.memory.galore.qgalore import build_low_rank_slice
from tahq.memory.saved_tensors import (
    MicroBatchShape,
    attention_masks,
    copied_by_block,
    copied_by_head,
    deferred_by_slice,
    saved_by_slice,
)
from tahq.memory.stored_slice import build_slice
from tahq.models.adapters.config import AdapterConfig
from tahq.models.deferred_gradients import DeferredGradients, shared_copies, sharing_weight_copies
from tahq.models.families import FAMILIES
from tahq.models.keyed_dropout import RandomContext
from tahq.models.model_spec import ModelSpec
from tahq.models.partition import BlockRange
from tahq.models.slice import ModelSlice, sharing_copies_of

# With the pinned torch and transformers the counts are equal to the byte; another release may
# save a mask or a statistic more, none of which is as large as 1 % of a block.
TOLERANCE = 0.01


POSITIONS = (torch.arange(MICRO_BATCH * SEQ_LEN).view(MICRO_BATCH, SEQ_LEN) + 5) % 16
"""Of rows with records of 16 tokens, the first of which begins in the row before."""


def run_forward(
    module: ModelSlice, blocks: BlockRange, *, bf16: bool, packed: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and output of a forward pass as the engine makes it; the loss at the end of the model."""
    shape = (MICRO_BATCH, SEQ_LEN)
    tokens = torch.arange(MICRO_BATCH * SEQ_LEN).reshape(shape) % VOCAB
    x = tokens if blocks.first else torch.randn(*shape, module.spec.hidden_size).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        y = module(x, POSITIONS.clone() if packed else None)
        return x, module.loss(y, tokens.clone(), 7.0)[0] if blocks.last else y.float()


def measured_nbytes(
    spec: ModelSpec, blocks: BlockRange, *, bf16: bool, module: ModelSlice | None = None, packed: bool = False
) -> tuple[int, int]:
    """Bytes that each of two micro-batches saves, parameters excepted, and bytes that they share."""
    module = module or make_slice(spec, blocks=blocks)
    with sharing_weight_copies():
        first, second = (
            saved_storages(lambda: run_forward(module, blocks, bf16=bf16, packed=packed)) for _ in range(2)
        )
        every_copy = list((shared_copies() or {}).values())
    copies, tensors = sum(copy.nbytes for copy in every_copy), [*module.parameters()]
    tensors += [copy for copy in every_copy if isinstance(copy, torch.Tensor)]  # routers' are saved by autograd, too
    parameters = {each.untyped_storage().data_ptr() for each in tensors}
    own, shared = (
        sum(second[at].untyped_storage().nbytes() for at in every - parameters)
        for every in (second.keys() - first.keys(), second.keys() & first.keys())
    )
    return own, shared + copies


def counted_copies(spec: ModelSpec, blocks: BlockRange, shape: MicroBatchShape) -> int:
    return len(blocks) * copied_by_block(spec, shape) + (copied_by_head(spec, shape) if blocks.last else 0)


OTHERS = [name for name, layout in FAMILIES.items() if layout.layers_like is None]
RANGES = [BlockRange(0, 1, 3), BlockRange(1, 3, 3), BlockRange(0, 3, 3)]


def check_count(spec: ModelSpec, blocks: BlockRange, shape: MicroBatchShape, module: ModelSlice | None = None) -> None:
    counted = saved_by_slice(spec, blocks, shape)
    if "attention" in shape.stored_layers:  # a mask is held, but not by autograd
        counted -= attention_masks(spec, range(blocks.start, blocks.stop), shape)
    own, shared = measured_nbytes(spec, blocks, bf16=shape.bf16, module=module, packed=shape.packed)
    assert counted == pytest.approx(own, rel=TOLERANCE)
    assert counted_copies(spec, blocks, shape) == shared


every_type = pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
every_range = pytest.mark.parametrize("blocks", RANGES, ids=["first", "last", "whole"])


@every_type
@pytest.mark.parametrize(
    ("family", "keys", "blocks"),
    [
        *(
            (family, {"dropout": dropout}, blocks)
            for family, blocks in zip(("gpt2", "llama", "qwen2", "qwen3", "mistral"), RANGES * 2, strict=False)
            for dropout in (0.0, 0.1)
        ),
        ("gpt2", {}, BlockRange(1, 3, 3)),
        ("llama", {}, BlockRange(0, 3, 3)),
        *((family, {"dropout": 0.1}, BlockRange(0, 2, 3)) for family in OTHERS),
        *((family, {}, BlockRange(1, 3, 3)) for family in OTHERS if family != "olmo2"),
        ("gpt2", {"intermediate_size": 96, "max_seq_len": 64}, BlockRange(0, 3, 3)),
        ("gpt2", {"overrides": {"activation_function": "gelu_pytorch_tanh"}}, BlockRange(0, 2, 3)),
        *(("mistral", {"overrides": {"sliding_window": w}}, BlockRange(0, 2, 3)) for w in (16, SEQ_LEN, None)),
    ],
    ids=str,
)
def test_count_equals_what_autograd_saves(family, keys, blocks, bf16):
    check_count(make_spec(family, **keys), blocks, MicroBatchShape(MICRO_BATCH, SEQ_LEN, bf16))


@every_type
@pytest.mark.parametrize(
    ("family", "keys", "blocks"),
    [
        ("gpt2", {}, BlockRange(0, 3, 3)),
        ("llama", {}, BlockRange(0, 2, 3)),
        ("qwen2", {"dropout": 0.1}, BlockRange(1, 2, 3)),
        ("mistral", {"overrides": {"sliding_window": 16}}, BlockRange(1, 3, 3)),
        ("smollm3", {}, BlockRange(0, 3, 3)),
        ("qwen3_moe", {}, BlockRange(1, 3, 3)),
    ],
    ids=str,
)
def test_packed_rows_count_with_one_mask_for_all_blocks(family, keys, blocks, bf16):
    spec, shape = make_spec(family, **keys), MicroBatchShape(MICRO_BATCH, SEQ_LEN, bf16, packed=True)
    masks = attention_masks(spec, range(blocks.start, blocks.stop), shape)
    assert masks == MICRO_BATCH * SEQ_LEN**2 * (2 if bf16 else 4)
    if "dropout" in keys:  # written out: it is held as bytes, by each block
        own, _ = measured_nbytes(spec, blocks, bf16=bf16, packed=True)
        assert saved_by_slice(spec, blocks, shape) - masks == pytest.approx(own, rel=TOLERANCE)
    else:
        check_count(spec, blocks, shape)


@every_type
@pytest.mark.parametrize("adapter", [{}, {"dora": True}, {"dropout": 0.1}], ids=str)
@pytest.mark.parametrize("family", ["gpt2", "llama", "phi3"])
def test_count_with_adapters_is_a_little_above_what_autograd_saves(family, adapter, bf16):
    spec = replace(make_spec(family), adapter=AdapterConfig(rank=4, **adapter))
    blocks, matrices = BlockRange(1, 2, 3), torch.bfloat16 if bf16 else torch.float32
    module = build_slice(spec, blocks, seed=0, device="cpu", random=RandomContext(0), matrices=matrices).train()
    own, _ = measured_nbytes(spec, blocks, bf16=bf16, module=module)
    counted = saved_by_slice(spec, blocks, MicroBatchShape(MICRO_BATCH, SEQ_LEN, bf16, weight_nbytes=2 if bf16 else 4))
    assert own <= 1.01 * counted < 1.8 * own


@every_range
@every_type
@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("llama", {"dropout": 0.1}),
        ("qwen2", {"hidden_size": 72, "num_heads": 6, "intermediate_size": 100}),
        ("mistral", {"overrides": {"sliding_window": 16}}),
    ],
    ids=["dropout", "odd sizes", "window"],
)
def test_count_covers_fp8_flow(family, keys, bf16, blocks):
    spec = make_spec(family, **keys)
    module = make_slice(spec, CoatConfig(), blocks=blocks)
    check_count(spec, blocks, MicroBatchShape(MICRO_BATCH, SEQ_LEN, bf16, coat=True), module)


def recomputing_shape(bf16: bool, level: Recompute) -> MicroBatchShape:
    return MicroBatchShape(MICRO_BATCH, SEQ_LEN, bf16, recompute=level, stored_layers=EXACTLY_STORED.get(level, ()))


@every_range
@pytest.mark.parametrize("has_units", [False, True], ids=["emulated", "units"])
@pytest.mark.parametrize(
    ("family", "keys"),
    [("llama", {"intermediate_size": 176, "dropout": 0.1}), ("gpt2", {}), ("qwen3", {"intermediate_size": 176})],
    ids=["llama", "gpt2", "qwen3"],
)
def test_count_covers_fp8_products(monkeypatch, family, keys, has_units, blocks):
    # torch multiplies FP8 on a CPU too, so that the layouts for FP8 units can be counted there
    monkeypatch.setattr(fp8_codes, "has_fp8_units", lambda device: has_units)
    spec = make_spec(family, **keys)
    shape, module = (
        MicroBatchShape(MICRO_BATCH, SEQ_LEN, True, fp8=True),
        make_slice(spec, blocks=blocks, fp8=Fp8Config()),
    )
    own, shared = measured_nbytes(spec, blocks, bf16=True, module=module)
    assert saved_by_slice(spec, blocks, shape) == pytest.approx(own, rel=TOLERANCE)
    codes = (2 if has_units else 1) * len(blocks) * spec.layout.block_weights(spec.hf_config)
    assert counted_copies(spec, blocks, shape) + codes == pytest.approx(shared, rel=TOLERANCE)


def agoq_shape(bf16: bool, config: AgoqConfig) -> MicroBatchShape:
    return MicroBatchShape(MICRO_BATCH, SEQ_LEN, bf16, stored_bits=config.bits_of(0), stored_layers=config.stored)


@every_type
@pytest.mark.parametrize("stored", [("norms", "mlp"), ("norms",), ("mlp",), ("norms", "mlp", "attention")], ids=str)
@pytest.mark.parametrize(
    ("family", "keys", "bits", "blocks"),
    [
        ("gpt2", {}, 4, BlockRange(0, 3, 3)),
        ("gpt2", {"dropout": 0.1, "overrides": {"activation_function": "gelu_pytorch_tanh"}}, 5, BlockRange(0, 1, 3)),
        ("llama", {}, 4, BlockRange(1, 3, 3)),
        (
            "llama",
            {"dropout": 0.1, "hidden_size": 72, "num_heads": 6, "intermediate_size": 100},
            6,
            BlockRange(0, 1, 3),
        ),
        ("qwen2", {}, 8, BlockRange(0, 3, 3)),
        ("qwen3", {}, 4, BlockRange(1, 3, 3)),
        ("mistral", {"overrides": {"sliding_window": 16}}, 5, BlockRange(0, 2, 3)),
    ],
    ids=str,
)
def test_count_covers_stored_inputs(family, keys, bits, blocks, stored, bf16):
    spec, config = make_spec(family, **keys), AgoqConfig(bits=bits, stored=stored)
    check_count(spec, blocks, agoq_shape(bf16, config), make_slice(spec, config, blocks=blocks))


@every_range
@pytest.mark.parametrize(
    ("family", "memory"),
    [
        *product(("gpt2", "llama", "qwen3"), (None, "swiglu", "norm", "ffn", AgoqConfig(bits=5))),
        ("llama", CoatConfig()),
    ],
    ids=str,
)
def test_count_covers_a_residual_stream_in_bf16(family, memory, blocks):
    spec = make_spec(family)
    module = make_slice(spec, memory, blocks=blocks)
    module.residual = torch.bfloat16
    shape = MicroBatchShape(MICRO_BATCH, SEQ_LEN, True, coat=isinstance(memory, CoatConfig))
    if isinstance(memory, AgoqConfig):
        shape = agoq_shape(True, memory)
    elif isinstance(memory, str):
        shape = recomputing_shape(True, memory)
    check_count(spec, blocks, replace(shape, residual_nbytes=2), module)


@every_type
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_bf16_matrices_are_copied_only_for_products_in_fp32(family, bf16):
    spec, blocks = make_spec(family), BlockRange(0, 3, 3)
    random, bf16_matrices = RandomContext(0), {"matrices": torch.bfloat16}
    module = build_slice(spec, blocks, seed=0, device="cpu", random=random, **bf16_matrices).train()
    check_count(spec, blocks, MicroBatchShape(MICRO_BATCH, SEQ_LEN, bf16, weight_nbytes=2), module)


@every_type
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_count_covers_a_loss_in_chunks(family, bf16):
    spec, blocks = make_spec(family), BlockRange(1, 3, 3)
    module = make_slice(spec, blocks=blocks)
    module.loss_chunks = 3
    shape = MicroBatchShape(MICRO_BATCH, SEQ_LEN, bf16, loss_chunks=3)
    own, shared = measured_nbytes(spec, blocks, bf16=bf16, module=module)
    # saved and freed within the forward: log-probabilities, labels, and the number of these in each chunk
    meanwhile = shape.num_tokens * (4 * VOCAB + 8) + 3 * 4
    assert saved_by_slice(spec, blocks, shape) + meanwhile == own
    assert counted_copies(spec, blocks, shape) == shared


@every_type
def test_count_covers_z_loss(bf16):
    spec, blocks = make_spec("llama"), BlockRange(2, 3, 3)
    module = make_slice(spec, blocks=blocks)
    module.z_loss = 0.1
    check_count(spec, blocks, MicroBatchShape(MICRO_BATCH, SEQ_LEN, bf16, has_z_loss=True), module)


@every_type
@pytest.mark.parametrize("agoq", [False, True])
@pytest.mark.parametrize(("family", "ends"), [("gpt2", "bf16"), ("llama", "fp32"), ("qwen3", "int8")])
def test_low_rank_layers_keep_no_copies_of_their_weights(family, bf16, agoq, ends):
    spec, blocks = make_spec(family), BlockRange(0, 3, 3)
    module = build_low_rank_slice(
        spec, blocks, LowRankSettings(ends=ends), seed=0, device=torch.device("cpu"), random=RandomContext(0)
    )
    shape = MicroBatchShape(MICRO_BATCH, SEQ_LEN, bf16)
    if agoq:
        store_inputs(module, AgoqConfig(), 4)
        shape = agoq_shape(bf16, AgoqConfig())
    check_count(spec, blocks, replace(shape, copies_weights=False, copies_head=ends == "fp32"), module)


@pytest.mark.parametrize(("split", "num_copies"), [(False, 2), (True, 0)], ids=["whole", "split"])
def test_checkpointing_keeps_a_bf16_head_per_micro_batch_unless_backward_is_split(split, num_copies):
    spec, blocks = make_spec("llama"), BlockRange(2, 3, 3)
    module, saved = make_slice(spec, blocks=blocks), []
    module.checkpoint_blocks = True
    with sharing_copies_of([module]):
        for _ in range(2):
            module.deferred = DeferredGradients() if split else None
            saved.append(saved_storages(lambda: run_forward(module, blocks, bf16=True)))
    head = copied_by_head(spec, MicroBatchShape(MICRO_BATCH, SEQ_LEN, True))
    every = {at: tensor.untyped_storage().nbytes() for one in saved for at, tensor in one.items()}
    assert list(every.values()).count(head) == num_copies


def deferred_nbytes(deferred: DeferredGradients, module: ModelSlice) -> int:
    """Bytes of all storages that the deferred computations keep alive, without the module's."""
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    found: dict[int, int] = {}
    seen: set[int] = set()
    waiting = list(deferred._pending)
    while waiting:
        each = waiting.pop()
        if id(each) in seen or isinstance(each, nn.Module | WeightCodes | LowRankWeight):
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            found[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
        elif isinstance(each, FunctionType):
            waiting += [cell.cell_contents for cell in each.__closure__ or ()]
        elif isinstance(each, OutputGradient):
            waiting += [each.plain, each.codes, each.of_bias]
        elif isinstance(each, tuple):
            waiting += each
    return sum(nbytes for at, nbytes in found.items() if at not in own)


@every_type
@pytest.mark.parametrize(
    ("blocks", "checkpoint_blocks"),
    [(BlockRange(0, 2, 3), False), (BlockRange(1, 3, 3), True)],
    ids=["first, kept", "last, computed again"],
)
@pytest.mark.parametrize(
    ("family", "memory"),
    [
        *((family, None) for family in ("gpt2", "llama", "qwen3", *OTHERS)),
        *(("llama", CoatConfig(backward_products=products)) for products in ("e5m2", "bf16")),
        *((family, AgoqConfig()) for family in ("gpt2", "llama", "qwen3")),
        ("mistral", AgoqConfig(bits=5, stored=("attention",))),
        ("llama", AgoqConfig(bits=6, stored=("mlp",))),
        *((family, level) for family in ("gpt2", "qwen3") for level in ("swiglu", "norm", "ffn", "qkv", "att")),
        *((family, Fp8Config()) for family in ("gpt2", "llama", "qwen3")),
    ],
    ids=lambda each: each if isinstance(each, str) else str(each and each.model_dump()),
)
def test_count_equals_what_deferred_weight_gradients_hold(family, memory, checkpoint_blocks, bf16, blocks):
    spec = make_spec(family)
    is_fp8 = isinstance(memory, Fp8Config)
    module = make_slice(spec, None if is_fp8 else memory, blocks=blocks, fp8=memory if is_fp8 else None)
    module.checkpoint_blocks = checkpoint_blocks
    module.deferred = deferred = DeferredGradients()
    _, y = run_forward(module, blocks, bf16=bf16)
    y.backward(None if blocks.last else torch.ones_like(y))
    if isinstance(memory, AgoqConfig):
        shape = agoq_shape(bf16, memory)
    elif isinstance(memory, str):
        shape = recomputing_shape(bf16, memory)
    else:
        is_coat = isinstance(memory, CoatConfig)
        codes_gradients = is_fp8 or (is_coat and memory.backward_products == "e5m2")
        shape = MicroBatchShape(MICRO_BATCH, SEQ_LEN, bf16, coat=is_coat, fp8=is_fp8, codes_gradients=codes_gradients)
    assert deferred_by_slice(spec, blocks, shape) == pytest.approx(deferred_nbytes(deferred, module), rel=TOLERANCE)
