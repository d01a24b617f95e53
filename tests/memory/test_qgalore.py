"""Q-GaLore in a model: which layers are covered, what they compute, and how many bytes they take."""

import math
from collections import Counter
from itertools import pairwise

import pytest
import torch
from support.samples import normal
from torch import nn

from tahq.memory.galore.low_rank_weight import LowRankSettings, LowRankWeight
from tahq.memory.galore.qgalore import LowRankEmbedding, build_low_rank_slice, low_rank_weights
from tahq.memory.galore.stored_weight import FullWeight, Int8Weight
from tahq.memory.galore.subspace import LazyRule
from tahq.memory.stored_slice import build_slice
from tahq.models.config import ModelConfig
from tahq.models.deferred_gradients import DeferredGradients
from tahq.models.export import export_folder
from tahq.models.keyed_dropout import RandomContext
from tahq.models.model_spec import ModelSpec, load_spec
from tahq.models.partition import BlockRange

CPU = torch.device("cpu")
PLAIN = {"weights": "fp32", "projections": "fp32", "states": "fp32"}
GPT2_PARTS = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
two_families = pytest.mark.parametrize("family", ["gpt2", "llama"])
every_mode = pytest.mark.parametrize("mode", ["fp32", "bf16", "checkpoint", "deferred"])


def spec_of(family: str) -> ModelSpec:
    sizes = {"num_kv_heads": 1, "intermediate_size": 40} if family != "gpt2" else {}
    config = ModelConfig(family=family, num_layers=2, hidden_size=32, num_heads=2, **sizes)
    return load_spec(config, vocab_size=64, seq_len=16)


WHOLE = BlockRange(0, 2, 2)


def low_rank_slice(spec: ModelSpec, blocks: BlockRange = WHOLE, **changes):
    return build_low_rank_slice(spec, blocks, LowRankSettings(**changes), seed=1, device=CPU, random=RandomContext(0))


def slices(family: str, **changes):
    """A slice without, and one with covered layers."""
    spec = spec_of(family)
    plain = build_slice(spec, WHOLE, seed=1, device=CPU, random=RandomContext(0))
    return plain, low_rank_slice(spec, **changes)


def decode_into(plain, covered) -> dict[str, torch.Tensor]:
    """Give a plain slice the values that the covered weights have after rounding; returns how far they moved."""
    moved = {}
    with torch.no_grad():
        for name, weight in low_rank_weights(covered).items():
            decoded, parameter = weight.storage.decoded(torch.float32), plain.get_parameter(name)
            moved[name] = (decoded - parameter).abs().max()
            parameter.copy_(decoded)
    return moved


def run(plain, covered, mode="fp32") -> list[torch.Tensor]:
    """Both losses; gradients stay in the slices."""
    tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))
    losses = []
    for module in (plain, covered):
        module.checkpoint_blocks = mode == "checkpoint"
        module.deferred = DeferredGradients() if mode == "deferred" and module is covered else None
        with torch.autocast("cpu", torch.bfloat16, enabled=mode == "bf16"):
            loss = module(tokens).float().square().mean()
        loss.backward()
        losses.append(loss.detach())
        if module.deferred is not None:
            module.deferred.run()
    return losses


def test_matrices_of_attention_and_mlp_are_covered_and_nothing_else():
    _, gpt2 = slices("gpt2")
    names = [f"transformer.h.{block}.{part}.weight" for block in (0, 1) for part in GPT2_PARTS]
    assert list(low_rank_weights(gpt2)) == names
    plain, llama = slices("llama")
    covered, ordinary = low_rank_weights(llama), llama.canonical_parameters()
    assert len(covered) == 2 * 7
    assert not covered.keys() & ordinary.keys()
    assert covered.keys() | ordinary.keys() == plain.canonical_parameters().keys()
    assert all("norm" in name or name in ("model.embed_tokens.weight", "lm_head.weight") for name in ordinary)


@two_families
def test_with_ends_embedding_and_head_are_covered_too_and_not_projected(family):
    _, without = slices(family)
    _, model = slices(family, ends="bf16")
    ends = [model.spec.layout.embedding_weight, "lm_head.weight"]
    covered, ordinary = low_rank_weights(model), model.canonical_parameters()
    assert list(covered) == [ends[0], *low_rank_weights(without), ends[1]]
    assert [name for name, weight in covered.items() if weight.low_shape == weight.shape] == ends
    assert [covered[name].settings.scale for name in ends] == [1.0, 1.0]
    assert all(parameter.ndim == 1 or name == "transformer.wpe.weight" for name, parameter in ordinary.items())


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3"])
@every_mode
def test_layers_without_quantisation_and_projection_equal_plain_layers_to_the_bit(family, mode):
    plain, covered = slices(family, rank=10**6, **PLAIN)
    assert torch.equal(*run(plain, covered, mode))
    expected = {name: p.grad for name, p in plain.canonical_parameters().items()}
    got = {name: each.grad for name, each in (covered.canonical_parameters() | low_rank_weights(covered)).items()}
    different = [name for name in expected if not torch.equal(got[name], expected[name])]
    # torch adds a bias's gradient in another order where it is a layer's own
    assert [name for name in different if not name.endswith("bias")] == []
    for name in different:
        torch.testing.assert_close(got[name], expected[name], rtol=2**-7 if mode == "bf16" else 1e-5, atol=1e-7)


