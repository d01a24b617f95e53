"""`hosts:` that are this machine, and `host_defaults:`."""

import pytest
from support.cluster_files import LEAST, ClusterFile

from tahq.config.file import config_from_json, config_json, dump_yaml


@pytest.fixture
def file(tmp_path, monkeypatch):
    return ClusterFile(tmp_path, monkeypatch)


def with_hosts(text: str) -> str:
    return LEAST.replace("hosts: local\n", text)


TWO = """\
host_defaults: {python: /opt/python, device: cuda, env: {A: b}}
hosts:
  - {address: a, ssh: ada@a, device: cpu}
  - local: true
"""


def test_host_defaults_are_taken_by_entries_that_do_not_say_otherwise(file):
    config = file.load(with_hosts(TWO), "host_defaults.site=lab")
    first, second = config.hosts
    assert (first.python, first.device, first.env, first.site) == ("/opt/python", "cpu", {"A": "b"}, "lab")
    assert (second.python, second.device, second.env, second.site) == ("python3", "cuda", {}, "lab")
    assert config.local_stages == (1,)
    assert file.load(dump_yaml(config)) == config == config_from_json(config_json(config))


def test_three_hosts_are_three_stages_with_a_checkpoint_every_ten_minutes(file):
    config = file.load(with_hosts("hosts: [{local: true}, {address: b, ssh: b}, {address: c, ssh: c}]\n"))
    assert (config.pipeline.stages, config.run.checkpoint_every, config.run.keep_checkpoints) == (3, 600.0, 2)


@pytest.mark.parametrize(
    ("run", "address"),
    [
        ("{}", "127.0.0.1"),
        ("{bind: '192.0.2.1:7700'}", "192.0.2.1"),
        ("{bind: '0.0.0.0:7700', advertise: 'me.example.net:7700'}", "me.example.net"),
        ("{bind: '[2001:db8::1]:7700'}", "2001:db8::1"),
    ],
)
def test_this_machine_is_reached_where_its_coordinator_is(file, run, address):
    assert file.load(with_hosts(TWO), f"run={run}").hosts[1].address == address
    assert file.load(with_hosts(TWO), f"run={run}", "hosts.1.address=b").hosts[1].address == "b"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "host_defaults: {devise: cpu}\nhosts: [{local: true}]\n",
            "host_defaults.devise is not a key of host_defaults; did",
        ),
        (
            "host_defaults: {ssh: a@b}\nhosts: [{local: true}]\n",
            "host_defaults.ssh is not a key of host_defaults; it diff",
        ),
        (
            "host_defaults: {device: tpu}\nhosts: [{local: true}]\n",
            "hosts.0.device: expected auto, cpu, cuda or cuda:N",
        ),
        (
            "host_defaults: {device: cpu}\nhosts: local\n",
            "host_defaults is for the machines of a list; hosts is 'local'",
        ),
        ("host_defaults: cpu\nhosts: [{local: true}]\n", "host_defaults: expected keys of a host; got 'cpu'"),
        (
            "hosts: [{local: true, ssh: a@b}]\n",
            "hosts.0: local: true is for this machine, which needs no ssh; remove one",
        ),
        ("hosts: [{device: cpu}]\n", "hosts.0: address is missing; give a host name or an IP address, or local: true"),
        (
            "hosts: [{local: true, workdir: x}]\n",
            "hosts.0: ssh_options, env and workdir are for hosts that are started",
        ),
    ],
)
def test_mistake_about_hosts_names_its_line(file, text, message):
    assert file.refusal(with_hosts(text)).startswith(f"cluster.yaml:15: {message}")
