"""The supported families of transformers models: names of their classes, parameters and configuration keys.

A family is data; one that is built like Llama is one entry of `FAMILIES`. Transformers' own modules compute
(`tahq.models.slice`), imported by name when they are needed. What changes the layers of a block (`memory`, kernels on
CUDA) knows those of GPT-2 and of Llama; blocks of other layers run as they are.
"""

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tahq.errors import ModelError

HfConfig = Any  # A transformers configuration; Any, so that checking types does not import transformers


def head_dim(config: HfConfig) -> int:
    """Channels of an attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def num_kv_heads(config: HfConfig) -> int:
    """Heads of keys and values; fewer than query heads under grouped-query attention."""
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def _window_by_layer_type(config: HfConfig, block: int) -> int | None:
    kind = config.layer_types[block]
    if kind not in ("full_attention", "sliding_attention"):
        raise ModelError(f"block {block} has layer type {kind!r}; tahq knows full_attention and sliding_attention")
    return config.sliding_window if kind == "sliding_attention" else None


def _window_of_all(config: HfConfig, block: int) -> int | None:
    window: int | None = config.sliding_window
    return window


def _root_of_hidden(config: HfConfig) -> float:
    return math.sqrt(config.hidden_size)


def num_experts(config: HfConfig) -> int:
    """Experts of a block that has some."""
    return int(config.num_experts)


def _gpt2_block_weights(config: HfConfig) -> int:
    hidden = config.hidden_size
    inner = config.n_inner or 4 * hidden
    return int(4 * hidden * hidden + 2 * hidden * inner)


def _attention_weights(config: HfConfig) -> int:
    queries = config.num_attention_heads * head_dim(config)
    keys = num_kv_heads(config) * head_dim(config)
    return int(config.hidden_size * (2 * queries + 2 * keys))


def _llama_block_weights(config: HfConfig) -> int:
    return _attention_weights(config) + 3 * int(config.hidden_size * config.intermediate_size)


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """The experts of a family's blocks, and how files name their weights.

    Transformers stacks the weights of a block's experts to matrices of three dimensions, and files have those of each
    expert apart, as `transformers.conversion_mapping` says. Files of stacked ones are read, too.
    """

    inner: str  # Configuration key: inner channels of an expert
    in_files: Mapping[str, tuple[str, ...]]
    """Path of a parameter in a block -> names of its parts in files: for each expert (`*`), one below the other."""
    shared_inner: str | None = None  # Configuration key: inner channels of the expert that all tokens take

    def is_in(self, config: HfConfig, block: int) -> bool:
        """Whether a block has experts; else it has a plain MLP."""
        every = getattr(config, "decoder_sparse_step", 1)
        return block not in getattr(config, "mlp_only_layers", ()) and (block + 1) % every == 0

    def weights(self, config: HfConfig, num_taken: int) -> int:
        """Elements of attention, router, so many experts, and the shared one."""
        inner = num_taken * getattr(config, self.inner)
        router = num_experts(config)
        if self.shared_inner is not None:
            inner, router = inner + getattr(config, self.shared_inner), router + 1
        return _attention_weights(config) + int(config.hidden_size) * (3 * int(inner) + router)


def _stacked_block_weights(config: HfConfig) -> int:
    experts = FAMILIES[config.model_type].experts
    assert experts is not None, "of a family with experts"
    return experts.weights(config, num_experts(config))


@dataclass(frozen=True, slots=True)
class FamilyLayout:
    """One family: its classes in transformers, parameter names and configuration keys; the defaults are Llama's."""

    name: str  # `model_type` of config.json
    class_prefix: str  # `GPT2` of `GPT2Config`; endings of other classes follow
    window: Callable[[HfConfig, int], int | None] = lambda config, block: None
    """(configuration, block) -> positions that it attends to, its own included; None: all before it."""
    package: str = ""  # Of its modules, `transformers.models.<package>.modeling_<package>`; "": its name
    config_ending: str = "Config"
    lm_ending: str = "ForCausalLM"
    layers_like: Literal["gpt2", "llama"] | None = "llama"
    """The family whose layers a block has, in their order; None: no other's."""
    embedding_scale: Callable[[HfConfig], float] | None = None
    """Factor of the embedding's rows; None: 1."""
    first_norm_weight: float = 1.0  # Before training; 0 where the layer adds 1
    rotates_by_layer_type: bool = False
    """Whether rotary tables are those of a block's `layer_types`."""
    block: str = "DecoderLayer"
    norm: str = "RMSNorm"
    rotary: str | None = "RotaryEmbedding"  # None: positions are learned
    trunk: str = "model"  # Name of the model below the head; the next four are names within it
    embedding: str = "embed_tokens"
    positions: str | None = None
    blocks: str = "layers"
    final_norm: str = "norm"
    norm_epsilon: str = "rms_norm_eps"  # Configuration key, as the next three
    dropouts: tuple[str, ...] = ("attention_dropout",)
    embedding_dropout: str | None = None
    sizes: Mapping[str, str] = field(
        default_factory=lambda: {
            "num_layers": "num_hidden_layers",
            "hidden_size": "hidden_size",
            "num_heads": "num_attention_heads",
            "num_kv_heads": "num_key_value_heads",
            "intermediate_size": "intermediate_size",
            "vocab_size": "vocab_size",
            "max_seq_len": "max_position_embeddings",
        }
    )
    """`model:` key of cluster.yaml -> configuration key."""
    residual_projections: tuple[str, ...] = ()
    """Weights of a block whose initial values are divided by √(2 · num_layers)."""
    block_weights: Callable[[HfConfig], int] = _llama_block_weights
    """Configuration -> elements of a block's matrices; with experts of one that has them."""
    experts: ExpertLayout | None = None
    """Those of a mixture of experts."""

    def has_experts(self, config: HfConfig, block: int) -> bool:
        """Whether a block is a mixture of experts."""
        return self.experts is not None and self.experts.is_in(config, block)

    def num_products(self, config: HfConfig, block: int) -> int:
        """Multiply-adds per token of a block's matrices: of experts, of those that a token takes."""
        if self.experts is None:
            return self.block_weights(config)
        if not self.experts.is_in(config, block):
            return _llama_block_weights(config)
        return self.experts.weights(config, int(config.num_experts_per_tok))

    def names_in_files(self, name: str) -> tuple[str, ...]:
        """Names in files of a parameter's parts, `*` for each expert's number; empty: it has its own name there."""
        for path, parts in {} if self.experts is None else self.experts.in_files.items():
            if name.endswith(f".{path}"):
                return tuple(name.removesuffix(path) + part for part in parts)
        return ()

    @property
    def embedding_weight(self) -> str:
        """Canonical name of the embedding's weight, the one a tied head copies."""
        return f"{self.trunk}.{self.embedding}.weight"

    @property
    def causal_lm(self) -> str:
        """Class named in the exported config.json."""
        return self.class_prefix + self.lm_ending

    def config_class(self) -> Any:
        """The family's configuration class; imports transformers (about a second)."""
        package = self.package or self.name
        module = importlib.import_module(f"transformers.models.{package}.configuration_{package}")
        return getattr(module, f"{self.class_prefix}{self.config_ending}")

    @property
    def modeling_module(self) -> str:
        """The name of the module of layers."""
        package = self.package or self.name
        return f"transformers.models.{package}.modeling_{package}"

    def modeling(self) -> Any:
        """The family's module of layers; imports much of transformers (about four seconds)."""
        return importlib.import_module(self.modeling_module)

    def layer_class(self, ending: str) -> Any:
        """A class of the module of layers, or where there is none, of `torch.nn`, which that imports."""
        modeling = self.modeling()
        return getattr(modeling, self.class_prefix + ending, None) or getattr(modeling.nn, ending)


