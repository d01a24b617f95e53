"""The supported families of transformers models: names of their classes, parameters and configuration keys.

A family is data; one that is built like Llama is one entry of `FAMILIES`. Transformers' own modules compute
(`tahq.models.slice`), imported by name when they are needed.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tahq.errors import ModelError

HfConfig = Any
"""A transformers configuration; Any, so that checking types does not import transformers."""


@dataclass(frozen=True, slots=True)
class FamilyLayout:
    """One family: its classes in transformers, its parameter names and its configuration keys."""

    name: str
    package: str
    """`transformers.models.<name>`; `configuration_<name>` and `modeling_<name>` are in it."""
    class_prefix: str
    """`GPT2` of `GPT2Config`."""
    causal_lm: str
    """Class named in the exported config.json."""
    block: str
    norm: str
    rotary: str | None
    """Class of the rotary embedding; None: positions are learned."""
    trunk: str
    """Name of the model below the head; the next four are names within it."""
    embedding: str
    positions: str | None
    blocks: str
    final_norm: str
    norm_epsilon: str
    """Configuration key, as the next four."""
    sizes: Mapping[str, str]
    """`model:` key of cluster.yaml -> configuration key."""
    dropouts: tuple[str, ...]
    embedding_dropout: str | None
    residual_projections: tuple[str, ...]
    """Weights of a block whose initial values are divided by √(2 · num_layers)."""
    window: Callable[[HfConfig, int], int | None]
    """(configuration, block) -> positions that it attends to, its own included; None: all before it."""
    block_weights: Callable[[HfConfig], int]
    """Configuration -> multiply-adds per token of a block's matrices."""

    @property
    def embedding_weight(self) -> str:
        """Canonical name of the embedding's weight, the one a tied head copies."""
        return f"{self.trunk}.{self.embedding}.weight"

    def config_class(self) -> Any:
        """The family's configuration class; imports transformers (about a second)."""
        module = importlib.import_module(f"{self.package}.configuration_{self.name}")
        return getattr(module, f"{self.class_prefix}Config")

    def modeling(self) -> Any:
        """The family's module of layers; imports much of transformers (about four seconds)."""
        return importlib.import_module(self.modeling_module)

    @property
    def modeling_module(self) -> str:
        """The name of the module of layers."""
        return f"{self.package}.modeling_{self.name}"


def head_dim(config: HfConfig) -> int:
    """Channels of an attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def num_kv_heads(config: HfConfig) -> int:
    """Heads of keys and values; fewer than query heads under grouped-query attention."""
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def _no_window(config: HfConfig, block: int) -> int | None:
    return None


def _window_everywhere(config: HfConfig, block: int) -> int | None:
    return config.sliding_window  # type: ignore[no-any-return]


def _window_by_layer_type(config: HfConfig, block: int) -> int | None:
    kind = config.layer_types[block]
    if kind not in ("full_attention", "sliding_attention"):
        raise ModelError(f"block {block} has layer type {kind!r}; tahq knows full_attention and sliding_attention")
    return config.sliding_window if kind == "sliding_attention" else None


def _gpt2_block_weights(config: HfConfig) -> int:
    hidden = config.hidden_size
    inner = config.n_inner or 4 * hidden
    return int(4 * hidden * hidden + 2 * hidden * inner)


def _llama_block_weights(config: HfConfig) -> int:
    queries = config.num_attention_heads * head_dim(config)
    keys = num_kv_heads(config) * head_dim(config)
    return int(config.hidden_size * (2 * queries + 2 * keys + 3 * config.intermediate_size))


_GPT2 = FamilyLayout(
    name="gpt2",
    package="transformers.models.gpt2",
    class_prefix="GPT2",
    causal_lm="GPT2LMHeadModel",
    block="GPT2Block",
    norm="LayerNorm",
    rotary=None,
    trunk="transformer",
    embedding="wte",
    positions="wpe",
    blocks="h",
    final_norm="ln_f",
    norm_epsilon="layer_norm_epsilon",
    sizes={
        "num_layers": "n_layer",
        "hidden_size": "n_embd",
        "num_heads": "n_head",
        "intermediate_size": "n_inner",
        "vocab_size": "vocab_size",
        "max_seq_len": "n_positions",
    },
    dropouts=("embd_pdrop", "attn_pdrop", "resid_pdrop"),
    embedding_dropout="embd_pdrop",
    residual_projections=("attn.c_proj.weight", "mlp.c_proj.weight"),
    window=_no_window,
    block_weights=_gpt2_block_weights,
)


def _like_llama(name: str, class_prefix: str, window: Callable[[HfConfig, int], int | None]) -> FamilyLayout:
    return FamilyLayout(
        name=name,
        package=f"transformers.models.{name}",
        class_prefix=class_prefix,
        causal_lm=f"{class_prefix}ForCausalLM",
        block=f"{class_prefix}DecoderLayer",
        norm=f"{class_prefix}RMSNorm",
        rotary=f"{class_prefix}RotaryEmbedding",
        trunk="model",
        embedding="embed_tokens",
        positions=None,
        blocks="layers",
        final_norm="norm",
        norm_epsilon="rms_norm_eps",
        sizes={
            "num_layers": "num_hidden_layers",
            "hidden_size": "hidden_size",
            "num_heads": "num_attention_heads",
            "num_kv_heads": "num_key_value_heads",
            "intermediate_size": "intermediate_size",
            "vocab_size": "vocab_size",
            "max_seq_len": "max_position_embeddings",
        },
        dropouts=("attention_dropout",),
        embedding_dropout=None,
        residual_projections=(),
        window=window,
        block_weights=_llama_block_weights,
    )


FAMILIES: Mapping[str, FamilyLayout] = {
    "gpt2": _GPT2,
    "llama": _like_llama("llama", "Llama", _no_window),
    "qwen2": _like_llama("qwen2", "Qwen2", _window_by_layer_type),
    "qwen3": _like_llama("qwen3", "Qwen3", _window_by_layer_type),
    "mistral": _like_llama("mistral", "Mistral", _window_everywhere),
}
"""`model.family`, and `model_type` of a folder's config.json -> the family."""
