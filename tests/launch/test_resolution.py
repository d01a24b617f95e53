"""Resolved configurations: vocabulary, layers, profiles of networks, and measured rates."""

import pytest
import yaml
from support.cluster_files import EXAMPLES, LEAST, ClusterFile
from support.runs import tiny
from transformers import GPT2Config, GPT2LMHeadModel

from tahq.config.cluster import ClusterConfig
from tahq.config.file import config_hash, dump_yaml, load_config
from tahq.errors import ConfigError, ModelError
from tahq_launch.plan.dry_run import describe_network
from tahq_launch.start.prepared_run import continued_config
from tahq_launch.start.resolution import resolve_for_run, with_measured, with_profile
from tahq_netem.network.description import load_profile, plan_network


def configured(**sections) -> ClusterConfig:
    return ClusterConfig.model_validate(tiny(**{"pipeline": {"stages": 2}, **sections}))


def test_vocabulary_and_layers_are_written_out_and_resolving_again_changes_nothing(caplog):
    resolved = resolve_for_run(configured(links={"first": "gradients"}))
    assert "links.first: gradients has little effect on stage 0's host" in caplog.text
    assert resolved.model.vocab_size == 256
    assert resolved.pipeline.layers == [2, 2]
    assert config_hash(resolve_for_run(resolved)) == config_hash(resolved)


def test_samples_are_no_longer_than_the_models_positions_unless_set(tmp_path):
    GPT2LMHeadModel(
        GPT2Config(vocab_size=300, n_positions=128, n_embd=32, n_layer=4, n_head=2, bos_token_id=0, eos_token_id=0)
    ).save_pretrained(tmp_path)
    folder = {"data": {"text": "stdlib", "tokenizer": "bytes"}, "model": {"path": str(tmp_path)}}
    given = ClusterConfig.model_validate(folder)
    resolved = resolve_for_run(given)
    assert (given.data.seq_len, resolved.data.seq_len) == (256, 128)
    assert resolve_for_run(resolved) == resolved
    assert "seq_len: 128\n" in dump_yaml(resolved)
    resumed = continued_config(resolved.model_dump(mode="json"), given)
    assert resolve_for_run(resumed).data.seq_len == 128
    set_longer = {**folder, "data": {**folder["data"], "seq_len": 129}}
    with pytest.raises(ModelError, match=r"data\.seq_len 129 is longer than the model's 128 positions"):
        resolve_for_run(ClusterConfig.model_validate(set_longer))
    pieces = {**folder, "training": {"seq_len_schedule": [[128, 5]]}}
    with pytest.raises(ConfigError, match=r"with the 128 positions of .*: training\.seq_len_schedule"):
        resolve_for_run(ClusterConfig.model_validate(pieces))
    sizes = {"family": "gpt2", "num_layers": 4, "hidden_size": 32, "num_heads": 2, "max_seq_len": 100}
    assert ClusterConfig.model_validate({**folder, "model": sizes}).data.seq_len == 100


def test_adapters_of_layers_that_no_block_has_are_refused_before_workers_start():
    with pytest.raises(ModelError, match=r"adapter\.targets: q_prj names no linear layer .* attn\.c_attn"):
        resolve_for_run(configured(adapter={"targets": ["c_attn", "q_prj"]}))


def load(*overrides: str) -> ClusterConfig:
    return load_config(EXAMPLES / "demo.yaml", ["run.device=cpu", "hosts=namespaces", "emulate={}", *overrides])


def test_profile_applies_to_every_host():
    config = resolve_for_run(load("emulate.profile=cable"))
    host = load_profile("cable").host
    assert config.emulate.profile is None
    shapes = {(h.up, h.down, h.delay, h.jitter) for h in config.emulate.network(4).hosts.values()}
    assert shapes == {(host.up, host.down, host.delay, host.jitter)}


def test_resolved_profile_can_be_written_and_run_again(tmp_path):
    config = resolve_for_run(load("emulate.profile=two-clouds"))
    (tmp_path / "config.yaml").write_text(dump_yaml(config))
    again = load_config(tmp_path / "config.yaml")
    assert again == config == resolve_for_run(again)
    assert {host.site for host in again.emulate.hosts.values()} == {"america", "europe"}


