"""Figures of a measurement in the place of shares, and of a number of connections that nobody gave."""

import pytest
import yaml
from support.cluster_files import LEAST, ClusterFile

from tahq.comm.host_shaping import host_shaping
from tahq.config.cluster import ClusterConfig
from tahq.errors import ConfigError
from tahq_launch.measured_links import with_measured

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


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    (tmp_path / "measured.yaml").write_text(yaml.safe_dump(NUMBERS))
    return ClusterFile(tmp_path, monkeypatch)


def listed(links: str, names: tuple[str, ...] = ("a.example", "b.example", "c.example")) -> str:
    hosts = ", ".join(f"{{address: {name}}}" for name in names)
    text = LEAST.replace("links:\n  rate: 100mbit\nhosts: local\n", f"links: {links}\nhosts: [{hosts}]\n")
    return f"{text}pipeline: {{stages: {len(names)}}}\n"


def test_shares_are_of_the_measured_rates(cluster):
    config = with_measured(cluster.load(listed("{measured: measured.yaml, cap_up: 50%, cap_down: 20mbit}")))
    caps = [host_shaping(config.links, config.hosts, stage, 3) for stage in range(3)]
    assert [cap.cap_up_bits_per_s for cap in caps] == [20e6, 5e6, 10e6]
    assert [cap.cap_down_bits_per_s for cap in caps] == [20e6] * 3
    assert config.links.measured is None
    assert with_measured(config) == config


def test_a_host_with_a_link_inside_its_site_gets_no_cap_for_its_order(cluster):
    """Workers would refuse one: they read the configuration as it is resolved here."""
    text = listed("{measured: measured.yaml, first: gradients, inside: gloo}")
    text = text.replace("a.example}", "a.example, site: lab}").replace("b.example}", "b.example, site: lab}")
    config = with_measured(cluster.load(text))
    assert [host.cap_up for host in config.hosts] == [None, None, 19e6]
    assert ClusterConfig.model_validate(config.model_dump(mode="json")) == config


def test_links_have_as_many_connections_as_neighbours_needed(cluster):
    """The way from a to c, which needs eight, is no link of this order; the one between a and b is."""
    assert with_measured(cluster.load(listed("{measured: measured.yaml}"))).links.connections == 4
    assert with_measured(cluster.load(listed("{measured: measured.yaml, connections: 6}"))).links.connections == 6


def test_a_share_of_a_rate_that_was_not_measured_is_still_refused(cluster):
    config = with_measured(cluster.load(listed("{measured: measured.yaml, cap_down: 50%}")))
    with pytest.raises(ConfigError, match="stage 1's host is not known"):
        host_shaping(config.links, config.hosts, 1, 3)


def test_a_file_of_other_hosts_is_refused_by_name(cluster):
    config = cluster.load(listed("{measured: measured.yaml}", ("a.example", "d.example")))
    with pytest.raises(ConfigError, match=r"no host b\.example in cluster\.yaml"):
        with_measured(config)


def test_hosts_of_this_machine_have_the_rates_that_links_sets(cluster):
    config = cluster.load(LEAST.replace("  rate: 100mbit", "  measured: measured.yaml"))
    with pytest.raises(ConfigError, match="for a list of hosts"):
        with_measured(config)
