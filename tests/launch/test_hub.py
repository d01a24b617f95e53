"""Models by their names on the Hub, from a server on loopback that speaks its protocol."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.hub_server import COMMIT, HubServer, serving
from support.runs import Run, command, environment, tiny, train, write_config
from transformers import LlamaConfig, LlamaForCausalLM

from tahq.config.cluster import ClusterConfig
from tahq_launch.start.local_checks import check_stage

NAME = "owner/tiny-llama"


def save_model(folder: Path, vocab_size: int) -> dict[str, str]:
    """A Llama of four blocks in several files; the file of each tensor."""
    sizes = {"vocab_size": vocab_size, "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 64}
    config = LlamaConfig(**sizes, num_hidden_layers=4, num_attention_heads=4)
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="60KB")
    return json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]


@pytest.fixture
def hub(tmp_path) -> Iterator[HubServer]:
    """A server with a small Llama in several files, and the environment in which it is the Hub."""
    save_model(tmp_path / "model", 256)
    with serving({NAME: tmp_path / "model"}) as server:
        yield server


def config_of(model: str) -> dict:
    config = tiny(run={"name": "hub"}, data={"tokenizer": "bytes"}, training={"steps": 2}, pipeline={"stages": 2})
    return config | {"model": model}


def environment_of(tmp_path: Path, server: HubServer, **changes: str) -> dict[str, str]:
    """Of a process of its own: huggingface_hub reads its settings when it is imported."""
    settings = {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_DISABLE_XET": "1"}
    return environment() | settings | changes


def run_in(tmp_path: Path, server: HubServer, model: str, *arguments: str, **changes: str) -> Run:
    folder = tmp_path / "here"
    folder.mkdir(exist_ok=True)
    write_config(folder, config_of(model))
    done = subprocess.run(
        [command("tahq-launch"), "cluster.yaml", *arguments],
        cwd=folder,
        env=environment_of(tmp_path, server, **changes),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return Run(folder / "runs" / "hub", done.returncode, done.stdout, done.stderr)


def test_model_by_name_trains_as_from_its_folder_at_the_commit_of_the_start_and_again_without_the_hub(tmp_path, hub):
    run = run_in(tmp_path, hub, NAME)
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"path: {NAME}@{COMMIT}" in (run.folder / "config.yaml").read_text()
    files = {file.name for file in (tmp_path / "model").glob("*.safetensors")}
    assert sorted(file for file, _ in hub.fetched if file.endswith(".safetensors")) == sorted(files)
    (tmp_path / "local").mkdir()
    local = train(tmp_path / "local", config_of("../model"))
    assert run.losses == local.losses

    hub.fetched.clear()
    again = run_in(tmp_path, hub, NAME, "--set", "run.name=again", HF_HUB_OFFLINE="1")
    assert again.returncode == 0, again.stdout + again.stderr
    assert hub.fetched == []


@pytest.mark.acceptance
def test_records_by_name_train_as_from_their_files_at_the_commit_of_the_start(tmp_path, hub):
    pairs = "".join(json.dumps({"prompt": f"{n} + 1 = ", "response": f"{n + 1}"}) + "\n" for n in range(40))
    hub.datasets["owner/sums"] = tmp_path / "sums"
    (tmp_path / "sums").mkdir()
    (tmp_path / "sums" / "train.jsonl").write_text(pairs)
    records = ("--set", "data.text=null", "--set", "data.records=owner/sums")
    run = run_in(tmp_path, hub, NAME, *records)
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"records: owner/sums@{COMMIT}" in (run.folder / "config.yaml").read_text()
    assert [name for name, _ in hub.fetched].count("train.jsonl") == 1
    local = tmp_path / "local"
    local.mkdir()
    (local / "pairs.jsonl").write_text(pairs)
    config = config_of("../model")
    assert (
        run.losses == train(local, config | {"data": {**config["data"], "text": None, "jsonl": "pairs.jsonl"}}).losses
    )


FETCHING = """
import json, sys
from tahq.hub import pinned
from tahq.models.config import ModelConfig
from tahq.models.model_spec import load_spec
from tahq.models.partition import BlockRange
from tahq.models.slice import slice_parameters
from tahq.models.weights import FolderWeights
path = pinned(sys.argv[1])
spec = load_spec(ModelConfig(path=path), vocab_size=1, seq_len=32)
names = [*slice_parameters(spec, BlockRange(0, 1, 4))]
told = []
FolderWeights.find(path, spec.layout).fetch(names, lambda *each: told.append(each))
print(json.dumps([names, told]))
"""


@pytest.mark.acceptance
def test_interrupted_download_goes_on_and_a_stage_needs_the_files_of_its_layers_only(tmp_path, hub):
    index = save_model(tmp_path / "large", 60_000)
    hub.models["owner/large"] = tmp_path / "large"
    hub.most_nbytes = 12_000_000  # of the embedding's 15 MB, and huggingface_hub keeps pieces of 10 MiB
    program = [sys.executable, "-c", FETCHING, "owner/large"]
    done = subprocess.run(program, env=environment_of(tmp_path, hub), capture_output=True, text=True, check=True)
    names, told = json.loads(done.stdout)
    fetched = [each for each in hub.fetched if each[0].endswith(".safetensors")]
    assert {file for file, _ in fetched} == {index[name] for name in names} < set(index.values())
    assert [first for _, first in fetched if first] == [10 * 2**20]
    assert told
    assert all(0 < bytes_done <= whole for _, bytes_done, whole in told)


def test_folder_that_is_missing_on_a_host_is_not_looked_for_on_the_hub():
    (missing,) = check_stage(ClusterConfig.model_validate(config_of("models/tiny")), 0, reads_data=False)
    assert str(missing).startswith("model.path: no such folder: models/tiny ")


@pytest.mark.ci
@pytest.mark.parametrize(
    ("model", "part"),
    [
        (
            "owner/nothing",
            "is no folder here, and the Hub has no such model, or a private one, which needs `hf auth login`",
        ),
        *(
            pytest.param(*each, marks=pytest.mark.acceptance)
            for each in (
                (f"{NAME}@other", "the Hub has no such revision of this model"),
                ("owner/gated", "only to users who have accepted its licence there; then `hf auth login`"),
                ("owner/pickled", "has no safetensors; pickled weights are never opened"),
            )
        ),
    ],
)
def test_what_the_hub_does_not_give_is_one_line(tmp_path, hub, model, part):
    hub.gated.add("owner/gated")
    hub.models["owner/gated"] = tmp_path / "model"
    hub.models["owner/pickled"] = tmp_path / "pickled"
    (tmp_path / "pickled").mkdir()
    shutil.copyfile(tmp_path / "model" / "config.json", tmp_path / "pickled" / "config.json")
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(b"not opened")
    run = run_in(tmp_path, hub, model, "--dry-run")
    assert (run.returncode, run.stderr.count("\n")) == (2, 1), run.stderr
    assert part in run.stderr


@pytest.mark.ci
def test_hub_that_cannot_be_reached_is_one_line(tmp_path, hub):
    hub.close()
    run = run_in(tmp_path, hub, NAME, "--dry-run")
    assert (run.returncode, run.stderr.count("\n")) == (2, 1), run.stderr
    assert f"model.path {NAME} is no folder here, nor in the cache, and the Hub cannot be reached" in run.stderr