def test_hosts_pairs_and_slow_start_change_a_profile():
    pauses = with_profile(load("emulate={profile: cable, tcp_slow_start_after_idle: false}"))
    assert "without slow start after pauses" in describe_network(pauses)
    links = "hosts: {host1: {up: 1mbit}}, pairs: [{between: [america, europe], delay: 99ms}]"
    network = with_profile(load(f"emulate={{profile: two-clouds, {links}}}")).emulate.network(4)
    assert network.hosts["host1"].up == 1e6
    assert network.hosts["host1"].down == load_profile("two-clouds").sites["america"].down
    assert plan_network(network).paths["host0", "host3"].delay_s == 0.099
    unknown = load("emulate={profile: cable, pairs: [{between: [moon, host0], delay: 1s}]}")
    with pytest.raises(ConfigError, match=r"^with emulate.profile cable: emulate.pairs: unknown host or site 'moon'"):
        with_profile(unknown)


LAYER = {"micro_batch": 2, "block_forward": 0.001, "block_backward": 0.002}
NUMBERS = {
    "hosts": [
        {"name": "a.example", "up": "40mbit", "down": "100mbit", "compute": [LAYER]},
        {"name": "b.example", "up": "10mbit", "compute": [LAYER]},
        {"name": "c.example", "up": "20mbit", "compute": [LAYER]},
    ],
    "paths": [
        {"source": "b.example", "target": "a.example", "rate": "30mbit", "connections": 4},
        {"source": "a.example", "target": "c.example", "rate": "30mbit", "connections": 8},
    ],
}
NAMES = ("a.example", "b.example", "c.example")


@pytest.fixture
def load_listed(tmp_path, monkeypatch):
    """load_listed("cap_up: 50%") reads a cluster.yaml with those links over three hosts and measured.yaml."""
    (tmp_path / "measured.yaml").write_text(yaml.safe_dump(NUMBERS))
    file = ClusterFile(tmp_path, monkeypatch)

    def read(links: str = "", names: tuple[str, ...] = NAMES, site: str = "") -> ClusterConfig:
        hosts = ", ".join(f"{{address: {name}{site if name < 'c' else ''}}}" for name in names)
        links = f"links: {{measured: measured.yaml, {links}}}\nhosts: [{hosts}]\n"
        text = LEAST.replace("emulate:\n  rate: 100mbit\nhosts: local\n", links)
        return file.load(f"{text}pipeline: {{stages: {len(names)}}}\n")

    return read


def test_shares_are_of_the_measured_rates_and_connections_as_many_as_neighbours_needed(load_listed):
    """The path from a to c, which needs eight, is not a link in this order of hosts; the one between a and b is."""
    config = with_measured(load_listed("cap_up: 50%, cap_down: 20mbit"))
    caps = [config.shaping(stage) for stage in range(3)]
    assert [cap.cap_up_bits_per_s for cap in caps] == [20e6, 5e6, 10e6]
    assert [cap.cap_down_bits_per_s for cap in caps] == [20e6] * 3
    assert (config.links.measured, config.links.connections) == (None, 4)
    assert with_measured(config) == config
    assert with_measured(load_listed("connections: 6")).links.connections == 6


def test_host_with_a_link_inside_its_site_gets_no_cap(load_listed):
    config = with_measured(load_listed("first: gradients, inside: gloo", site=", site: lab"))
    assert [host.cap_up for host in config.hosts] == [None, None, 19e6]
    assert ClusterConfig.model_validate(config.model_dump(mode="json")) == config


def test_share_of_an_unknown_rate_is_refused(load_listed):
    config = with_measured(load_listed("cap_down: 50%"))
    with pytest.raises(ConfigError, match="stage 1's host is not known"):
        config.shaping(1)
    hosts = [{"address": "192.0.2.1"}, {"address": "192.0.2.2"}]
    unmeasured = configured().model_dump(mode="json") | {"hosts": hosts, "links": {"cap_up": "60%"}}
    with pytest.raises(ConfigError, match=r"links\.cap_up: 60% .*tahq measure"):
        resolve_for_run(ClusterConfig.model_validate(unmeasured))


def test_measured_rates_of_other_hosts_are_refused(load_listed):
    with pytest.raises(ConfigError, match=r"no host b\.example in cluster\.yaml"):
        with_measured(load_listed(names=("a.example", "d.example")))
    with pytest.raises(ConfigError, match="for a list of hosts"):
        with_measured(configured(links={"measured": "measured.yaml"}))
