"""The network of `hosts: namespaces`: the coordinator's host, measured links, speeds and their text."""

import math
from types import SimpleNamespace

import pytest
from support.cluster_files import EXAMPLES
from support.loopback_network import LoopbackNetwork

from tahq.config.cluster import ClusterConfig
from tahq.config.file import load_config
from tahq_launch import namespace_host
from tahq_launch.namespace_host import COORDINATOR, links_of, network_of
from tahq_launch.plan.step_traffic import link_speeds
from tahq_netem.network.description import plan_network

GOODPUT = 1448 / 1514


def load(*overrides: str) -> ClusterConfig:
    return load_config(EXAMPLES / "demo.yaml", ["run.device=cpu", "hosts=namespaces", "emulate={}", *overrides])


def test_coordinator_is_not_shaped_and_has_each_hosts_own_delay():
    pairs = "pairs: [{between: [host0, host1], delay: 90ms}]"
    hosts = "hosts: {host3: {delay: 300ms, loss: 0.01}}"
    plan = plan_network(network_of(load(f"emulate={{rate: 10mbit, delay: 20ms, {hosts}, {pairs}}}")))
    assert plan.hosts == ("host0", "host1", "host2", "host3", COORDINATOR)
    shape = plan.host_shapes[COORDINATOR]
    assert (shape.up_bits_per_s, shape.down_bits_per_s) == (None, None)
    trips = [("host0", COORDINATOR, 0.04), (COORDINATOR, "host3", 0.6), ("host0", "host1", 0.18)]
    for source, target, trip_s in trips:
        assert plan.round_trip_s(source, target) == pytest.approx(trip_s)
    assert plan.paths[COORDINATOR, "host3"].loss == 0.01


def test_links_of_a_pipeline_are_its_neighbours_in_both_directions():
    neighbours = [("host0", "host1"), ("host1", "host0"), ("host1", "host2"), ("host2", "host1")]
    assert links_of(load("pipeline.stages=3")) == neighbours
    ends = [("host0", "host2"), ("host2", "host0")]
    assert links_of(load("pipeline.stages=3", "model.tie=sync")) == neighbours + ends


def test_backend_and_congestion_control_are_announced(monkeypatch, tmp_path, capsys):
    measured = SimpleNamespace(figures=(), check=lambda: None, as_dict=dict)
    monkeypatch.setattr(namespace_host, "build_network", lambda config, **_: LoopbackNetwork(config))
    monkeypatch.setattr(namespace_host, "calibrate", lambda *_, **__: measured)
    folder, options = SimpleNamespace(network=tmp_path / "network.json"), SimpleNamespace(epoch=1, start_step=0)
    prepared = SimpleNamespace(config=load("pipeline.stages=3"), folder=folder, options=options)
    with namespace_host.open_hosts(prepared):
        pass
    assert "network of 3 hosts, made by loopback, TCP is none; measuring it\n" in capsys.readouterr().out
    assert folder.network.exists()


def test_speeds_count_a_workers_own_bytes_up_to_its_caps_and_the_rates_of_pairs():
    speeds = link_speeds(load("emulate={rate: 100mbit, delay: 9ms, hosts: {host1: {up: 10mbit}}}"))
    assert (speeds.rate(0, 1), speeds.rate(1, 2)) == pytest.approx((100e6 * GOODPUT, 10e6 * GOODPUT))
    assert speeds.longest_delay_s == 0.009
    capped = link_speeds(
        load("emulate={rate: 100mbit, hosts: {host1: {up: 10mbit}}}", "links={cap_up: 50%, cap_down: 20mbit}")
    )
    assert capped.up[:2] == pytest.approx((50e6 * GOODPUT, 5e6 * GOODPUT))
    assert capped.down == (20e6,) * 4
    links = "pairs: [{between: [host0, host1], rate: 1mbit}, {between: [host0, host3], delay: 50s}]"
    pairs = link_speeds(load(f"emulate={{{links}}}", "run.peer_timeout=200s", "run.give_up=400s"))
    assert pairs.is_shaped
    assert (pairs.rate(1, 0), pairs.rate(1, 2)) == (pytest.approx(1e6 * GOODPUT), math.inf)
    assert pairs.longest_delay_s == 0.0  # host0 and host3 are no neighbours
