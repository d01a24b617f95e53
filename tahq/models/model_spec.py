"""A model before it is built: its transformers configuration, its sizes and where its weights come from.

The configuration is made from the sizes in cluster.yaml or read from a folder's config.json. A mistake that
transformers would report with a traceback is reported here in one line.
"""

import difflib
import inspect
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tahq.errors import ModelError, brief
from tahq.hub import local_folder
from tahq.models.adapters.config import AdapterConfig, is_adapter
from tahq.models.config import ModelConfig, check_frozen_layers
from tahq.models.families import FAMILIES, ExpertLayout, FamilyLayout, HfConfig, head_dim, num_kv_heads
from tahq.models.weights import FolderWeights, one_line, read_json

CONFIG_FILE = "config.json"
_MAX_CONFIG_NBYTES = 2**20
_MAX_SIZES = {"num_layers": 2**14}
_MAX_EXPERTS = 2**10
_MAX_SIZE = 2**24  # Largest value of every other size; the product of any two, in bytes, stays far below 2⁶³


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The facts needed to build, divide, load and export a model; nothing is allocated.

    `tied`: the source model ties its head to its embedding, so tahq's two parameters start equal.
    `tie`: whether training keeps them equal (`sync`) or not (`untied`).
    `folder`: of the configuration; None: it was made from sizes, and weights are random. `path`: of the weights, that
    folder's or a name on the Hub. `first_trainable`: the block that the backward ends in, counted from 0; as many as
    there are blocks: it ends in the last norm. Blocks below it, and the embedding where there are such blocks, have a
    forward pass only. `adapter`: what is trained beside the model's own parameters, which are then frozen; None: these.
    """

    family: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_seq_len: int
    tied: bool
    tie: Literal["untied", "sync"]
    folder: Path | None
    hf_config: HfConfig = field(hash=False)  # it has none
    path: str = ""
    first_trainable: int = 0
    adapter: AdapterConfig | None = field(default=None, hash=False)  # nor has this

    @property
    def layout(self) -> FamilyLayout:
        """Class and parameter names of the model's family."""
        return FAMILIES[self.family]

    def is_trained(self, name: str) -> bool:
        """Whether a parameter, by its canonical name, changes in training."""
        if self.adapter is not None:
            return is_adapter(name)
        layout = self.layout
        part, _, rest = name.removeprefix(f"{layout.trunk}.").partition(".")
        if part == layout.blocks:
            return int(rest.partition(".")[0]) >= self.first_trainable
        return self.first_trainable == 0 or part not in (layout.embedding, layout.positions)


def load_spec(
    config: ModelConfig,
    *,
    vocab_size: int,
    seq_len: int,
    needs_weights: bool = True,
    adapter: AdapterConfig | None = None,
) -> ModelSpec:
    """Read a model's configuration, or make it from sizes, and check that the data fits it.

    `vocab_size` is the tokenizer's, 1 if it is not known; the model's may be larger. `seq_len`: tokens per sample.
    `needs_weights`: check that a folder holds weights.

    Raises:
        ModelError: a folder without configuration or weights, an unsupported family, contradictory sizes,
            a vocabulary smaller than the tokenizer's or, in a folder, much larger, or samples longer than the model's
            positions.
    """
    if config.path is None:
        folder = None
        layout, hf_config = _config_from_sizes(config, vocab_size=vocab_size, seq_len=seq_len)
    else:
        folder = local_folder(config.path)
        layout, hf_config = _config_from_folder(config, folder)
        if needs_weights:
            FolderWeights.find(config.path, layout)
    spec = ModelSpec(
        family=layout.name,
        num_layers=hf_config.num_hidden_layers,
        hidden_size=hf_config.hidden_size,
        vocab_size=hf_config.vocab_size,
        max_seq_len=hf_config.max_position_embeddings,
        tied=bool(hf_config.tie_word_embeddings),
        tie=config.tie,
        folder=folder,
        hf_config=hf_config,
        path=config.path or "",
        first_trainable=config.frozen_layers if adapter is None else min(adapter.layers or [0]),
        adapter=adapter,
    )
    _check_fits(spec, config, vocab_size, seq_len)
    return spec


def untying_note(config: ModelConfig, spec: ModelSpec) -> str | None:
    """One line for the user whose model ties head and embedding, which tahq trains as two parameters."""
    is_asked_for = config.path is not None or "tie_word_embeddings" in config.overrides
    if not (spec.tied and spec.tie == "untied" and is_asked_for and spec.adapter is None):
        return None
    return (
        "the model has tie_word_embeddings: true; tahq trains embedding and head as two parameters that start equal, "
        "and exports both with tie_word_embeddings: false (model.tie: sync keeps them equal)"
    )


