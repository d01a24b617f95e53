import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from tahq.errors import ModelError, UserError
from tahq.models.config import ModelConfig
from tahq.models.export import export_folder
from tahq.models.model_spec import load_spec

from .conftest import FAMILIES, SEQ_LEN, VOCAB_SIZE, build_all, logits_of, parameters_of


class NamedTokenizer:
    end_of_document = 7

    def save(self, folder):
        (folder / "tokenizer.json").write_text("{}")


def trained(spec):
    """Slices of a model, with a head that has moved away from the embedding."""
    slices = build_all(spec, (0, 2, 4))
    if spec.tie != "sync":
        slices[-1].canonical_parameters()["lm_head.weight"].data.mul_(1.5)
    return slices


def reader_of(slices):
    return parameters_of(slices).__getitem__


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("max_shard_nbytes", [10**9, 15_000])
def test_transformers_loads_an_export_with_equal_logits(family, max_shard_nbytes, tiny_spec, tokens, tmp_path):
    slices = trained(tiny_spec(family))
    export_folder(slices[0].spec, reader_of(slices), tmp_path / "out", NamedTokenizer(), max_shard_nbytes)
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values())
    assert torch.equal(model(tokens).logits, logits_of(slices, tokens))
    sizes = [path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors")]
    assert (len(sizes) > 3) == (max_shard_nbytes == 15_000)
    assert max(sizes) < max_shard_nbytes + 2_000  # header of names and offsets
    assert (tmp_path / "out" / "tokenizer.json").exists()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["tie_word_embeddings"], config["eos_token_id"]) == (False, 7)
    assert model.generation_config.eos_token_id == 7


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_matrices_are_exported_in_bf16(family, tiny_spec, tokens, tmp_path):
    spec, bf16 = tiny_spec(family), torch.bfloat16
    slices = build_all(spec, matrices=bf16)
    export_folder(spec, reader_of(slices), tmp_path / "out", None, 15_000, matrices=bf16)
    exact = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert torch.equal(exact(tokens).logits, logits_of(slices, tokens))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert {parameter.dtype for parameter in model.parameters()} == {bf16}
    nbytes = sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors"))
    assert nbytes < 1.2 * sum(weight.nbytes for weight in parameters_of(slices).values())


def test_an_export_can_be_loaded_again_for_training(tiny_spec, tokens, tmp_path):
    slices = trained(tiny_spec("gpt2"))
    export_folder(slices[0].spec, reader_of(slices), tmp_path / "out", None, 15_000)
    spec = load_spec(ModelConfig(path=str(tmp_path / "out")), vocab_size=VOCAB_SIZE, seq_len=SEQ_LEN)
    assert not spec.tied
    assert torch.equal(logits_of(build_all(spec), tokens), logits_of(slices, tokens))


def test_a_synced_head_is_exported_tied(tiny_spec, tokens, tmp_path):
    slices = trained(tiny_spec("llama", tie="sync"))
    export_folder(slices[0].spec, reader_of(slices), tmp_path / "out", None)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model(tokens).logits, logits_of(slices, tokens))


def test_a_folder_in_use_is_left_alone(tiny_spec, tmp_path):
    (tmp_path / "precious").write_text("data")
    with pytest.raises(UserError, match="not an empty folder"):
        export_folder(tiny_spec("gpt2"), {}.__getitem__, tmp_path, None)
    with pytest.raises(UserError, match="not an empty folder"):
        export_folder(tiny_spec("gpt2"), {}.__getitem__, tmp_path / "precious", None)
    assert (tmp_path / "precious").read_text() == "data"


@pytest.mark.parametrize(
    ("wrong", "error"), [({}, KeyError), ({"lm_head.weight": torch.ones(2, 2)}, ModelError)], ids=["missing", "shape"]
)
def test_an_export_that_fails_leaves_nothing(wrong, error, tiny_spec, tmp_path):
    slices = trained(tiny_spec("llama"))
    tensors = parameters_of(slices)
    del tensors["lm_head.weight"]
    with pytest.raises(error, match=r"lm_head\.weight"):
        export_folder(slices[0].spec, (tensors | wrong).__getitem__, tmp_path / "out", None, 15_000)
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_folder_is_a_user_error(tiny_spec, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        export_folder(tiny_spec("gpt2"), {}.__getitem__, tmp_path / "file" / "out", None)
