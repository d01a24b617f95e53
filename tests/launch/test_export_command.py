"""`tahq export` over the checkpoints of a real run of two stages."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.runs import Run, finish, tiny, train
from transformers import AutoModelForCausalLM, AutoTokenizer

from tahq.memory.stored_slice import build_slice
from tahq.models.config import ModelConfig
from tahq.models.keyed_dropout import RandomContext
from tahq.models.model_spec import load_spec
from tahq.models.partition import BlockRange

CONFIG = tiny(
    pipeline={"stages": 2},
    training={"steps": 2},
    model={"num_layers": 2, "hidden_size": 32},
    run={"checkpoint_every": 1},
)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    return train(tmp_path_factory.mktemp("run"), CONFIG)


def export(run: Run, out: str, *options: str) -> subprocess.CompletedProcess:
    return finish(run.folder, "tahq", "export", str(run.folder), out, *options)


def trained_logits(run: Run, tokens: torch.Tensor) -> torch.Tensor:
    """What tahq's own model computes with the weights of the newest checkpoint."""
    spec = load_spec(ModelConfig.model_validate(CONFIG["model"]), vocab_size=256, seq_len=CONFIG["data"]["seq_len"])
    whole = BlockRange(0, spec.num_layers, spec.num_layers)
    model = build_slice(spec, whole, seed=0, device="cpu", random=RandomContext(0), weights=False)
    weights, parameters = run.weights, model.canonical_parameters()
    assert weights.keys() == parameters.keys()
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
        return model.eval()(tokens)


@pytest.fixture(scope="module")
def source(run, tmp_path_factory) -> Path:
    """A model with a tied head, generation settings and its own tokenizer."""
    folder = tmp_path_factory.mktemp("source") / "hf"
    assert export(run, str(folder)).returncode == 0
    weights = {
        name: tensor for name, tensor in load_file(folder / "model.safetensors").items() if "lm_head" not in name
    }
    save_file(weights, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    (folder / "generation_config.json").write_text(json.dumps({"max_new_tokens": 5, "eos_token_id": 0}))
    return folder


def test_run_of_a_folder_is_exported_without_that_folder(source, tmp_path):
    here = tmp_path / "model"
    shutil.copytree(source, here)
    config = {
        **tiny(training={"steps": 1}, run={"checkpoint_every": 1}, pipeline={"stages": 1}),
        "model": {"path": "model"},
    }
    config["data"] = {**config["data"], "tokenizer": "model"}
    run = train(tmp_path, config)
    assert "tahq trains embedding and head as two parameters" in run.stdout + run.stderr
    shutil.rmtree(here)
    done = export(run, "out")
    assert (done.returncode, done.stderr) == (0, "")
    assert "note: the model has tie_word_embeddings: true" in done.stdout
    out = run.folder / "out"
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
    assert json.loads((out / "generation_config.json").read_text())["max_new_tokens"] == 5
    assert torch.equal(load_file(out / "model.safetensors")["lm_head.weight"], run.weights["lm_head.weight"])
    assert AutoTokenizer.from_pretrained(out).encode("def", add_special_tokens=False) == list(b"def")

    shutil.rmtree(run.folder / "source")  # as in a run of version 0.1
    done = export(run, "again")
    assert done.returncode == 2
    assert "run tahq export in the directory where the run was started: data.tokenizer: no such folder" in done.stderr
    assert done.stderr.count("\n") == 1


def test_exported_folder_loads_with_the_same_logits_and_a_tokenizer_of_bytes(run, tmp_path):
    assert "after step 1" in export(run, str(tmp_path / "earlier"), "--step", "1").stdout
    done = export(run, str(tmp_path / "hf"), "--shard-size", "20kB")
    assert (done.returncode, done.stderr) == (0, "")
    assert "after step 2" in done.stdout
    assert len(list((tmp_path / "hf").glob("model-*.safetensors"))) > 1
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    assert exported.generation_config.eos_token_id == 0
    tokens = torch.arange(64).reshape(2, 32) + 32
    with torch.no_grad():
        assert torch.equal(exported(tokens).logits, trained_logits(run, tokens))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer.encode("def é", add_special_tokens=False) == list("def é".encode())


@pytest.mark.parametrize(
    ("options", "part"), [(["--step", "7"], "no checkpoint after step 7; it has: 1, 2"), ([], "not an empty folder")]
)
def test_impossible_export_is_one_line(run, tmp_path, options, part):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    done = export(run, str(tmp_path / "full"), *options)
    assert done.returncode == 2
    assert done.stderr.startswith("tahq: ")
    assert done.stderr.count("\n") == 1
    assert part in done.stderr


def test_text_is_continued_from_a_run_and_from_its_export_alike(run):
    assert export(run, "spoken").returncode == 0
    tokenizer = AutoTokenizer.from_pretrained(run.folder / "spoken")
    model = AutoModelForCausalLM.from_pretrained(run.folder / "spoken", dtype="auto")
    ids = model.generate(**tokenizer("def ", return_tensors="pt"), max_new_tokens=8, do_sample=False)
    for source in (run.folder, run.folder / "spoken"):
        done = finish(run.folder, "tahq", "generate", str(source), "def ", "--tokens", "8")
        assert (done.returncode, done.stdout) == (0, tokenizer.decode(ids[0]) + "\n"), done.stderr
    drawn = [
        finish(run.folder, "tahq", "generate", "spoken", "def ", "--tokens", "8", "--temperature", "2", "--seed", seed)
        for seed in ("1", "1", "2")
    ]
    assert drawn[0].stdout == drawn[1].stdout != drawn[2].stdout


@pytest.mark.parametrize(
    ("source", "prompt", "message"),
    [("nowhere", "def", "nowhere is not a run's folder"), ("spoken", "", "the prompt is empty")],
)
def test_without_a_model_or_a_prompt_nothing_is_generated(run, source, prompt, message):
    assert source == "nowhere" or (run.folder / source).exists() or export(run, source).returncode == 0
    done = finish(run.folder, "tahq", "generate", source, prompt)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
