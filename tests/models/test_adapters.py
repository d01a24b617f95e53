"""LoRA's layers in a slice: names, values, products, gradients."""

from dataclasses import replace

import pytest
import torch
from support.samples import normal
from support.small_slices import MIDDLE, make_spec

from tahq.errors import ModelError
from tahq.memory.recompute import recompute
from tahq.memory.stored_slice import build_slice
from tahq.models.adapters.config import AdapterConfig, is_adapter
from tahq.models.adapters.lora import adapted_layers, merged_weight
from tahq.models.deferred_gradients import DeferredGradients
from tahq.models.keyed_dropout import RandomContext
from tahq.models.slice import ModelSlice

KINDS = {"lora": {}, "dora": {"dora": True}, "dropped": {"dora": True, "dropout": 0.2, "rslora": True}}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
every_family = pytest.mark.parametrize("family", ["gpt2", "llama", "phi3"])


def slice_of(family: str, kind: dict | None, *, matrices=torch.float32) -> ModelSlice:
    adapter = None if kind is None else AdapterConfig(rank=4, **kind)
    spec = replace(make_spec(family), adapter=adapter)
    return build_slice(spec, MIDDLE, seed=0, device="cpu", random=RandomContext(0), matrices=matrices).train()


def trained_slice(family: str, kind: dict) -> ModelSlice:
    """With adapters that change something."""
    module = slice_of(family, kind)
    for number, (name, parameter) in enumerate(module.named_parameters()):
        if is_adapter(name):
            parameter.data += 0.1 * normal(parameter.shape, seed=number)
    return module


def computed(module: ModelSlice) -> torch.Tensor:
    return module(normal((2, 12, 64)))


@every_kind
@every_family
def test_model_with_new_adapters_computes_what_it_does_without(family, kind):
    assert torch.equal(computed(slice_of(family, kind).eval()), computed(slice_of(family, None).eval()))
    adapted = slice_of(family, kind, matrices=torch.bfloat16)
    for name, parameter in adapted.named_parameters():
        assert parameter.requires_grad == is_adapter(name)
        assert parameter.dtype == (torch.bfloat16 if parameter.ndim > 1 and not is_adapter(name) else torch.float32)


def gradients(module: ModelSlice, deferred: DeferredGradients | None = None) -> dict[str, torch.Tensor]:
    x = normal((2, 12, 64)).requires_grad_()
    module.deferred = deferred
    module(x).backward(normal((2, 12, 64), seed=1))
    if deferred is not None:
        deferred.run()
    assert all((p.grad is not None) == is_adapter(name) for name, p in module.named_parameters())
    return {"x": x.grad} | {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


@every_kind
@every_family
def test_only_adapters_have_gradients_alike_in_every_kind_of_backward(family, kind):
    expected = gradients(trained_slice(family, kind))
    found = [gradients(trained_slice(family, kind), DeferredGradients())]
    for level in ("block",) if family == "phi3" else ("norm", "att", "block"):
        module = trained_slice(family, kind)
        recompute(module, level)
        found.append(gradients(module))
    for each in found:
        assert each.keys() == expected.keys()
        assert [name for name in each if not torch.equal(each[name], expected[name])] == []


@pytest.mark.parametrize("kind", [{}, {"rslora": True}, {"dora": True}], ids=str)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_merged_weights_compute_what_adapters_do(family, kind):
    module, merged = trained_slice(family, kind).eval(), slice_of(family, None).eval()
    read = module.canonical_parameters().__getitem__
    for path, layer in adapted_layers(module):
        weight = merged.get_parameter(f"{path}.weight")
        changed = merged_weight(layer, path, weight, read, module.spec.adapter.scale)
        assert not torch.equal(weight, changed)
        weight.data = changed
    torch.testing.assert_close(computed(merged), computed(module), atol=2e-5, rtol=1e-4)


def test_targets_name_layers_as_in_peft_and_others_are_refused():
    paths = [path for path, _ in adapted_layers(slice_of("gpt2", {"targets": ["c_attn", "mlp.c_proj"]}))]
    assert paths == ["transformer.h.1.attn.c_attn", "transformer.h.1.mlp.c_proj"]
    assert not list(adapted_layers(slice_of("gpt2", {"layers": [0, 2]})))
    with pytest.raises(ModelError, match=r"adapter.targets: q_proj names no linear layer .* attn.c_attn, attn.c_proj"):
        slice_of("gpt2", {"targets": ["c_attn", "q_proj"]})
