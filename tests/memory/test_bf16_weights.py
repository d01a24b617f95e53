"""Slices with matrices, gradients or a residual stream in bf16."""

import pytest
import torch
from support.small_slices import MICRO_BATCH, MIDDLE, SEQ_LEN, VOCAB, gradients, make_spec

from tahq.memory.agoq.stored_inputs import store_inputs
from tahq.memory.config import READ_BF16_GRADIENTS, AgoqConfig
from tahq.memory.recompute import recompute
from tahq.memory.stored_slice import build_slice
from tahq.models.deferred_gradients import DeferredGradients, set_gradient_dtype, sharing_weight_copies
from tahq.models.keyed_dropout import RandomContext
from tahq.models.partition import BlockRange
from tahq.models.slice import ModelSlice
from tahq.pipeline.config import TrainingConfig
from tahq.pipeline.update import StageUpdate

BF16, WHOLE = torch.bfloat16, BlockRange(0, 3, 3)
TOKENS = torch.arange(MICRO_BATCH * SEQ_LEN).view(MICRO_BATCH, SEQ_LEN) % VOCAB
every_family = pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2", "qwen3", "mistral"])
every_precision = pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])


def make(family: str, matrices: torch.dtype, blocks: BlockRange = WHOLE, device: str = "cpu") -> ModelSlice:
    """Blocks of a model whose matrices have bf16 values; by default all."""
    spec, random = make_spec(family, dropout=0.1), RandomContext(0)
    module = build_slice(spec, blocks, seed=0, device=device, random=random, matrices=matrices).train()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(parameter.to(BF16) if parameter.ndim >= 2 else parameter)
    return module


def computed(
    module: ModelSlice, *, bf16: bool, splits: bool = False, micro_batches: int = 1
) -> dict[str, torch.Tensor]:
    """Loss, validation loss, and gradients summed over micro-batches."""

    def loss(tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", BF16, enabled=bf16):
            return module.loss(module(tokens), tokens, 3.0)[0]

    found = {}
    with sharing_weight_copies():
        for index in range(micro_batches):
            module.random.at(0, 0, index, 0)
            module.deferred = DeferredGradients() if splits else None
            found[f"loss {index}"] = loss(TOKENS.roll(index))
            found[f"loss {index}"].backward()
            if module.deferred is not None:
                module.deferred.run()
    module.eval()
    with torch.no_grad():
        found["validation"] = loss(TOKENS)
    return found | {name: parameter.grad for name, parameter in module.named_parameters()}


def differing(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> list[str]:
    assert left.keys() == right.keys()
    return [name for name in left if left[name].dtype != right[name].dtype or not torch.equal(left[name], right[name])]


@every_family
@every_precision
@pytest.mark.parametrize(
    "keys", [{}, {"splits": True}, {"level": "block"}, {"level": "att"}, {"chunks": 3}, {"agoq": True}], ids=str
)
def test_bf16_matrices_compute_what_fp32_ones_of_the_same_values_do(family, bf16, keys):
    """Loss and gradients, which are fp32, to the bit."""
    results = []
    for matrices in (torch.float32, BF16):
        module = make(family, matrices)
        assert {parameter.dtype for parameter in module.parameters() if parameter.ndim >= 2} == {matrices}
        recompute(module, keys.get("level", "none"))
        module.loss_chunks = keys.get("chunks", 1)
        if keys.get("agoq"):
            store_inputs(module, AgoqConfig(), 6)
        results.append(computed(module, bf16=bf16, splits=keys.get("splits", False)))
    assert {gradient.dtype for name, gradient in results[1].items()} == {torch.float32}
    assert differing(*results) == []


@every_precision
@pytest.mark.parametrize("matrices", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_bf16_gradients_are_rounded_sums_however_they_are_computed(family, matrices, bf16):
    """Of each micro-batch's gradient in bf16."""

    def summed(splits: bool, count: int = 3) -> dict[str, torch.Tensor]:
        module = make(family, matrices)
        set_gradient_dtype((p for p in module.parameters() if p.ndim >= 2), BF16)
        computed(module, bf16=bf16, splits=splits, micro_batches=count)
        return {name: p.grad for name, p in module.named_parameters() if p.ndim >= 2}

    whole = summed(splits=False)
    assert {gradient.dtype for gradient in whole.values()} == {BF16}
    assert differing(whole, summed(splits=True)) == []
    expected: dict[str, torch.Tensor] = {}
    reference = make(family, matrices)
    for index in range(3):
        reference.train().random.at(0, 0, index, 0)
        reference.zero_grad()
        tokens = TOKENS.roll(index)
        with torch.autocast("cpu", BF16, enabled=bf16):
            reference.loss(reference(tokens), tokens, 3.0)[0].backward()
        for name in whole:
            of_one = reference.get_parameter(name).grad.to(BF16)
            past = expected.get(name)
            expected[name] = of_one if past is None else (of_one.float() + past.float()).to(BF16)
    assert differing(whole, expected) == []


@pytest.mark.gpu
@pytest.mark.parametrize("kept_as", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("residual", [None, BF16], ids=str)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_bits_are_equal_on_cuda(family, residual, kept_as):
    """Without an embedding, whose gradient CUDA sums in no fixed order; the backward in one part and in two."""
    results = []
    for matrices in (torch.float32, BF16):
        for deferred in (None, DeferredGradients()):
            module = make(family, matrices, MIDDLE, "cuda")
            recompute(module, "none")
            module.residual = residual
            set_gradient_dtype((p for p in module.parameters() if p.ndim >= 2), kept_as)
            results.append(gradients(module, bf16=True, deferred=deferred))
    assert [differing(results[0], each) for each in results[1:]] == [[], [], []]


@pytest.mark.parametrize("optimizer", READ_BF16_GRADIENTS)
def test_optimizers_take_bf16_gradients_as_their_values(optimizer):
    config, results = TrainingConfig(optimizer=optimizer, clip_norm=None), []
    for kept_as in ("bf16", "fp32"):
        module = make("llama", torch.float32)
        parameters = module.canonical_parameters()
        update = StageUpdate(config, parameters, module.is_decayed, 4, gradients=kept_as, seed=3)
        computed(module, bf16=True)
        for parameter in parameters.values():
            if parameter.ndim >= 2 and kept_as == "fp32":
                parameter.grad.copy_(parameter.grad.to(BF16))
        update.apply(0, 0.5)
        results.append({name: tensor.clone() for name, tensor in update.tensors().items()})
    if optimizer == "adamw":  # on a CPU fp32 gradients are for torch's, which orders some operations otherwise
        torch.testing.assert_close(*results)
    else:
        assert differing(*results) == []


@every_family
def test_bf16_residual_stream_is_rounded_after_every_block(family):
    module = make(family, torch.float32)
    module.residual = BF16
    seen = []
    blocks = list(module.get_submodule(f"{module.spec.layout.trunk}.{module.spec.layout.blocks}").children())
    for block in blocks:
        block.register_forward_hook(lambda _, inputs, output: seen.append((inputs[0], output)))
    computed(module, bf16=True)
    streams = [tensor[0] if isinstance(tensor, tuple) else tensor for pair in seen for tensor in pair]
    assert len(streams) == 4 * len(blocks)  # training and evaluation
    assert {tensor.dtype for tensor in streams} == {BF16}
