"""A file with model and data alone: measured, planned and trained; again, from its config.yaml, and resumed."""

import re

import pytest
import yaml
from support.runs import launch, train

MINIMAL = {
    "run": {"name": "first", "threads": 1},
    "model": {"family": "gpt2", "num_layers": 4, "hidden_size": 64, "num_heads": 2},
    "data": {"text": "stdlib", "seq_len": 32},
    "training": {"steps": 3, "global_batch": 8},
    "pipeline": {"stages": 2},
}


def named(values, name):
    return values | {"run": values["run"] | {"name": name}}


@pytest.mark.ci
def test_run_is_planned_once_and_repeated_to_the_bit(tmp_path, monkeypatch):
    monkeypatch.setenv("TAHQ_CACHE", str(tmp_path / "cache"))
    dry = launch(tmp_path, named(MINIMAL, "dry"), "--dry-run")
    assert dry.stdout.startswith("not measured yet: ")

    first = train(tmp_path, MINIMAL)
    losses = first.losses
    assert re.search("measuring compute.*planned for", first.stdout, re.DOTALL)
    config = yaml.safe_load((first.folder / "config.yaml").read_text())
    assert sum(config["pipeline"]["layers"]) == 4
    assert config["pipeline"]["first"]["schedule"] in first.stdout

    (cached,) = tmp_path.glob("cache/measured/*.yaml")
    cached.write_text(re.sub("memory: .*", "memory: 1MB", cached.read_text()))  # all that was free then
    assert "has the memory" in launch(tmp_path, named(MINIMAL, "dry"), "--dry-run").stderr
    second = train(tmp_path, named(MINIMAL, "second"))
    assert "measuring compute" not in second.stdout
    assert re.search(r"measured less than a minute ago \(.*\), free memory just now", second.stdout)
    assert second.losses == losses

    assert "encode_per_element" not in cached.read_text()
    slow = named(MINIMAL, "slow") | {"emulate": {"rate": "1mbit"}, "training": {"steps": 1, "global_batch": 8}}
    for run, is_measured in (("slow", True), ("slower", False)):
        found = train(tmp_path, named(slow, run)).stdout
        assert ("measuring codecs of stages 0, 1" in found) == is_measured
        assert "measuring compute" not in found
        assert re.search("codecs (wf|tah|fixed)", found)
    assert "encode_per_element" in cached.read_text()

    third = train(tmp_path / "third", named(config, "third"))
    assert "planned for" not in third.stdout
    assert third.losses == losses

    resumed = train(tmp_path, MINIMAL | {"training": MINIMAL["training"] | {"steps": 5}}, "--resume")
    assert "planned for" not in resumed.stdout
    assert resumed.losses[:3] == losses
    kept = yaml.safe_load((first.folder / "config.yaml").read_text())
    assert kept["pipeline"] == config["pipeline"]
    assert kept["training"]["micro_batch"] == config["training"]["micro_batch"]