@two_families
@every_mode
@pytest.mark.parametrize("keys", [{"ends": "bf16"}, {"ends": "int8"}, {"weights": "int8"}], ids=str)
def test_layers_equal_those_of_their_decoded_weights_to_the_bit(family, mode, keys):
    plain, covered = slices(family, rank=10**6, **(PLAIN | keys))
    # a group's largest number is at most five standard deviations of 0.02: half of one of 240 steps
    assert all(moved < 0.2 / 240 for moved in decode_into(plain, covered).values())
    assert torch.equal(*run(plain, covered, mode))
    gradients = {name: each.grad for name, each in low_rank_weights(covered).items()}
    assert [name for name in gradients if not torch.equal(gradients[name], plain.get_parameter(name).grad)] == []


def test_random_weights_do_not_depend_on_the_cut():
    whole = low_rank_weights(low_rank_slice(spec_of("llama"), ends="int8"))
    part = low_rank_weights(low_rank_slice(spec_of("llama"), BlockRange(1, 2, 2), ends="int8"))
    assert "lm_head.weight" in part
    assert all(torch.equal(weight.storage.codes, whole[name].storage.codes) for name, weight in part.items())


def searched_at(model, num_steps: int) -> dict[str, list[int]]:
    """The steps in which each weight of a slice is searched, with random gradients."""
    weights = low_rank_weights(model)
    found: dict[str, list[int]] = {name: [] for name in weights}
    for step in range(num_steps):
        for name, weight in weights.items():
            found[name] += [step] if weight.begin(step) else []
            weight.take(normal(weight.shape, seed=step + 1))
            weight.apply(step, 0.01, 0.0)
    return found


@pytest.mark.parametrize("gap", [1, 5, 6, 20])
def test_later_searches_are_spread_evenly_over_the_steps_and_do_not_depend_on_the_cut(gap):
    """14 matrices: several, or less than one, in a step."""
    rule = LazyRule(gap=gap, is_lazy=False)
    found = searched_at(low_rank_slice(spec_of("llama"), rule=rule), 1 + 5 * gap // 2)
    for steps in found.values():
        assert steps[0] == 0
        assert gap / 2 <= steps[1] <= 3 * gap / 2
        assert {after - before for before, after in pairwise(steps[1:])} <= {gap}
    per_step = Counter(step for steps in found.values() for step in steps)
    assert per_step.pop(0) == len(found)
    even = range(gap // 2 + 1, 1 + 5 * gap // 2)
    assert per_step.keys() <= set(even)
    assert all(per_step[step] in (len(found) // gap, math.ceil(len(found) / gap)) for step in even)
    for block in (0, 1):
        part = low_rank_slice(spec_of("llama"), BlockRange(block, block + 1, 2), rule=rule)
        alone = searched_at(part, 1 + 5 * gap // 2)
        assert alone == {name: found[name] for name in alone}


@pytest.mark.parametrize(("family", "ends"), [("gpt2", "fp32"), ("llama", "int8")])
def test_a_folder_of_weights_is_rounded_to_nearest(family, ends, tmp_path):
    plain, covered = slices(family, ends=ends)
    export_folder(plain.spec, plain.canonical_parameters().__getitem__, tmp_path / "model", None)
    read = low_rank_slice(load_spec(ModelConfig(path=str(tmp_path / "model")), vocab_size=64, seq_len=16), ends=ends)
    for name, weight in low_rank_weights(read).items():
        assert torch.equal(weight.storage.codes, low_rank_weights(covered)[name].storage.codes)
    for name, parameter in read.canonical_parameters().items():
        assert torch.equal(parameter, plain.canonical_parameters()[name])


CPU = torch.device("cpu")
NAME = "model.embed_tokens.weight"


def pair(ends: str, padding: int | None = None, **changes) -> tuple[nn.Embedding, LowRankEmbedding]:
    """torch's, with the values that the other has after rounding."""
    weight = LowRankWeight(NAME, (50, 24), LowRankSettings(ends=ends, **changes).of_ends(), CPU)
    weight.storage.assign(normal((50, 24)))
    plain = nn.Embedding(50, 24, padding)
    with torch.no_grad():
        plain.weight.copy_(weight.storage.decoded(torch.float32))
    return plain, LowRankEmbedding(weight, padding)


@pytest.mark.parametrize("shape", [(7, 256), (7, 512), (9, 24), (5, 700), (300, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_those_of_the_decoded_weight(shape, dtype):
    tokens = torch.tensor([[0, 3, 3], [shape[0] - 1, 1, 0]])
    for storage in (Int8Weight(shape, CPU), FullWeight(shape, CPU, torch.bfloat16)):
        storage.assign(normal(shape))
        assert torch.equal(storage.rows(tokens, dtype), storage.decoded(dtype)[tokens])


@pytest.mark.parametrize("ends", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "autocast"])
def test_rows_and_gradients_have_the_bits_of_torchs_embedding(ends, padding, bf16):
    plain, ours = pair(ends, padding)
    for index in range(2):  # two micro-batches
        tokens = torch.randint(0, 40, (2, 16), generator=torch.Generator().manual_seed(index))
        outputs = []
        for module in (plain, ours):
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                outputs.append(module(tokens))
            outputs[-1].backward(normal((2, 16, 24), seed=index + 1))
        assert torch.equal(*outputs)
        assert outputs[1].dtype == torch.float32
    assert torch.equal(ours.low_rank.grad, plain.weight.grad)
