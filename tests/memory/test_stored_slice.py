"""Slices whose base is in 4 bits, beside slices that have the decoded weights."""

from dataclasses import replace

import pytest
import torch
from support.samples import normal
from support.small_slices import MIDDLE, Watch, make_spec, saved_storages

from tahq.memory.estimate import StepNumbers, stage_memory
from tahq.memory.offload.host_part import device_nbytes, kept_values, sum_as_filled
from tahq.memory.recompute import recompute
from tahq.memory.saved_tensors import MicroBatchShape
from tahq.memory.small_floats.nf4 import packed_weight
from tahq.memory.stored_slice import build_slice, decoded_nbytes, is_in_4_bits
from tahq.models.adapters.config import AdapterConfig, is_adapter
from tahq.models.deferred_gradients import DeferredGradients
from tahq.models.experts.expert_products import is_router
from tahq.models.keyed_dropout import RandomContext
from tahq.models.partition import BlockRange
from tahq.models.slice import ModelSlice
from tahq.models.weights import sum_of_bits

FAMILIES = ("gpt2", "llama", "phi3", "qwen3_moe")


def slice_of(family: str, kind: str, *, blocks=MIDDLE, matrices=torch.float32, **adapter) -> ModelSlice:
    spec = replace(make_spec(family), adapter=AdapterConfig(kind=kind, rank=4, **adapter))
    keys = {"seed": 0, "device": "cpu", "random": RandomContext(0), "matrices": matrices}
    module = build_slice(spec, blocks, **keys).train()
    for number, (name, parameter) in enumerate(module.named_parameters()):
        if is_adapter(name) and parameter.ndim > 1:
            parameter.data += 0.1 * normal(parameter.shape, seed=number)
    return module


def pair_of(family: str, **adapter) -> tuple[ModelSlice, ModelSlice]:
    """A slice in 4 bits, and LoRA's beside the weights that these stand for."""
    packed, whole = (slice_of(family, kind, **adapter) for kind in ("qlora", "lora"))
    for name, parameter in packed.named_parameters():
        if packed_weight(parameter) is not None or not parameter.requires_grad or "magnitude" in name:
            whole.get_parameter(name).data = kept_values(parameter).clone()
    return packed, whole


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("adapter", [{}, {"dora": True, "dropout": 0.1}], ids=["lora", "dora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_slice_in_4_bits_computes_what_one_with_the_decoded_weights_does(family, adapter, bf16):
    packed, whole = pair_of(family, **adapter)
    found, expected = (_gradients(module, bf16=bf16) for module in (packed, whole))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0 if family != "gpt2" else 1e-5, msg=name)
    for level in ("block",) if family in ("phi3", "qwen3_moe") else ("norm", "att", "block"):
        again, _ = pair_of(family, **adapter)
        recompute(again, level)
        assert [name for name, each in _gradients(again, bf16=bf16).items() if not torch.equal(each, found[name])] == []
    split, _ = pair_of(family, **adapter)
    deferred = _gradients(split, bf16=bf16, deferred=DeferredGradients())
    assert [name for name, each in deferred.items() if not torch.equal(each, found[name])] == []


def _gradients(module: ModelSlice, *, bf16: bool, deferred: DeferredGradients | None = None) -> dict[str, torch.Tensor]:
    x = normal((2, 12, 64)).requires_grad_()
    module.deferred = deferred
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        y = module(x)
    y.float().backward(normal(y.shape, seed=1))
    if deferred is not None:
        deferred.run()
    trained = {name: p.grad for name, p in module.named_parameters() if p.requires_grad}
    assert all(each is not None for each in trained.values())
    return {"y": y.detach(), "x": x.grad} | trained


@pytest.mark.parametrize("family", FAMILIES)
def test_matrices_of_blocks_are_in_4_bits_and_nothing_decoded_is_kept(family):
    module = slice_of(family, "qlora", blocks=BlockRange(0, 3, 3))
    parameters = dict(module.named_parameters())
    packed = [name for name, parameter in parameters.items() if packed_weight(parameter) is not None]
    matrices = {name for name, p in parameters.items() if p.ndim > 1 and not is_adapter(name)}
    outside = {name for name in matrices if not any(f".{block}." in name for block in range(3))}
    routers = {f"{path}.weight" for path, layer in module.named_modules() if is_router(layer)}
    assert set(packed) == matrices - outside - routers
    assert len(packed) >= 12
    assert all(bool(parameters[name].isnan().all()) for name in packed)
    own = {parameter.untyped_storage().data_ptr() for parameter in parameters.values()}
    kept = saved_storages(lambda: module(torch.randint(100, (1, 4))).sum())
    others = [each.untyped_storage().nbytes() for place, each in kept.items() if place not in own]
    assert max(others) < decoded_nbytes(module.spec, 4) / 2


@pytest.mark.parametrize("matrices", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3_moe"])
def test_estimate_of_weights_is_what_torch_holds(family, matrices):
    blocks = BlockRange(0, 2, 3)
    module = slice_of(family, "qlora", blocks=blocks, matrices=matrices)
    shape = MicroBatchShape(2, 16, matrices == torch.bfloat16, weight_nbytes=matrices.itemsize)
    numbers = StepNumbers(shape=shape, in_flight=1, optimizer_nbytes=lambda shapes: 0, frame_nbytes=0)
    memory = stage_memory(module.spec, blocks, numbers)
    assert memory.weights == sum(map(device_nbytes, module.parameters()))
    assert memory.snapshot == sum(p.nbytes for p in module.parameters() if p.requires_grad)
    plain = stage_memory(replace(module.spec, adapter=AdapterConfig(rank=4)), blocks, numbers)
    largest = max(p.numel() for name, p in module.named_parameters() if is_in_4_bits(module.spec, name, p.shape))
    assert memory.workspace - plain.workspace == matrices.itemsize * largest


def test_fingerprint_of_the_base_is_that_of_the_weights_as_they_were_read():
    packed, whole = (slice_of("llama", kind) for kind in ("qlora", "lora"))
    for name, parameter in packed.named_parameters():
        assert torch.equal(sum_as_filled(parameter), sum_of_bits(whole.get_parameter(name).detach())), name


@pytest.mark.parametrize("matrices", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("family", "kind"), [("gpt2", "lora"), ("llama", "lora"), ("llama", "qlora")])
def test_norms_of_dora_take_what_is_counted(family, kind, matrices):
    module = slice_of(family, kind, matrices=matrices, dora=True, layers=[1])
    with torch.no_grad(), Watch() as watch:
        module(normal((1, 1, 64)))
    counted = decoded_nbytes(module.spec, matrices.itemsize, matrices.itemsize)
    assert counted <= watch.peak_nbytes < 1.2 * counted  # plain torch decodes with temporaries
    plain = replace(module.spec, adapter=AdapterConfig(kind="lora", rank=4))
    assert decoded_nbytes(plain, matrices.itemsize, matrices.itemsize) == 0
