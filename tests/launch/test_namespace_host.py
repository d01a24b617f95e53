"""The network that a cluster.yaml asks for: profiles put in place, the coordinator's host, links to measure."""

import math
from types import SimpleNamespace

import pytest
from support.cluster_files import EXAMPLES
from support.loopback_network import LoopbackNetwork

from tahq.config.cluster import ClusterConfig
from tahq.config.file import dump_yaml, load_config
from tahq.errors import ConfigError
from tahq_launch import namespace_host
from tahq_launch.namespace_host import COORDINATOR, links_of, network_of
from tahq_launch.network_text import describe_network
from tahq_launch.plan.dry_run import WIDTH, dry_run
from tahq_launch.plan.step_traffic import link_speeds
from tahq_launch.start.resolution import resolve_for_run, with_profile
from tahq_netem.network.description import plan_network
from tahq_netem.network.profiles import load_profile


def load(*overrides: str) -> ClusterConfig:
    changes = ["run.device=cpu", "hosts=namespaces", "links={}", *overrides]
    return load_config(EXAMPLES / "demo.yaml", changes)


# -- the network ----------------------------------------------------------------------------------


def test_hosts_are_alike_but_for_what_links_hosts_says():
    plan = plan_network(
        load("links={rate: 100mbit, up: 20mbit, hosts: {host2: {up: 5mbit, delay: 7ms}}}").links.network(4)
    )
    assert [plan.host_shapes[f"host{k}"].up_bits_per_s for k in range(4)] == [20e6, 20e6, 5e6, 20e6]
    assert {shape.down_bits_per_s for shape in plan.host_shapes.values()} == {100e6}
    assert plan.round_trip_s("host2", "host0") == 0.007


def test_coordinator_is_not_shaped_and_as_far_as_each_hosts_own_delay():
    config = load("links={rate: 10mbit, delay: 20ms, hosts: {host3: {delay: 300ms, loss: 0.01}}}")
    plan = plan_network(network_of(config))
    assert plan.hosts == ("host0", "host1", "host2", "host3", COORDINATOR)
    assert plan.host_shapes[COORDINATOR].up_bits_per_s is None
    assert plan.host_shapes[COORDINATOR].down_bits_per_s is None
    assert plan.round_trip_s(COORDINATOR, "host0") == pytest.approx(0.04)
    assert plan.round_trip_s(COORDINATOR, "host3") == pytest.approx(0.6)
    assert plan.paths[COORDINATOR, "host3"].loss == 0.01


def test_exceptions_between_sites_do_not_reach_the_coordinator():
    links = "hosts: {host0: {site: a}, host1: {site: b}}, pairs: [{between: [a, b], delay: 90ms}]"
    plan = plan_network(network_of(load(f"links={{delay: 5ms, {links}}}")))
    assert plan.round_trip_s("host0", "host1") == pytest.approx(0.18)
    assert plan.round_trip_s("host0", "host2") == pytest.approx(0.01)
    assert plan.round_trip_s("host0", COORDINATOR) == pytest.approx(0.01)


def test_links_of_a_pipeline_are_its_neighbours_both_ways():
    assert links_of(load("pipeline.stages=3")) == [
        ("host0", "host1"), ("host1", "host0"), ("host1", "host2"), ("host2", "host1"),
    ]  # fmt: skip
    assert links_of(load("pipeline.stages=1")) == []
    assert links_of(load("pipeline.stages=3", "model.tie=sync"))[4:] == [("host0", "host2"), ("host2", "host0")]


def test_backend_and_congestion_control_of_the_network_are_announced(monkeypatch, tmp_path):
    class Measured:
        figures = ()

        def check(self):
            pass

        def as_dict(self):
            return {}

    monkeypatch.setattr(namespace_host, "build_network", lambda config, **_: LoopbackNetwork(config))
    monkeypatch.setattr(namespace_host, "calibrate", lambda *_, **__: Measured())
    folder, options = SimpleNamespace(network=tmp_path / "network.json"), SimpleNamespace(epoch=1, start_step=0)
    said: list[str] = []
    prepared = SimpleNamespace(config=load("pipeline.stages=3"), folder=folder, options=options)
    with namespace_host.open_hosts(prepared, said.append):
        pass
    assert said[0] == "network of 3 hosts, made by loopback, TCP is none; measuring it"


# -- profiles -------------------------------------------------------------------------------------


def test_profile_stands_for_its_figures_on_every_host():
    config = resolve_for_run(load("links.profile=cable"))
    host = load_profile("cable").host
    assert config.links.profile is None
    network = config.links.network(4)
    assert {(h.up, h.down, h.delay, h.jitter) for h in network.hosts.values()} == {
        (host.up, host.down, host.delay, host.jitter)
    }


