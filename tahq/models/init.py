"""Random weights that depend on the seed and the parameter's name only, never on the cut.

The distributions are those of transformers' `_init_weights`: matrices and embeddings are normal
with standard deviation `initializer_range`, GPT-2's projections into the residual stream with that
divided by √(2 · num_layers); norms are 1, biases 0, the embedding of a padding token 0. The numbers
are not transformers' own, which come from one stream in the order of construction.

torch's CPU generator uses the low 32 bits of a seed, so two of n matrices share their values with
probability n² / 2³³: one in 8,000 for a thousand matrices, and then harmless.
"""

import math
from collections.abc import Mapping

import torch

from tahq.models.model_spec import ModelSpec
from tahq.randomness import derive_seed


def initialise(spec: ModelSpec, parameters: Mapping[str, torch.Tensor], sources: Mapping[str, str], seed: int) -> None:
    """Fill parameters in place.

    Args:
        spec: the model.
        parameters: canonical name -> tensor to fill, of any device.
        sources: canonical name -> canonical name whose values it gets (a tied head: the embedding's).
        seed: the run's.
    """
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(random_weight(spec, sources.get(name, name), parameter.shape, seed))


def random_weight(spec: ModelSpec, name: str, shape: torch.Size, seed: int) -> torch.Tensor:
    """The values of one parameter: fp32, on the CPU, whatever the device that trains it.

    Args:
        spec: the model.
        name: canonical name, from which the generator's seed is derived.
        shape: its shape; of one dimension for biases and norms alone.
        seed: the run's.
    """
    if name.endswith("bias"):
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.ones(shape)
    generator = torch.Generator("cpu")
    generator.manual_seed(derive_seed(seed, "init", name))
    weight = torch.empty(shape).normal_(0.0, _standard_deviation(spec, name), generator=generator)
    padding = spec.hf_config.pad_token_id
    if name == spec.layout.embedding_weight and spec.layout.positions is None and padding is not None:
        weight[padding] = 0.0
    return weight


def _standard_deviation(spec: ModelSpec, name: str) -> float:
    deviation = float(spec.hf_config.initializer_range)
    if name.endswith(spec.layout.residual_projections):
        deviation /= math.sqrt(2 * spec.num_layers)
    return deviation
