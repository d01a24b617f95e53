import math

import pytest
import torch
from torch import nn

from tahq.models.partition import BlockRange
from tahq.models.slice import random_weight, slice_parameters

from .conftest import FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_distributions_are_those_of_transformers(family, tiny_spec):
    spec = tiny_spec(family, hidden_size=64, intermediate_size=128, vocab_size=128)
    torch.manual_seed(0)
    reference = getattr(spec.layout.modeling(), spec.layout.causal_lm)(spec.hf_config)
    for name, theirs in reference.state_dict().items():
        ours = random_weight(spec, name, theirs.shape, seed=0)
        if theirs.std() == 0:
            assert torch.equal(ours, theirs), name
        else:
            # The deviation of n normal numbers is itself known to 1/√(2n); ten of that is generous.
            tolerance = 10 / math.sqrt(2 * theirs.numel())
            assert ours.std().item() == pytest.approx(theirs.std().item(), rel=tolerance), name
            assert abs(ours.mean().item()) < 6 * ours.std().item() / math.sqrt(ours.numel()), name


def test_weights_depend_on_seed_and_name_alone(tiny_spec):
    spec, shape = tiny_spec("llama"), torch.Size([8, 8])
    weight = random_weight(spec, "model.layers.0.mlp.up_proj.weight", shape, seed=1)
    torch.manual_seed(99)
    assert torch.equal(weight, random_weight(spec, "model.layers.0.mlp.up_proj.weight", shape, seed=1))
    assert not torch.equal(weight, random_weight(spec, "model.layers.1.mlp.up_proj.weight", shape, seed=1))
    assert not torch.equal(weight, random_weight(spec, "model.layers.0.mlp.up_proj.weight", shape, seed=2))


def test_no_two_parameters_of_a_model_are_equal(tiny_spec):
    spec = tiny_spec("gpt2")
    shapes = slice_parameters(spec, BlockRange(0, 4, 4))
    drawn = [random_weight(spec, name, shape, 0) for name, shape in shapes.items() if len(shape) == 2]
    assert len({tuple(weight.flatten()[:4].tolist()) for weight in drawn}) == len(drawn)


def test_one_dimensional_parameters_are_norms_and_biases_only(tiny_spec):
    """`random_weight` takes a parameter of one dimension that is no bias for a norm; is that so?"""
    for family in FAMILIES:
        spec = tiny_spec(family)
        model = getattr(spec.layout.modeling(), spec.layout.causal_lm)(spec.hf_config)
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                is_norm = isinstance(module, nn.LayerNorm) or "RMSNorm" in type(module).__name__
                assert (parameter.ndim == 1) == (is_norm or name == "bias")