def test_resolved_profile_is_a_configuration_that_can_be_run_again(tmp_path):
    config = resolve_for_run(load("links.profile=two-clouds"))
    (tmp_path / "config.yaml").write_text(dump_yaml(config))
    again = load_config(tmp_path / "config.yaml")
    assert again == config
    assert resolve_for_run(again) == config
    assert {host.site for host in again.links.hosts.values()} == {"america", "europe"}


def test_hosts_and_pairs_change_what_a_profile_says():
    links = "hosts: {host1: {up: 1mbit}}, pairs: [{between: [america, europe], delay: 99ms}]"
    network = with_profile(load(f"links={{profile: two-clouds, {links}}}")).links.network(4)
    assert network.hosts["host1"].up == 1e6
    assert network.hosts["host1"].down == load_profile("two-clouds").sites["america"].down
    assert plan_network(network).paths["host0", "host3"].delay_s == 0.099


@pytest.mark.parametrize(("said", "in_force"), [("null", None), ("false", False), ("true", True)])
def test_slow_start_after_pauses_is_the_networks_beside_a_profile_or_without(said, in_force):
    plain = load(f"links.tcp_slow_start_after_idle={said}")
    assert plan_network(plain.links.network(4)).tcp_slow_start_after_idle is in_force
    assert ("slow start after pauses" in describe_network(plain)) == (in_force is not None)
    of_profile = with_profile(load(f"links={{profile: cable, tcp_slow_start_after_idle: {said}}}"))
    assert of_profile.links.network(4).tcp_slow_start_after_idle is in_force


def test_pairs_that_a_profile_does_not_know_are_refused_when_it_is_in_place():
    config = load("links={profile: cable, pairs: [{between: [moon, host0], delay: 1s}]}")
    with pytest.raises(ConfigError, match=r"^with links.profile cable: links.pairs: unknown host or site 'moon'"):
        with_profile(config)


def test_example_is_a_cable_with_one_slower_uplink():
    config = resolve_for_run(load_config(EXAMPLES / "namespaces.yaml"))
    cable = load_profile("cable").host.up
    assert [host.up for host in config.links.network(4).hosts.values()] == [cable, 5e6, cable, cable]


# -- estimates ------------------------------------------------------------------------------------


def test_speeds_count_a_workers_own_bytes():
    speeds = link_speeds(load("links={rate: 100mbit, delay: 9ms, hosts: {host1: {up: 10mbit}}}"))
    assert speeds.rate(0, 1) == pytest.approx(100e6 * 1448 / 1514)
    assert speeds.rate(1, 2) == pytest.approx(10e6 * 1448 / 1514)
    assert speeds.longest_delay_s == 0.009


def test_speeds_are_no_more_than_the_caps():
    speeds = link_speeds(load("links={rate: 100mbit, cap_up: 50%, cap_down: 20mbit, hosts: {host1: {up: 10mbit}}}"))
    assert speeds.up[:2] == pytest.approx((50e6 * 1448 / 1514, 5e6 * 1448 / 1514))
    assert speeds.down == (20e6,) * 4


def test_cap_of_a_pair_and_delays_of_neighbours_count_alone():
    links = "pairs: [{between: [host0, host1], rate: 1mbit}, {between: [host0, host3], delay: 50s}]"
    speeds = link_speeds(load(f"links={{{links}}}", "run.peer_timeout=200s", "run.give_up=400s"))
    assert speeds.is_shaped
    assert speeds.rate(1, 0) == pytest.approx(1e6 * 1448 / 1514)
    assert speeds.rate(1, 2) == math.inf
    assert speeds.longest_delay_s == 0.0


def test_dry_run_shows_hosts_exceptions_and_the_slowest_uplink():
    links = "hosts: {host1: {up: 5mbit, site: home, loss: 0.01}}, pairs: [{between: [home, host3], delay: 1s}]"
    text = dry_run(load(f"links={{rate: 100mbit, delay: 20ms, {links}}}"))
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "host1      1    5 Mbit/s  100 Mbit/s  20 ms   1 %  home" in text
    assert "home and host3  1000 ms" in text
    slow, fast = (dry_run(load(f"links={{rate: {rate}mbit}}")) for rate in (5, 100))
    assert "s alone" in slow
    assert slow != fast


def test_dry_run_of_an_unshaped_network_has_no_times():
    text = dry_run(load())
    assert "not shaped" in text
    assert "s alone" not in text
    assert "computing took no time" not in text
