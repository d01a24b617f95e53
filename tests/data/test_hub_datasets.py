"""Datasets by their names on the Hub, from a server on loopback that speaks its protocol."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.hub_server import COMMIT, HubServer, serving

slow = pytest.mark.acceptance

FOUND = """
import sys
from tahq.data.config import DataConfig
from tahq.data.dataset import load_dataset
from tahq.data.tokenizer import load_tokenizer
from tahq.errors import DataError
from tahq.hub import pinned
split, subset = (word or None for word in sys.argv[2:])
try:
    config = DataConfig(records=pinned(sys.argv[1], "dataset"), split=split, subset=subset, seq_len=16, validation=0.0)
    dataset = load_dataset(config, load_tokenizer(config))
    rows = dataset.gather(range(dataset.num_train_samples))[0]
    print(config.records, *(bytes(row.astype("uint8")).split(b"!")[0].decode() for row in rows))
except DataError as error:
    print(error)
"""
VALIDATED = """
import json, sys
from tahq.config.cluster import ClusterConfig
from tahq.data.dataset import load_dataset, load_validation
from tahq.data.tokenizer import load_tokenizer
from tahq.errors import DataError
from tahq_launch.start.local_checks import check_stage, files_needed
from tahq_launch.start.resolution import resolve_for_run
try:
    data = {"records": "named/train.jsonl", "seq_len": 32, "validation": json.loads(sys.argv[1])}
    model = {"family": "gpt2", "num_layers": 2, "hidden_size": 32, "num_heads": 2}
    config = resolve_for_run(ClusterConfig.model_validate({"model": model, "data": data, "training": {"steps": 1}}))
    tokenizer = load_tokenizer(config.data)
    for each in load_validation(config.data, load_dataset(config.data, tokenizer), tokenizer):
        rows = each.dataset.gather(range(each.num_samples))[0]
        print(each.name, *(bytes(row.astype("uint8")).split(b"!")[0].decode() for row in rows))
    print(sorted(files_needed(config)), *check_stage(config, 0, reads_data=True), config.data.validation)
except DataError as error:
    print(error)
"""
LISTED = """---
license: mit
configs:
- config_name: main
  data_files:
  - {split: train, path: "main/train-*"}
  - {split: test, path: [main/questions.jsonl]}
- config_name: socratic
  data_files: socratic/*
---
# A dataset
"""


def write(folder: Path, *names: str) -> None:
    """Files of a record each, whose prompt is the file's place without its ending."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"prompt": name.removesuffix(".jsonl"), "response": "!"}) + "\n")


@pytest.fixture
def hub(tmp_path) -> Iterator[HubServer]:
    write(tmp_path / "listed", "main/train-0.jsonl", "main/train-1.jsonl", "main/questions.jsonl", "socratic/a.jsonl")
    (tmp_path / "listed" / "README.md").write_text(LISTED)
    write(tmp_path / "named", "train.jsonl", "test.jsonl", "validation.jsonl")
    write(tmp_path / "plain", "chats.jsonl", "latest.jsonl", "test.jsonl")
    (tmp_path / "plain" / "notes.csv").write_text("not read")
    folders = {f"owner/{name}": tmp_path / name for name in ("listed", "named", "plain")}
    with serving({}, folders) as server:
        yield server


def found(tmp_path: Path, server: HubServer, name: str, split: str = "", subset: str = "", **changes: str) -> str:
    """What a process of its own says: huggingface_hub reads its settings when it is imported."""
    return said(tmp_path, server, FOUND, name, split, subset, **changes)


def said(tmp_path: Path, server: HubServer, program: str, *arguments: str, **changes: str) -> str:
    settings = {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_DISABLE_XET": "1"}
    command, environment = [sys.executable, "-c", program, *arguments], {**os.environ, **settings, **changes}
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout


@pytest.mark.acceptance
def test_validation_set_on_the_hub_is_its_split_validation_at_the_commit_of_the_start(tmp_path, hub):
    out = said(tmp_path, hub, VALIDATED, json.dumps({"far": "owner/named", "own": 0.0, "here": "named/test.jsonl"}))
    assert out == (
        "far validation\nhere test\n['data.records', 'data.validation.here'] "
        f"{{'far': 'owner/named@{COMMIT}', 'own': 0.0, 'here': 'named/test.jsonl'}}\n"
    )
    out = said(tmp_path, hub, VALIDATED, json.dumps({"far": "owner/none"}))
    assert out.startswith("data.validation.far owner/none is no path here")
    out = said(tmp_path, hub, VALIDATED, json.dumps("owner/plain@main"))
    assert out.startswith(f"data.validation owner/plain@{COMMIT} has no file of the split validation")


def test_records_are_those_of_the_split_at_the_commit_of_the_start_and_again_without_the_hub(tmp_path, hub):
    expected = f"owner/named@{COMMIT} train\n"
    assert found(tmp_path, hub, "owner/named") == expected
    assert [name for name, _ in hub.fetched] == ["train.jsonl"]
    hub.fetched.clear()
    assert found(tmp_path, hub, "owner/named", HF_HUB_OFFLINE="1") == expected
    assert hub.fetched == []
    refused = found(tmp_path, hub, "owner/named", "test", HF_HUB_OFFLINE="1")
    assert "nor in the cache, and the Hub cannot be reached" in refused


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "split", "subset", "expected"),
    [
        ("owner/listed", "", "main", f"owner/listed@{COMMIT} main/train-0 main/train-1\n"),
        pytest.param("owner/listed", "test", "main", f"owner/listed@{COMMIT} main/questions\n", marks=slow),
        pytest.param("owner/listed@main", "", "socratic", f"owner/listed@{COMMIT} socratic/a\n", marks=slow),
        ("owner/listed", "", "", "has the subsets main, socratic; set data.subset to one of them"),
        ("owner/listed", "dev", "main", "has the splits train, test; set data.split to one of them"),
        ("owner/plain", "", "", f"owner/plain@{COMMIT} chats latest\n"),
        ("owner/plain", "valid", "", "has no file of the split valid that ends with .jsonl, .json, .parquet, .arrow"),
        ("owner/none", "", "", "and the Hub has no such dataset, or a private one, which needs `hf auth login`"),
        ("owner/named@other", "", "", "the Hub has no such revision of this dataset"),
        pytest.param("owner/none.jsonl", "", "", "data.records: no such file or folder: owner/none.jsonl", marks=slow),
    ],
)
def test_files_of_a_split_are_those_that_the_readme_lists_or_that_have_its_name(
    tmp_path, hub, name, split, subset, expected
):
    assert expected in found(tmp_path, hub, name, split, subset)
