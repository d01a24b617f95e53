import json
import subprocess
import sys

import pytest

from tahq.errors import ModelError
from tahq.models.config import ModelConfig
from tahq.models.families import head_dim
from tahq.models.model_spec import load_spec

from .conftest import FAMILIES, SEQ_LEN, VOCAB_SIZE


def load(seq_len=SEQ_LEN, **keys):
    sizes = {"num_layers": 2, "hidden_size": 32, "num_heads": 4}
    config = ModelConfig(**(keys if "path" in keys else sizes | {"family": "llama"} | keys))
    return load_spec(config, vocab_size=VOCAB_SIZE, seq_len=seq_len)


@pytest.mark.parametrize("family", FAMILIES)
def test_vocabulary_and_length_default_to_those_of_the_data(family):
    spec = load(family=family)
    assert (spec.vocab_size, spec.max_seq_len) == (VOCAB_SIZE, SEQ_LEN)
    assert (spec.num_layers, spec.hidden_size) == (2, 32)
    assert spec.folder is None
    assert spec.tied == (family in ("gpt2", "smollm3", "gemma", "gemma2", "gemma3_text"))
    # ids beyond a small vocabulary would make generation fail after export
    assert spec.hf_config.bos_token_id is None
    assert spec.hf_config.eos_token_id is None


def test_sizes_in_the_configuration_are_used():
    spec = load(num_kv_heads=2, intermediate_size=40, vocab_size=70, max_seq_len=100)
    config = spec.hf_config
    assert (config.num_key_value_heads, config.intermediate_size, config.head_dim) == (2, 40, 8)
    assert (spec.vocab_size, spec.max_seq_len) == (70, 100)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_overrides_reach_the_configuration(family):
    config = load(family=family, overrides={"rms_norm_eps": 1e-3, "tie_word_embeddings": True}).hf_config
    assert config.rms_norm_eps == 1e-3
    assert config.tie_word_embeddings is True


def test_head_dim_reaches_layers_whose_configuration_does_not_declare_it():
    keys = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 16}
    assert head_dim(load(family="qwen3_moe", num_kv_heads=2, overrides=keys).hf_config) == 16
    with pytest.raises(ModelError, match="GPT2Config has no such key"):
        load(family="gpt2", overrides={"head_dim": 16})


def test_sync_ties_a_model_with_random_weights():
    assert load(tie="sync").tied
    with pytest.raises(ModelError, match="tie_word_embeddings: false"):
        load(tie="sync", overrides={"tie_word_embeddings": False})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"seq_len": 65, "max_seq_len": 64}, r"data.seq_len 65 is longer than the model's 64 positions"),
        ({"vocab_size": 40}, r"the tokenizer has 61 tokens, the model's vocabulary 40"),
        ({"hidden_size": 30}, r"model.num_heads 4 does not divide model.hidden_size 30"),
        ({"family": "gpt2", "hidden_size": 30}, r"model.num_heads 4 does not divide model.hidden_size 30"),
        ({"num_kv_heads": 3}, r"model: num_heads 4 is not a multiple of num_kv_heads 3"),
        ({"hidden_size": 4}, r"even"),
        ({"family": "gpt2", "num_kv_heads": 2}, r"gpt2 has as many as num_heads"),
        ({"overrides": {"rms_norm_epz": 1}}, r"LlamaConfig has no such key; did you mean rms_norm_eps"),
        ({"overrides": {"zzz": 1}}, r"model.overrides.zzz: LlamaConfig has no such key$"),
        ({"overrides": {"num_hidden_layers": 1}}, r"set it as a key of model itself"),
        ({"family": "gpt2", "overrides": {"num_hidden_layers": 1}}, r"set it as a key of model itself"),
        ({"overrides": {"hidden_act": 3}}, r"transformers refuses this configuration"),
        ({"family": "gpt2", "overrides": {"add_cross_attention": True}}, r"add_cross_attention"),
        (
            {"family": "qwen2", "overrides": {"layer_types": ["chunked_attention", "full_attention"]}},
            r"block 0 has layer type 'chunked_attention'",
        ),
        ({"family": "qwen2", "overrides": {"layer_types": ["full_attention"]}}, r"refuses this configuration|block 1"),
    ],
)
def test_an_impossible_model_is_refused_in_one_line(keys, message):
    with pytest.raises(ModelError, match=message) as caught:
        load(**keys)
    assert "\n" not in str(caught.value)


def write_config(folder, **keys):
    llama = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    (folder / "config.json").write_text(json.dumps(llama | keys))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model_type": "bert"}, r"model_type 'bert'; tahq trains gpt2, llama, qwen2, qwen3, mistral"),
        ({"model_type": None}, r"model_type None"),
        ({"quantization_config": {"bits": 4}}, r"quantised"),
        ({"hidden_size": 33}, r"config.json"),
        ({"num_hidden_layers": "two"}, r"config.json"),
        ({"num_hidden_layers": 2**40}, r"config.json: num_hidden_layers must be at most 16384, got 1099511627776"),
        ({"vocab_size": 1e300}, r"config.json: vocab_size must be at most 16777216, got 1e\+300"),
        ({"model_type": "gpt2", "n_embd": 2**40}, r"config.json: n_embd must be at most 16777216, got 1099511627776"),
        ({}, r"has no weights: neither model.safetensors nor model.safetensors.index.json"),
    ],
)
def test_a_folder_that_cannot_be_trained_is_refused(keys, message, tmp_path):
    write_config(tmp_path, **keys)
    with pytest.raises(ModelError, match=message) as caught:
        load(path=str(tmp_path))
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_tokenizer_far_smaller_than_the_models_vocabulary_is_refused(tmp_path):
    write_config(tmp_path, vocab_size=1024)
    config = ModelConfig(path=str(tmp_path))
    with pytest.raises(ModelError, match=r"data.tokenizer has 255 tokens, .* trained with up to 1024: remove the key"):
        load_spec(config, vocab_size=255, seq_len=8, needs_weights=False)
    assert load_spec(config, vocab_size=256, seq_len=8, needs_weights=False).vocab_size == 1024


def test_a_path_without_a_model_is_refused(tmp_path):
    for name in ("missing", "a" * 5000):
        with pytest.raises(ModelError, match="is not a folder"):
            load(path=str(tmp_path / name))
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load(path=str(tmp_path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "must hold a JSON object"),
        ("[" * 100_000, "JSON is nested too deeply"),
        (" " * 2**21, "larger than 1,048,576 bytes"),
    ],
)
def test_a_damaged_or_oversized_configuration_file_is_refused(text, message, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=rf"config\.json.*{message}") as caught:
        load(path=str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.acceptance
def test_loading_a_spec_does_not_import_the_layers_of_transformers():
    """The modules of layers take seconds to import; only building a slice may import them."""
    code = (
        "import sys\n"
        "from tahq.models.config import ModelConfig\n"
        "from tahq.models.costs import counted_costs\n"
        "from tahq.models.model_spec import load_spec\n"
        "assert 'transformers' not in sys.modules\n"
        "config = ModelConfig(family='gpt2', num_layers=2, hidden_size=32, num_heads=4)\n"
        "counted_costs(load_spec(config, vocab_size=9, seq_len=8), 8)\n"
        "assert 'transformers.modeling_utils' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
