from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from support.small_slices import EXPERTS

from tahq.memory.stored_slice import build_slice
from tahq.models import families
from tahq.models.config import ModelConfig
from tahq.models.keyed_dropout import RandomContext
from tahq.models.model_spec import ModelSpec, load_spec
from tahq.models.partition import BlockRange
from tahq.models.slice import ModelSlice

SEQ_LEN = 12
VOCAB_SIZE = 61
FAMILIES = tuple(families.FAMILIES)
# Windows shorter than the samples, so that masks are really made; qwen2 has both kinds of layers.
OVERRIDES = {
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    "mistral": {"sliding_window": 5},
    "smollm3": {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 5},
    "phi3": {"sliding_window": 5, "pad_token_id": 0},
    "gemma2": {"sliding_window": 5, "query_pre_attn_scalar": 8},
    "gemma3_text": {
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "query_pre_attn_scalar": 8,
    },
    **EXPERTS,
    "qwen3_moe": EXPERTS["qwen3_moe"] | {"mlp_only_layers": [2]},
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tiny_spec():
    """A specification of a tiny model of any family; keywords are `model:` keys."""

    def make(family: str, **keys) -> ModelSpec:
        sizes = {"num_layers": 4, "hidden_size": 32, "num_heads": 4, "intermediate_size": 48}
        grouped = {} if family == "gpt2" else {"num_kv_heads": 2}
        overrides = OVERRIDES.get(family, {}) | keys.pop("overrides", {})
        config = ModelConfig(family=family, overrides=overrides, **(sizes | grouped | keys))
        return load_spec(config, vocab_size=VOCAB_SIZE, seq_len=SEQ_LEN)

    return make


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(0, VOCAB_SIZE, (3, SEQ_LEN), generator=torch.Generator().manual_seed(5))


def build_all(spec: ModelSpec, bounds=(0, 4), seed=7, random=None, **keys) -> list[ModelSlice]:
    """Slices of a model of four blocks, cut at these bounds."""
    ranges = [BlockRange(start, stop, spec.num_layers) for start, stop in pairwise(bounds)]
    return [build_slice(spec, r, seed=seed, device="cpu", random=random or RandomContext(seed), **keys) for r in ranges]


def parameters_of(slices: list[ModelSlice]) -> dict[str, torch.nn.Parameter]:
    return {name: p for part in slices for name, p in part.canonical_parameters().items()}


def logits_of(slices: list[ModelSlice], tokens: torch.Tensor) -> torch.Tensor:
    x = tokens
    for part in slices:
        x = part(x)
    return x


def whole_model(spec: ModelSpec) -> torch.nn.Module:
    """transformers' own model, with random weights."""
    return getattr(spec.layout.modeling(), spec.layout.causal_lm)(spec.hf_config)
