"""Recomputed parts of a block: bits, and what remains to be kept."""

import gc
from functools import cache, partial
from typing import get_args

import pytest
import torch
from support.samples import normal
from support.small_slices import (
    MICRO_BATCH,
    MIDDLE,
    SEQ_LEN,
    Watch,
    different,
    gradients,
    make_slice,
    make_spec,
    relative_distance,
)

from tahq.memory.config import EXACTLY_STORED, Fp8Config, Recompute
from tahq.memory.galore.low_rank_weight import LowRankSettings
from tahq.memory.galore.qgalore import build_low_rank_slice, low_rank_weights
from tahq.memory.recompute import recompute
from tahq.memory.saved_tensors import MicroBatchShape, saved_by_slice
from tahq.models.deferred_gradients import DeferredGradients, sharing_weight_copies
from tahq.models.keyed_dropout import RandomContext
from tahq.models.model_spec import ModelSpec
from tahq.models.partition import BlockRange
from tahq.models.slice import ModelSlice

LEVELS = [level for level in get_args(Recompute) if level != "none"]
every_level = pytest.mark.parametrize("level", LEVELS)


@every_level
@pytest.mark.parametrize(
    ("family", "dropout"),
    [
        *(("gpt2", 0.1), ("llama", 0.1), ("qwen3", 0.0)),
        *(pytest.param(each, 0.0, marks=pytest.mark.acceptance) for each in ("gpt2", "qwen2")),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8"])
@pytest.mark.parametrize("is_split", [False, True], ids=["whole", "split"])
def test_loss_and_gradients_have_the_bits_of_a_pass_that_recomputes_nothing(
    family, level, precision, dropout, is_split
):
    check_bits(family, level, precision, is_split, "cpu", dropout=dropout)


@pytest.mark.gpu
@every_level
@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("is_split", [False, True], ids=["whole", "split"])
def test_bits_are_equal_on_cuda(family, level, precision, is_split):
    check_bits(family, level, precision, is_split, "cuda", hidden_size=320)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_kernels_compute_what_transformers_does(family, bf16):
    spec = make_spec(family, hidden_size=320, num_heads=2)
    exact = gradients(make_slice(spec, device="cuda"))
    plain, got = (gradients(make_slice(spec, level, device="cuda"), bf16=bf16) for level in (None, "none"))
    for name in got:
        if not name.endswith("k_proj.bias"):  # 0 but for rounding
            assert relative_distance(got[name], exact[name]) < 1.2 * relative_distance(plain[name], exact[name]) + 1e-5


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_attention_that_rotates_by_a_kernel_computes_what_transformers_does(family, monkeypatch):
    spec = make_spec(family)
    expected = gradients(make_slice(spec, "att"))
    monkeypatch.setattr("tahq.memory.recompute.has_kernels", lambda device_type: True)  # a CPU's norms stay torch's
    got = gradients(make_slice(spec, "att"))
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, msg=name)


def computed(
    family: str, level: Recompute, precision: str, device: str, deferred: DeferredGradients | None = None, **keys
) -> dict[str, torch.Tensor]:
    fp8, bf16 = Fp8Config() if precision == "fp8" else None, precision != "fp32"
    with sharing_weight_copies():
        return gradients(
            make_slice(make_spec(family, **keys), level, device=device, fp8=fp8), bf16=bf16, deferred=deferred
        )


plain = cache(partial(computed, level="none"))


def check_bits(family: str, level: Recompute, precision: str, is_split: bool, device: str, **keys) -> None:
    deferred = DeferredGradients() if is_split else None
    got = computed(family, level, precision, device, deferred, **keys)
    assert different(plain(family, precision=precision, device=device, **keys), got) == []


@every_level
@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_low_rank_weights_get_the_same_gradients(family, level):
    spec = make_spec(family)
    plain, other = (
        build_low_rank_slice(
            spec, MIDDLE, LowRankSettings(), seed=0, device=torch.device("cpu"), random=RandomContext(0)
        )
        for _ in range(2)
    )
    recompute(other, level)
    found = [gradients(module) for module in (plain, other)]
    assert different(*found) == []
    projected = [{name: weight.grad for name, weight in low_rank_weights(module).items()} for module in (plain, other)]
    assert projected[0]
    assert different(*projected) == []


def kept_nbytes(module: ModelSlice, *, bf16: bool) -> int:
    """Bytes that are alive between forward and backward, without weights and what micro-batches share."""
    watch, device = Watch(), next(module.parameters()).device

    def node() -> object:
        x = normal((MICRO_BATCH, SEQ_LEN, module.spec.hidden_size)).to(device).requires_grad_()
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            return module(x)[None].grad_fn  # not the output itself; a node of torch's keeps those before it

    with sharing_weight_copies():
        first = node()
        gc.freeze()  # what was there before is not searched
        with watch:
            second = node()
        nbytes = watch.alive_nbytes()
        gc.unfreeze()
    assert first is not None
    assert second is not None
    return nbytes


@pytest.mark.parametrize("level", [None, *LEVELS[:-1]])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8"])
@pytest.mark.parametrize(
    ("family", "dropout"), [("gpt2", 0.0), ("gpt2", 0.1), ("llama", 0.0), ("llama", 0.1), ("qwen3", 0.0)]
)
def test_count_equals_what_is_kept(family, level, precision, dropout):
    check_count(make_spec(family, dropout=dropout), level, precision, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("level", ["none", *(level for level in LEVELS if level != "block")])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3"])
def test_count_equals_what_is_kept_on_cuda(family, level, precision):
    check_count(make_spec(family, hidden_size=256, num_heads=2), level, precision, "cuda")


def check_count(spec: ModelSpec, level: Recompute | None, precision: str, device: str) -> None:
    blocks, bf16, fp8 = BlockRange(1, 2, 3), precision != "fp32", precision == "fp8"
    module = make_slice(spec, level, blocks=blocks, device=device, fp8=Fp8Config() if fp8 else None)
    keys = {"recompute": level or "none", "stored_layers": EXACTLY_STORED.get(level, ())}
    shape = MicroBatchShape(MICRO_BATCH, SEQ_LEN, bf16, device == "cuda", fp8=fp8, **keys)
    counted = saved_by_slice(spec, blocks, shape)
    assert counted == pytest.approx(kept_nbytes(module, bf16=bf16), rel=0.01)