def _check_fits(spec: ModelSpec, config: ModelConfig, vocab_size: int, seq_len: int) -> None:
    try:
        check_frozen_layers(config, spec.num_layers)
    except ValueError as error:
        raise ModelError(f"model.{error}") from error
    if spec.tie == "sync" and not spec.tied:
        raise ModelError("model.tie: sync needs a model with a tied head; this one has tie_word_embeddings: false")
    if config.max_seq_len is not None and config.max_seq_len > spec.max_seq_len:
        raise ModelError(
            f"model.max_seq_len {config.max_seq_len} is above the {spec.max_seq_len} positions of {spec.folder}"
        )
    if seq_len > spec.max_seq_len:
        raise ModelError(
            f"data.seq_len {seq_len} is longer than the model's {spec.max_seq_len} positions; "
            "lower data.seq_len or raise model.max_seq_len"
        )
    if vocab_size > spec.vocab_size:
        raise ModelError(
            f"the tokenizer has {vocab_size} tokens, the model's vocabulary {spec.vocab_size}; "
            "raise model.vocab_size or use the model's own tokenizer"
        )
    if spec.folder is not None and 1 < vocab_size < spec.vocab_size // 4:
        raise ModelError(
            f"data.tokenizer has {vocab_size} tokens, the model in {spec.folder} was trained with up to "
            f"{spec.vocab_size}: remove the key to use the model's own tokenizer"
        )
    if spec.adapter is not None and max(spec.adapter.layers or [0]) >= spec.num_layers:
        raise ModelError(
            f"adapter.layers: {max(spec.adapter.layers or [0])} is no block of this model; it has 0 to "
            f"{spec.num_layers - 1}"
        )
    for block in range(spec.num_layers):  # refuses unknown layer types now
        spec.layout.window(spec.hf_config, block)


def _config_from_sizes(config: ModelConfig, *, vocab_size: int, seq_len: int) -> tuple[FamilyLayout, HfConfig]:
    assert config.family is not None, "ModelConfig requires a family without a path"
    layout = FAMILIES[config.family]
    keys = _size_keys(config, layout, vocab_size, seq_len)
    _check_overrides(config.overrides, layout, owned=keys)
    keys |= dict.fromkeys(layout.dropouts, config.dropout)
    keys |= {"tie_word_embeddings": True} if config.tie == "sync" else {}
    keys |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return layout, _build(layout, keys | config.overrides, where="model")


def require_folder(folder: Path) -> None:
    """Raise ModelError if the model's folder does not exist."""
    if not os.path.isdir(folder):  # Path.is_dir raises where a name is too long
        raise ModelError(
            f"model.path {brief(str(folder))} is not a folder here, nor a name on the Hugging Face Hub (OWNER/NAME)"
        )


def _config_from_folder(config: ModelConfig, folder: Path) -> tuple[FamilyLayout, HfConfig]:
    """The configuration in a folder with `model.overrides` and, replacing the folder's, `model.dropout`."""
    path = folder / CONFIG_FILE
    require_folder(folder)
    if not path.exists():
        raise ModelError(f"{folder} has no {CONFIG_FILE}; model.path needs {CONFIG_FILE} and safetensors")
    keys = read_json(path, _MAX_CONFIG_NBYTES)
    layout = FAMILIES.get(str(keys.get("model_type")))
    if layout is None:
        raise ModelError(
            f"{path} has model_type {repr(keys.get('model_type'))[:80]}; tahq trains {', '.join(FAMILIES)}"
        )
    if "quantization_config" in keys:
        raise ModelError(f"{folder} holds quantised weights; training needs the model in fp32, bf16 or fp16")
    _check_overrides(config.overrides, layout, owned={})
    keys |= dict.fromkeys(layout.dropouts, config.dropout)
    return layout, _build(layout, keys | config.overrides, where=str(path))


