"""A configuration as JSON for workers and as YAML for people: canonical, exact, refused in one line."""

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
ALL = sorted(EXAMPLES.glob("*.yaml"))


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_configuration_survives_json_and_yaml(path, tmp_path):
    for config in (load_config(path), resolve(load_config(path))):
        assert config_from_json(config_json(config)) == config
        written = tmp_path / "config.yaml"
        written.write_text(dump_yaml(config), encoding="utf-8")
        again = load_config(written)
        assert again == config
        assert config_hash(again) == config_hash(config)


def test_json_is_canonical():
    text = config_json(EXAMPLE)
    assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))
    assert text.isascii()
    assert '"rate":100000000.0' in text
    assert '"delay":0.02' in text


def test_equal_configurations_written_differently_have_equal_hashes(tmp_path):
    path = tmp_path / "other.yaml"
    path.write_text(
        "hosts: local\nlinks:\n  delay: 0.02s\n  rate: 0.1gbit\npipeline: {schedule: 1f1b}\n"
        "training: {micro_batch: 4, global_batch: 32, steps: 60, lr: 0.001}\ndata: {text: stdlib}\n"
        "model: {num_heads: 8, hidden_size: 256, num_layers: 8, family: gpt2}\nrun: {name: gpt2}\n"
        "wire: {gradients: 'fixed:bits=8', activations: tah}\n"
    )
    assert config_hash(load_config(path)) == config_hash(EXAMPLE)


def test_hash_is_sha256_in_hex_and_changes_with_any_value():
    hashes = {
        config_hash(load_config(EXAMPLES / "gpt2.yaml", [override]))
        for override in ("run.seed=0", "run.seed=1", "training.lr=0.002", "wire.gradients=raw", "data.shuffle=false")
    }
    assert len(hashes) == 5
    assert config_hash(EXAMPLE) in hashes
    assert all(len(value) == 64 and int(value, 16) >= 0 for value in hashes)


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
    base["links"] = {"rate": rate, "delay": delay}
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
        ("{", "is not JSON"),
        ('{"run": NaN}', "NaN is not a JSON number"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "the top level: expected keys and values; got a list of 0"),
        ("{}", "model is missing; a run needs this section (and 2 more: data, training); do both ends run the same"),
        (config_json(EXAMPLE).replace('"lr":', '"lrr":'), "training.lrr is not a key of training; did you mean"),
        (config_json(EXAMPLE).replace('"seed":0', '"seed":"x"'), "run.seed: expected a whole number; got 'x'"),
        (config_json(EXAMPLE).replace('"rate":100000000.0', '"rate":100'), "links.rate: a rate needs a unit"),
    ],
)
def test_json_that_is_not_a_configuration_is_refused_in_one_line(text, message):
    with pytest.raises(ConfigError) as caught:
        config_from_json(text)
    assert message in str(caught.value)
    assert str(caught.value).startswith("the configuration received as JSON")
    assert "\n" not in str(caught.value)


# -- resolving -----------------------------------------------------------------------------------


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
