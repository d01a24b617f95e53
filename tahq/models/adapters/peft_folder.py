"""Adapters as a folder that peft loads: adapter_config.json and adapter_model.safetensors, named as peft names them."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from tahq.models.adapters.config import MAGNITUDE, is_adapter
from tahq.models.adapters.lora import adapted_layers
from tahq.models.export import SavedTokenizer, appearing_whole
from tahq.models.keyed_dropout import RandomContext
from tahq.models.model_spec import ModelSpec
from tahq.models.partition import BlockRange
from tahq.models.slice import ModelSlice

WEIGHTS_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"


def export_adapter(
    spec: ModelSpec,
    read: Callable[[str], torch.Tensor],
    out: Path,
    tokenizer: SavedTokenizer | None,
    base: str | None,
) -> int:
    """Write a folder, new or empty, that `peft.PeftModel.from_pretrained` puts on the model it was trained beside.

    Args:
        spec: the model with its adapter.
        read: canonical name -> an adapter's parameter.
        out: the folder.
        tokenizer: saved into the folder, if there is one.
        base: the model's folder, or ``NAME@COMMIT`` on the Hub; None: its weights were random.

    Returns:
        The number of trained parameters.

    Raises:
        UserError: `out` is not empty.
    """
    model = ModelSlice(spec, BlockRange(0, spec.num_layers, spec.num_layers), RandomContext(0))
    tensors = {_peft_name(name): read(name) for name in filter(is_adapter, model.canonical_parameters())}
    with appearing_whole(out) as folder:
        save_file({name: each.contiguous() for name, each in tensors.items()}, folder / WEIGHTS_FILE, {"format": "pt"})
        text = json.dumps(_config(model, base), indent=2)
        (folder / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")
        if tokenizer is not None:
            tokenizer.save(folder)
    return sum(each.numel() for each in tensors.values())


def _peft_name(name: str) -> str:
    is_magnitude = name.endswith(f"{MAGNITUDE}.weight")
    return f"base_model.model.{name.removesuffix('.weight') if is_magnitude else name}"


def _config(model: ModelSlice, base: str | None) -> dict[str, object]:
    """`LoraConfig` of peft, whose defaults are those of this run where it does not say."""
    adapter, layers = model.spec.adapter, dict(adapted_layers(model))
    assert adapter is not None, "an adapter is exported"
    name, _, revision = (base or "").partition("@")
    ends = {path.rpartition(".")[2] for path in layers}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": name or None,
        "revision": revision or None,
        "inference_mode": True,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": adapter.dropout,
        "target_modules": sorted(ends) if isinstance(adapter.targets, str) else list(adapter.targets),
        "layers_to_transform": adapter.layers,
        "bias": "none",
        "fan_in_fan_out": not all(isinstance(layer, nn.Linear) for layer in layers.values()),
        "use_rslora": adapter.rslora,
        "use_dora": adapter.dora,
    }
