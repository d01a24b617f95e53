"""The transformers configuration of a model: from sizes in cluster.yaml, or from a folder's config.json.

Whatever transformers would refuse with a traceback is refused here in one line.
"""

import difflib
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tahq.errors import ModelError
from tahq.models.config import ModelConfig
from tahq.models.families import FAMILIES, FamilyLayout, HfConfig, head_dim, num_kv_heads


def one_line(error: BaseException) -> str:
    """A library's message without its line breaks, under its kind."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def config_from_sizes(config: ModelConfig, *, vocab_size: int, seq_len: int) -> tuple[FamilyLayout, HfConfig]:
    """The transformers configuration of a model with random weights.

    Where `config` is silent: keys and values have as many heads as queries, the inner size is 4 ·
    hidden (GPT-2) or 8/3 · hidden rounded up to a multiple of 64 (the others), the vocabulary is
    the tokenizer's and the longest sequence is the data's.

    Raises:
        ModelError: sizes that do not fit each other, or an override that is unknown or not allowed.
    """
    assert config.family is not None, "ModelConfig asks for a family where there is no path"
    layout = FAMILIES[config.family]
    keys = _size_keys(config, layout, vocab_size, seq_len)
    _check_overrides(config.overrides, layout, owned=keys)
    keys |= dict.fromkeys(layout.dropouts, config.dropout)
    keys |= {"tie_word_embeddings": True} if config.tie == "sync" else {}
    keys |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return layout, _build(layout, keys | dict(config.overrides), where="model")


def config_from_folder(config: ModelConfig, folder: Path) -> tuple[FamilyLayout, HfConfig]:
    """The transformers configuration of the model in `folder`, with `overrides` and the dropout of `config`.

    The folder's own dropout is not used: `model.dropout` says it for every model.

    Raises:
        ModelError: no folder, no config.json, a family or a quantisation that tahq does not train.
    """
    keys = _read_config_json(folder)
    layout = FAMILIES.get(str(keys.get("model_type")))
    if layout is None:
        known = ", ".join(FAMILIES)
        raise ModelError(f"{folder}/config.json has model_type {keys.get('model_type')!r}; tahq trains {known}")
    if "quantization_config" in keys:
        raise ModelError(f"{folder} holds quantised weights; training needs the model in fp32, bf16 or fp16")
    _check_overrides(config.overrides, layout, owned={})
    keys |= dict.fromkeys(layout.dropouts, config.dropout)
    return layout, _build(layout, keys | dict(config.overrides), where=f"{folder}/config.json")


def _size_keys(config: ModelConfig, layout: FamilyLayout, vocab_size: int, seq_len: int) -> dict[str, Any]:
    sizes: dict[str, Any] = {
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads or config.num_heads,
        "intermediate_size": config.intermediate_size or _inner_size(config, layout),
        "vocab_size": config.vocab_size or vocab_size,
        "max_seq_len": config.max_seq_len or seq_len,
    }
    if "num_kv_heads" not in layout.sizes and config.num_kv_heads not in (None, config.num_heads):
        raise ModelError(f"model.num_kv_heads {config.num_kv_heads}: {layout.name} has as many as num_heads; remove it")
    if sizes["num_heads"] % sizes["num_kv_heads"]:
        raise ModelError(f"model.num_kv_heads {config.num_kv_heads} does not divide model.num_heads {config.num_heads}")
    keys = {layout.sizes[name]: value for name, value in sizes.items() if name in layout.sizes}
    if "head_dim" not in config.overrides:
        channels = _channels_a_head(config)
        keys |= {"head_dim": channels} if "head_dim" in _known_keys(layout) else {}
    return keys


def _channels_a_head(config: ModelConfig) -> int:
    assert config.hidden_size is not None, "ModelConfig asks for the sizes where there is no path"
    assert config.num_heads is not None, "ModelConfig asks for the sizes where there is no path"
    if config.hidden_size % config.num_heads:
        raise ModelError(f"model.num_heads {config.num_heads} does not divide model.hidden_size {config.hidden_size}")
    return config.hidden_size // config.num_heads


def _inner_size(config: ModelConfig, layout: FamilyLayout) -> int:
    assert config.hidden_size is not None, "ModelConfig asks for the sizes where there is no path"
    if layout.rotary is None:
        return 4 * config.hidden_size
    return -(-8 * config.hidden_size // (3 * 64)) * 64


def _known_keys(layout: FamilyLayout) -> set[str]:
    """Keys that the family's configuration declares, transformers' own spellings included."""
    config_class = layout.config_class()
    declared = set(inspect.signature(config_class.__init__).parameters) - {"self", "kwargs"}
    return declared | set(config_class.attribute_map) | {"tie_word_embeddings", "rope_parameters"}


def _read_config_json(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise ModelError(f"model.path {folder} is not a folder; tahq reads local folders, so download the model first")
    path = folder / "config.json"
    try:
        keys = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{folder} has no config.json; model.path needs config.json and safetensors") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {one_line(error)}") from error
    if not isinstance(keys, dict):
        raise ModelError(f"{path} must hold a JSON object, it holds a {type(keys).__name__}")
    return keys


def _check_overrides(overrides: Mapping[str, Any], layout: FamilyLayout, owned: Mapping[str, Any]) -> None:
    if not overrides:
        return
    known, aliases = _known_keys(layout), layout.config_class().attribute_map
    for key in overrides:
        if key not in known:
            nearest = difflib.get_close_matches(key, sorted(known), n=1)
            hint = f"; did you mean {nearest[0]}?" if nearest else ""
            raise ModelError(f"model.overrides.{key}: {layout.class_prefix}Config has no such key{hint}")
        if aliases.get(key, key) in owned:
            raise ModelError(f"model.overrides.{key}: give it as a key of model itself, beside overrides")


def _build(layout: FamilyLayout, keys: dict[str, Any], where: str) -> HfConfig:
    config_class = layout.config_class()
    from huggingface_hub.errors import StrictDataclassError  # its parent package takes a while to import

    try:
        config = config_class(**keys)
    except (StrictDataclassError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(f"{where}: transformers refuses this configuration: {one_line(error)}") from error
    _check_sizes(layout, config, where)
    return config


def _check_sizes(layout: FamilyLayout, config: HfConfig, where: str) -> None:
    for name, key in layout.sizes.items():
        size = getattr(config, key)
        if size is not None and (not isinstance(size, int) or size < 1):
            raise ModelError(f"{where}: {name} ({key}) must be a whole number above 0, got {size!r}")
    heads, kv_heads = config.num_attention_heads, num_kv_heads(config)
    # An own head_dim need not divide the hidden size; one that was derived from it must.
    if config.hidden_size % heads and head_dim(config) == max(1, config.hidden_size // heads):
        raise ModelError(f"{where}: hidden_size {config.hidden_size} is not a multiple of num_heads {heads}")
    if heads % kv_heads:
        raise ModelError(f"{where}: num_heads {heads} is not a multiple of num_kv_heads {kv_heads}")
    if layout.rotary is not None and head_dim(config) % 2:
        raise ModelError(f"{where}: rotary positions need an even number of channels a head, got {head_dim(config)}")
    if getattr(config, "add_cross_attention", False):
        raise ModelError(f"{where}: add_cross_attention is for encoder-decoder models; tahq trains decoders alone")