def _size_keys(config: ModelConfig, layout: FamilyLayout, vocab_size: int, seq_len: int) -> dict[str, Any]:
    """Sizes by their names in the family's configuration.

    Defaults: as many key and value heads as query heads; an inner size of 4 · hidden (GPT-2) or 8/3 · hidden rounded
    up to a multiple of 64 (the others); the tokenizer's vocabulary; the data's sequence length.
    """
    hidden, heads, kv_heads = config.hidden_size, config.num_heads, config.num_kv_heads
    assert hidden is not None, "ModelConfig requires the sizes without a path"
    assert heads is not None, "ModelConfig requires the sizes without a path"
    sizes: dict[str, Any] = {
        "num_layers": config.num_layers,
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": kv_heads or heads,
        "intermediate_size": config.intermediate_size
        or (4 * hidden if layout.rotary is None else -(-8 * hidden // (3 * 64)) * 64),
        "vocab_size": config.vocab_size or vocab_size,
        "max_seq_len": config.max_seq_len or seq_len,
    }
    if "num_kv_heads" not in layout.sizes and kv_heads not in (None, heads):
        raise ModelError(f"model.num_kv_heads {kv_heads}: {layout.name} has as many as num_heads; remove it")
    keys = {layout.sizes[name]: value for name, value in sizes.items() if name in layout.sizes}
    if "head_dim" in config.overrides:
        return keys
    if hidden % heads:
        raise ModelError(f"model.num_heads {heads} does not divide model.hidden_size {hidden}")
    return keys | ({"head_dim": hidden // heads} if "head_dim" in _known_keys(layout) else {})


def _known_keys(layout: FamilyLayout) -> set[str]:
    """Keys that the family's configuration declares, with transformers' aliases."""
    config_class = layout.config_class()
    declared = set(inspect.signature(config_class.__init__).parameters) - {"self", "kwargs"}
    return declared | set(config_class.attribute_map) | {"tie_word_embeddings", "rope_parameters"}


def _check_overrides(overrides: Mapping[str, Any], layout: FamilyLayout, owned: Mapping[str, Any]) -> None:
    if not overrides:
        return
    known, aliases = _known_keys(layout), layout.config_class().attribute_map
    known |= {"head_dim"} if layout.rotary is not None else set()  # which layers read, also where it is not declared
    for key in overrides:
        if key not in known:
            nearest = difflib.get_close_matches(key, sorted(known), n=1)
            hint = f"; did you mean {nearest[0]}?" if nearest else ""
            raise ModelError(f"model.overrides.{key}: {layout.config_class().__name__} has no such key{hint}")
        if aliases.get(key, key) in owned:
            raise ModelError(f"model.overrides.{key}: set it as a key of model itself, not in overrides")


def _build(layout: FamilyLayout, keys: Mapping[str, Any], where: str) -> HfConfig:
    _check_bounds(layout, keys, where)
    from huggingface_hub.errors import StrictDataclassError  # its parent package takes a while to import

    try:
        config = layout.config_class()(**keys)
    except (StrictDataclassError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(f"{where}: transformers refuses this configuration: {one_line(error)}") from error
    _check_sizes(layout, config, where)
    return config


def _check_bounds(layout: FamilyLayout, keys: Mapping[str, Any], where: str) -> None:
    """Refuse sizes that would overflow or exhaust memory before transformers makes lists of that length."""
    names = {key: name for name, key in layout.sizes.items()}
    aliases = layout.config_class().attribute_map
    for key, value in keys.items():
        limit = _MAX_SIZES.get(names.get(aliases.get(key, key), ""), _MAX_SIZE)
        is_size = aliases.get(key, key) in names or key == "head_dim"
        if layout.experts is not None:
            is_size |= key in ("moe_intermediate_size", "shared_expert_intermediate_size")
            if aliases.get(key, key) == aliases.get("num_experts", "num_experts"):
                is_size, limit = True, _MAX_EXPERTS
        if is_size and isinstance(value, int | float) and not value <= limit:
            raise ModelError(f"{where}: {key} must be at most {limit}, got {str(value)[:40]}")


def _check_sizes(layout: FamilyLayout, config: HfConfig, where: str) -> None:
    for name, key in layout.sizes.items():
        size = getattr(config, key)
        if size is not None and (not isinstance(size, int) or size < 1):
            raise ModelError(f"{where}: {name} ({key}) must be a whole number above 0, got {str(size)[:80]!r}")
    heads, kv_heads = config.num_attention_heads, num_kv_heads(config)
    # An explicit head_dim need not divide the hidden size; one derived from it must.
    if config.hidden_size % heads and head_dim(config) == max(1, config.hidden_size // heads):
        raise ModelError(f"{where}: hidden_size {config.hidden_size} is not a multiple of num_heads {heads}")
    if heads % kv_heads:
        raise ModelError(f"{where}: num_heads {heads} is not a multiple of num_kv_heads {kv_heads}")
    if layout.rotary is not None and head_dim(config) % 2:
        raise ModelError(f"{where}: rotary positions need an even number of channels per head, got {head_dim(config)}")
    if layout.experts is not None:
        _check_experts(layout.experts, config, where)
    if getattr(config, "add_cross_attention", False):
        raise ModelError(f"{where}: add_cross_attention is for encoder-decoder models; tahq trains decoders only")


def _check_experts(experts: ExpertLayout, config: HfConfig, where: str) -> None:
    total, taken = config.num_experts, config.num_experts_per_tok
    if not isinstance(total, int) or total < 2:
        raise ModelError(f"{where}: num_experts must be a whole number above 1, got {str(total)[:80]}")
    if not isinstance(taken, int) or not 1 <= taken <= total:
        raise ModelError(f"{where}: num_experts_per_tok must be 1 to num_experts {total}, got {str(taken)[:80]}")
    for key in filter(None, (experts.inner, experts.shared_inner, "decoder_sparse_step")):
        size = getattr(config, key, 1)
        if not isinstance(size, int) or size < 1:
            raise ModelError(f"{where}: {key} must be a whole number above 0, got {str(size)[:80]}")
    if getattr(config, "router_jitter_noise", 0.0):
        raise ModelError(
            f"{where}: router_jitter_noise {config.router_jitter_noise} is noise that would depend on where the model "
            "is cut; set it to 0"
        )
