"""AGoQ's stored activations: layers with them against layers without, and their gradients against autograd's."""

import pytest
import torch
from support.samples import normal
from support.small_slices import (
    MICRO_BATCH,
    MIDDLE,
    SEQ_LEN,
    different,
    gradients,
    make_slice,
    make_spec,
    relative_distance,
)
from torch import nn
from torch.nn import functional as F

from tahq.memory.agoq.stored_inputs import store_inputs, stored
from tahq.memory.config import AgoqConfig
from tahq.memory.galore.low_rank_weight import LowRankSettings
from tahq.memory.galore.qgalore import build_low_rank_slice
from tahq.memory.small_floats.block_codes import dequantize_blocks, quantize_blocks
from tahq.models.deferred_gradients import DeferredGradients, product
from tahq.models.keyed_dropout import RandomContext
from tahq.models.slice import ModelSlice

EVERYTHING = ("norms", "mlp", "attention")
FAMILIES = ("gpt2", "llama", "qwen2", "qwen3", "mistral")

every_family = pytest.mark.parametrize("family", FAMILIES)


def output(module: ModelSlice, bf16: bool) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        return module(normal((MICRO_BATCH, SEQ_LEN, 64)).requires_grad_())


@every_family
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_forward_has_the_bits_that_it_has_without(family, bf16):
    spec = make_spec(family, dropout=0.1)
    module = make_slice(spec, AgoqConfig(stored=EVERYTHING))
    assert torch.equal(output(module, bf16), output(make_slice(spec), bf16))
    module.eval()
    with torch.no_grad():
        assert torch.equal(output(module, bf16), output(make_slice(spec).eval(), bf16))


def test_gradients_are_those_of_the_function_at_the_decoded_inputs():
    gate, up, flowing = normal((6, 40)), normal((6, 40), seed=1), normal((6, 40), seed=2)
    leaves = [x.clone().requires_grad_() for x in (gate, up)]
    stored(lambda a, b: F.silu(a) * b, 4, *leaves).backward(flowing)
    decoded = [dequantize_blocks(quantize_blocks(x, 4), x.shape).requires_grad_() for x in (gate, up)]
    (F.silu(decoded[0]) * decoded[1]).backward(flowing)
    for got, expected in zip(leaves, decoded, strict=True):
        assert torch.equal(got.grad, expected.grad)


def test_products_of_a_norm_multiply_its_output_at_the_decoded_input():
    x, flowing, norm = normal((6, 40)).requires_grad_(), normal((6, 24), seed=2), nn.RMSNorm(40)
    weights = [nn.Parameter(normal((24, 40), seed=seed)) for seed in (3, 4)]
    y = stored(norm.forward, 5, x, parameters=tuple(norm.parameters()))
    for weight in weights:
        product(y, weight, None, transposed=True, deferred=None, kept=y.kept).backward(flowing, retain_graph=True)
    decoded = norm(dequantize_blocks(quantize_blocks(x, 5), x.shape)).detach()
    for weight in weights:
        assert torch.equal(weight.grad, flowing.t() @ decoded)


@every_family
def test_gradients_approach_those_without_as_bits_increase(family):
    spec = make_spec(family, hidden_size=72, num_heads=6, intermediate_size=100)
    exact = gradients(make_slice(spec), seq_len=47)
    distances = []
    for bits in (4, 5, 6, 8):
        got = gradients(make_slice(spec, AgoqConfig(bits=bits)), seq_len=47)
        assert torch.equal(got["y"], exact["y"])
        # softmax does not see a shift of all keys: but for the rotation, the gradient of their bias is 0
        names = [name for name in exact if name != "y" and not name.endswith("k_proj.bias")]
        distances.append(max(relative_distance(got[name], exact[name]) for name in names))
    # 1, 2, 3 and 3 bits of fraction: on normal numbers E4M3 is no finer than E2M3
    assert distances[0] > distances[1] > max(distances[2:])
    assert max(distances[2:]) < 2.0**-4 < distances[0] < 2.0**-1


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("checkpoint_blocks", "is_split"), [(False, True), (True, False), (True, True)])
@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_split_backwards_and_recomputed_blocks_give_the_same_bits(family, checkpoint_blocks, is_split, bf16):
    spec, config = make_spec(family, dropout=0.1), AgoqConfig(stored=EVERYTHING)
    whole, other = make_slice(spec, config), make_slice(spec, config)
    other.checkpoint_blocks = checkpoint_blocks
    deferred = DeferredGradients() if is_split else None
    assert different(gradients(whole, bf16=bf16), gradients(other, bf16=bf16, deferred=deferred)) == []


def test_weights_of_galore_pass_the_same_gradients_on():
    spec, ordinary = make_spec("llama"), make_slice(make_spec("llama"), AgoqConfig())
    settings = LowRankSettings(weights="fp32", projections="fp32", states="fp32", ends="fp32")
    module = build_low_rank_slice(spec, MIDDLE, settings, seed=0, device=torch.device("cpu"), random=RandomContext(0))
    store_inputs(module.train(), AgoqConfig(), 4)
    got, expected = gradients(module), gradients(ordinary)
    assert {name for name in got if torch.equal(got[name], expected[name])} == {
        "x",
        "y",
        *dict(module.named_parameters()),
    }
