"""A configuration as JSON for workers and as YAML for people: canonical, exact, refused in one line; and resolved."""

import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cluster_files import EXAMPLES

from tahq.config.cluster import ClusterConfig
from tahq.config.file import config_from_json, config_hash, config_json, dump_yaml, load_config, resolve
from tahq.errors import ConfigError

EXAMPLE = load_config(EXAMPLES / "gpt2.yaml")


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.yaml")), ids=lambda path: path.stem)
def test_example_loads_and_survives_json_and_yaml(path, tmp_path):
    for config in (load_config(path), resolve(load_config(path))):
        assert config_from_json(config_json(config)) == config
        (tmp_path / "config.yaml").write_text(dump_yaml(config), encoding="utf-8")
        again = load_config(tmp_path / "config.yaml")
        assert again == config
        assert config_hash(again) == config_hash(config)


def test_equal_configurations_have_equal_canonical_json_and_others_another_hash(tmp_path):
    path = tmp_path / "other.yaml"
    path.write_text(
        "hosts: local\nemulate:\n  delay: 0.02s\n  rate: 0.1gbit\npipeline: {stages: 4}\n"
        "training: {micro_batch: 4, global_batch: 32, steps: 60, lr: 0.001}\ndata: {text: stdlib}\n"
        "model: {num_heads: 8, hidden_size: 256, num_layers: 8, family: gpt2}\nrun: {name: gpt2}\n"
        "wire: {gradients: 'fixed:bits=8', activations: tah}\n"
    )
    text = config_json(load_config(path))
    assert text == config_json(EXAMPLE) == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))
    assert text.isascii()
    overrides = ("run.seed=0", "run.seed=1", "training.lr=0.002", "wire.gradients=raw", "data.shuffle=false")
    hashes = {config_hash(load_config(EXAMPLES / "gpt2.yaml", [override])) for override in overrides}
    assert len(hashes) == 5
    assert config_hash(EXAMPLE) in hashes


def test_yaml_for_people_has_units():
    text = dump_yaml(load_config(EXAMPLES / "gpt2.yaml", ["run.copy_rate=5mbit"]))
    for line in ("rate: 100mbit", "delay: 20ms", "piece: 256kib", "peer_timeout: 10s", "copy_rate: 5mbit"):
        assert f"  {line}\n" in text
    assert "!!" not in text


NAMES = st.text(min_size=1, max_size=12).filter(lambda text: text.isprintable())


@settings(max_examples=30)
@given(
    text=st.one_of(NAMES, st.sampled_from(["null", "1e-3", "no", "012", "~", "true", "- a", "a: b", "#", "'", "{"])),
    rate=st.floats(1e6, 1e12),
    delay=st.floats(0, 1),
    number=st.floats(1e-12, 1e3),
)
def test_any_value_survives_json_and_yaml(tmp_path_factory, text, rate, delay, number):
    base = EXAMPLE.model_dump()
    base["data"]["text"] = [text]
    base["emulate"] = {"rate": rate, "delay": delay}
    base["training"]["lr"] = number
    base["model"]["overrides"] = {"some_key": [number, text, None, True, 3]}
    config = ClusterConfig.model_validate(base)
    assert config_from_json(config_json(config)) == config
    path = tmp_path_factory.getbasetemp() / "round.yaml"
    path.write_text(dump_yaml(config), encoding="utf-8")
    assert load_config(path) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (config_json(EXAMPLE).replace('"lr":0.001', '"lr":NaN'), "training.lr: expected a finite number; got nan"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "the top level: expected keys and values; got a list of 0"),
        ("{}", "model is missing; a run needs this section (and 1 more: data); do both ends run the same"),
        (config_json(EXAMPLE).replace('"rate":100000000.0', '"rate":100'), "emulate.rate: a rate needs a unit"),
    ],
)
def test_json_that_is_not_a_configuration_is_refused_in_one_line(text, message):
    with pytest.raises(ConfigError, match=r"^the configuration received as JSON.*$") as caught:
        config_from_json(text)
    assert message in str(caught.value)


@pytest.mark.parametrize("wire", [[], ["wire=paper"]])
def test_resolving_writes_out_codecs(wire):
    config = resolve(load_config(EXAMPLES / "gpt2.yaml", wire))
    assert config.wire.activations == "tah:group=64,int4=0.8,tau=2,low=3,high=4"
    assert config.wire.gradients == "fixed:bits=8,group=64,round=nearest"
    assert "  backend: auto\n  threads: 1\n" in dump_yaml(config)
    assert resolve(config) == config


@pytest.mark.parametrize(("num_cores", "threads"), [(9, 2), (1, 1)])
def test_resolving_divides_the_cores_of_this_machine_only(monkeypatch, num_cores, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(num_cores)))
    assert (EXAMPLE.run.threads, resolve(EXAMPLE).run.threads) == (None, threads)
    assert resolve(load_config(EXAMPLES / "gpt2.yaml", ["run.threads=7"])).run.threads == 7
    assert resolve(load_config(EXAMPLES / "llama_remote.yaml")).run.threads is None