_GPT2 = FamilyLayout(
    name="gpt2",
    class_prefix="GPT2",
    lm_ending="LMHeadModel",
    layers_like="gpt2",
    block="Block",
    norm="LayerNorm",
    rotary=None,
    trunk="transformer",
    embedding="wte",
    positions="wpe",
    blocks="h",
    final_norm="ln_f",
    norm_epsilon="layer_norm_epsilon",
    dropouts=("embd_pdrop", "attn_pdrop", "resid_pdrop"),
    embedding_dropout="embd_pdrop",
    sizes={
        "num_layers": "n_layer",
        "hidden_size": "n_embd",
        "num_heads": "n_head",
        "intermediate_size": "n_inner",
        "vocab_size": "vocab_size",
        "max_seq_len": "n_positions",
    },
    residual_projections=("attn.c_proj.weight", "mlp.c_proj.weight"),
    block_weights=_gpt2_block_weights,
)


def _experts_of_qwen(shared_inner: str | None = None) -> dict[str, Any]:
    in_files = {
        "mlp.experts.gate_up_proj": ("mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight"),
        "mlp.experts.down_proj": ("mlp.experts.*.down_proj.weight",),
    }
    experts = ExpertLayout("moe_intermediate_size", in_files, shared_inner)
    return {"layers_like": None, "block_weights": _stacked_block_weights, "experts": experts}


_EXPERTS_OF_MIXTRAL = ExpertLayout(
    "intermediate_size",
    {
        "mlp.experts.gate_up_proj": ("block_sparse_moe.experts.*.w1.weight", "block_sparse_moe.experts.*.w3.weight"),
        "mlp.experts.down_proj": ("block_sparse_moe.experts.*.w2.weight",),
        "mlp.gate.weight": ("block_sparse_moe.gate.weight",),
    },
)

_GEMMA: dict[str, Any] = {"layers_like": None, "embedding_scale": _root_of_hidden, "first_norm_weight": 0.0}

FAMILIES: Mapping[str, FamilyLayout] = {
    family.name: family
    for family in (
        _GPT2,
        FamilyLayout("llama", "Llama"),
        FamilyLayout("qwen2", "Qwen2", _window_by_layer_type),
        FamilyLayout("qwen3", "Qwen3", _window_by_layer_type),
        FamilyLayout("mistral", "Mistral", _window_of_all),
        FamilyLayout("smollm3", "SmolLM3", _window_by_layer_type, layers_like=None),
        FamilyLayout("olmo2", "Olmo2", layers_like=None),
        FamilyLayout("phi3", "Phi3", _window_of_all, layers_like=None, dropouts=("attention_dropout", "resid_pdrop")),
        FamilyLayout("gemma", "Gemma", **_GEMMA),
        FamilyLayout("gemma2", "Gemma2", _window_by_layer_type, **_GEMMA),
        FamilyLayout(
            *("gemma3_text", "Gemma3", _window_by_layer_type, "gemma3", "TextConfig"),
            rotates_by_layer_type=True,
            **_GEMMA,
        ),
        FamilyLayout(
            "qwen2_moe", "Qwen2Moe", _window_by_layer_type, **_experts_of_qwen("shared_expert_intermediate_size")
        ),
        FamilyLayout("qwen3_moe", "Qwen3Moe", _window_of_all, **_experts_of_qwen()),
        FamilyLayout(
            *("mixtral", "Mixtral", _window_of_all),
            layers_like=None,
            block_weights=_stacked_block_weights,
            experts=_EXPERTS_OF_MIXTRAL,
        ),
    )
}
"""`model.family`, and `model_type` of a folder's config.json -> the family."""
