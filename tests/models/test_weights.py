"""Loading from folders that transformers itself wrote, and refusing folders that do not fit."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tahq.errors import ModelError
from tahq.models.config import ModelConfig
from tahq.models.model_spec import load_spec

from .conftest import FAMILIES, SEQ_LEN, VOCAB_SIZE, build_all, logits_of, whole_model


@pytest.fixture
def model_folder(tiny_spec, tmp_path):
    """A folder with transformers' own random model, and that model."""

    def make(family, *, tie=None, **save):
        spec = tiny_spec(family)
        if tie is not None:
            spec.hf_config.tie_word_embeddings = tie
        torch.manual_seed(3)
        model = whole_model(spec)
        folder = tmp_path / family
        model.save_pretrained(folder, **save)
        return folder, model

    return make


def load_parts(folder, bounds=(0, 2, 4)):
    return build_all(load_spec(ModelConfig(path=str(folder)), vocab_size=VOCAB_SIZE, seq_len=SEQ_LEN), bounds)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("tie", "max_shard_size"), [(False, "5GB"), (True, "20KB")])
def test_logits_of_a_loaded_folder_equal_transformers(family, tie, max_shard_size, model_folder, tokens):
    folder, model = model_folder(family, tie=tie, max_shard_size=max_shard_size)
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (max_shard_size == "20KB")
    assert torch.equal(logits_of(load_parts(folder), tokens), model.eval()(tokens).logits)


def test_names_without_the_trunk_are_found(model_folder, tokens):
    folder, model = model_folder("gpt2")
    stored = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in stored.items()}
    bare["h.0.attn.bias"] = torch.ones(2, 2)  # old files hold causal masks too, which no stage needs
    save_file(bare, folder / "model.safetensors")
    assert torch.equal(logits_of(load_parts(folder), tokens), model.eval()(tokens).logits)


def test_half_precision_becomes_fp32_masters_in_their_own_memory(model_folder):
    folder, model = model_folder("llama")
    model.to(torch.bfloat16).save_pretrained(folder)
    (part,) = load_parts(folder, (0, 4))
    expected = model.state_dict()
    for name, parameter in part.canonical_parameters().items():
        assert parameter.dtype == torch.float32
        assert parameter.data_ptr() % 16 == 0
        assert torch.equal(parameter, expected[name].float())


def test_only_the_shards_that_a_slice_owns_are_opened(model_folder):
    folder, _ = model_folder("llama", max_shard_size="20KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    owned = {file for name, file in index.items() if ".layers.1." in name}
    for path in folder.glob("*.safetensors"):
        if path.name not in owned:
            path.write_bytes(b"not a safetensors file")
    (part,) = load_parts(folder, (1, 2))
    assert len(part.canonical_parameters()) == 9
    with pytest.raises(ModelError, match="not a readable safetensors file"):
        load_parts(folder, (2, 3))


NAME = "model.layers.3.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda stored: stored.pop(NAME), rf"has no tensor {NAME}"),
        (
            lambda stored: stored.update({NAME: torch.zeros(3, 5)}),
            r"has shape \[3, 5\], config.json expects \[48, 32\]",
        ),
        (lambda stored: stored.update({NAME: torch.zeros(48, 32, dtype=torch.int8)}), r"is torch.int8"),
        (lambda stored: stored.pop("lm_head.weight"), r"has no tensor lm_head.weight"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_the_stage_that_owns_them(change, message, model_folder):
    folder, _ = model_folder("llama")
    stored = load_file(folder / "model.safetensors")
    change(stored)
    save_file(stored, folder / "model.safetensors")
    load_parts(folder, (0, 3))
    with pytest.raises(ModelError, match=message) as caught:
        load_parts(folder, (3, 4))
    assert str(folder) in str(caught.value)


def test_pickled_weights_are_never_opened(model_folder):
    folder, _ = model_folder("llama")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="convert them to safetensors"):
        load_parts(folder)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "is not an index"),
        ("{}", "is not an index"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "names gone.safetensors"),
        ('{"weight_map": {"a": "../config.json"}}', "names ../config.json"),
    ],
)
def test_a_damaged_index_is_refused(index, message, model_folder):
    folder, _ = model_folder("llama")
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match=message):
        load_parts(folder)
