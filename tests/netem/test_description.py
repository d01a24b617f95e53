"""Networks as they are described, and the named kinds of connections."""

import pytest
from pydantic import ValidationError

from tahq.comm.network_config import HostConfig, NetworkConfig, PairConfig
from tahq.errors import ConfigError
from tahq.units import WRITTEN_BY_HAND
from tahq_netem.network.description import (
    HostShape,
    PathShape,
    load_profile,
    named_profiles,
    plan_network,
    profile,
    uniform,
)

TWO_SITES = {
    "hosts": {
        "a1": {"site": "a", "delay": 0.1, "loss": 0.1},
        "a2": {"site": "a", "delay": 0.2},
        "b1": {"site": "b", "delay": 0.3, "up": 1e7, "down": 2e7},
        "alone": {"delay": 0.4},
    }
}


def plan_with(*pairs):
    return plan_network(NetworkConfig(**TWO_SITES, pairs=list(pairs)))


def test_uniform_network_has_the_same_rate_and_delay_everywhere():
    plan = plan_network(uniform(3, rate=1e8, delay=0.025))
    assert plan.hosts == ("host0", "host1", "host2")
    assert set(plan.host_shapes.values()) == {HostShape(1e8, 1e8)}
    assert len(plan.paths) == 6
    assert set(plan.paths.values()) == {PathShape(delay_s=0.025)}
    assert plan.round_trip_s("host0", "host2") == 0.05
    asymmetric = plan_network(uniform(2, rate=1e8, up=1e7, names=["home", "lab"]))
    assert asymmetric.host_shapes == {"home": HostShape(1e7, 1e8), "lab": HostShape(1e7, 1e8)}


def test_path_has_the_figures_of_the_host_that_sends_and_an_exception_holds_in_both_directions():
    plan = plan_with()
    assert plan.paths["a1", "b1"] == PathShape(delay_s=0.1, loss=0.1)
    assert plan.paths["b1", "a1"] == PathShape(delay_s=0.3)
    assert plan.round_trip_s("a1", "b1") == pytest.approx(0.4)
    assert plan.longest_round_trip_s("a1") == pytest.approx(0.5)
    plan = plan_with(PairConfig(between=("a1", "b1"), delay=0.5))
    assert plan.paths["a1", "b1"].delay_s == plan.paths["b1", "a1"].delay_s == 0.5


@pytest.mark.parametrize(
    ("pairs", "delay_s"),
    [
        (["a-b"], 0.01),
        (["a-b", "a1-b"], 0.02),
        (["a-b", "a-b1"], 0.03),
        (["a1-b1", "a-b", "a1-b"], 0.04),
        (["a-a"], 0.1),
    ],
)
def test_most_specific_exception_wins_in_any_order(pairs, delay_s):
    delays = {"a-b": 0.01, "a1-b": 0.02, "a-b1": 0.03, "a1-b1": 0.04, "a-a": 0.05}
    exceptions = [PairConfig(between=tuple(name.split("-")), delay=delays[name]) for name in pairs]
    for order in (exceptions, exceptions[::-1]):
        assert plan_with(*order).paths["a1", "b1"].delay_s == delay_s


def test_figure_missing_in_an_exception_comes_from_the_next_wider_level():
    plan = plan_with(
        PairConfig(between=("a1", "b1"), rate=1e6),
        PairConfig(between=("a", "b"), delay=0.5, rate=1e7),
    )
    assert plan.paths["a1", "b1"] == PathShape(delay_s=0.5, loss=0.1, rate_bits_per_s=1e6)
    assert plan.paths["a2", "b1"] == PathShape(delay_s=0.5, rate_bits_per_s=1e7)


def test_rate_between_two_hosts_is_the_smallest_on_the_path():
    plan = plan_with(PairConfig(between=("a1", "b1"), rate=5e6))
    assert plan.rate_bits_per_s("b1", "a1") == 5e6
    assert plan.rate_bits_per_s("b1", "a2") == 1e7
    assert plan.rate_bits_per_s("a2", "b1") == 2e7
    assert plan.rate_bits_per_s("a1", "a2") is None


def test_quantities_have_units_in_yaml_and_a_written_configuration_reads_the_same():
    text = {"hosts": {"a": {"up": "20mbit", "delay": "10ms"}, "b": None}}
    plan = plan_network(NetworkConfig.model_validate(text, context=WRITTEN_BY_HAND))
    assert plan.host_shapes == {"a": HostShape(2e7, None), "b": HostShape()}
    assert plan.paths["a", "b"].delay_s == 0.01
    config = NetworkConfig(**TWO_SITES, pairs=[PairConfig(between=("a", "b"), rate=1e6)])
    assert plan_network(NetworkConfig.model_validate(config.model_dump())) == plan_network(config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plan: plan.with_rates("allone", HostShape()), "no host 'allone'.*did you mean alone"),
        (lambda plan: plan.with_rates("b1", HostShape(100)), "at least 10000 bit/s; got 100"),
        (lambda plan: plan.with_path("a1", "a1", PathShape()), "got a1 twice"),
        (lambda plan: plan.with_path("a1", "b1", PathShape(reorder=0.1)), "reorder needs a delay"),
    ],
)
def test_invalid_change_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        change(plan_with())


def test_reordering_without_a_delay_names_the_path():
    config = NetworkConfig(hosts={"a": HostConfig(reorder=0.1), "b": HostConfig()})
    with pytest.raises(ConfigError, match="from a to b: reorder needs a delay"):
        plan_network(config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hosts": {}}, "at least 1"),
        ({"hosts": {"a b": {}}}, "letters, digits"),
        ({"hosts": {"a": {"loss": 1.5}}}, "less than or equal to 1"),
        ({"hosts": {"a": {}}, "pairs": [{"between": ["a", "c"]}]}, "unknown host or site 'c'"),
        ({"hosts": {"a": {"site": "b"}, "b": {}}}, "name of a host and of a site"),
        ({"hosts": {"a": {}, "b": {}}, "pairs": [{"between": ["a", "b"]}, {"between": ["b", "a"]}]}, "named twice"),
        ({"hosts": {f"h{k}": {} for k in range(251)}}, "at most 250"),
    ],
)
def test_invalid_description_is_refused(config, message):
    with pytest.raises(ValidationError, match=message):
        NetworkConfig.model_validate(config)


# -- profiles -------------------------------------------------------------------------------------

NAMED = ["home-fibre", "cable", "dsl", "4g", "5g", "campus", "two-clouds", "satellite"]
OWN = """
title: Radio across the valley
source: ["measured on a Sunday"]
host: {up: 5mbit, down: 10mbit, delay: 12ms, loss: 0.001}
"""


def test_every_named_profile_has_rates_delays_and_sources():
    assert list(named_profiles()) == NAMED
    for name in NAMED:
        plan = plan_network(profile(name, 4))
        assert all(shape.up_bits_per_s and shape.down_bits_per_s for shape in plan.host_shapes.values())
        assert all(path.delay_s > 0 and path.jitter_s < path.delay_s for path in plan.paths.values())
        assert all(len(source) > 40 for source in load_profile(name).source)


@pytest.mark.parametrize(("num_hosts", "sites"), [(2, "ae"), (3, "aae"), (4, "aaee")])
def test_hosts_are_divided_among_the_sites_in_order(num_hosts, sites):
    config = profile("two-clouds", num_hosts)
    assert "".join(str(host.site)[0] for host in config.hosts.values()) == sites


def test_own_file_is_a_profile_whose_hosts_can_have_other_names(tmp_path):
    path = tmp_path / "valley.yaml"
    path.write_text(OWN)
    plan = plan_network(profile(str(path), 2, ["home", "lab"]))
    assert (plan.rate_bits_per_s("home", "lab"), plan.paths["home", "lab"].loss) == (5e6, 0.001)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (OWN.replace("5mbit", "5"), "host.up: a rate needs a unit"),
        (OWN.replace("loss", "lost"), "host.lost is not a key of host; did you mean loss"),
        (OWN.replace("host:", "hast:"), "hast"),
        ("title: x\nsource: [y]\n", "expected host .* or sites"),
        ("{", "not valid YAML"),
        (None, "does not exist; `tahq-netem profiles`"),
    ],
)
def test_mistake_in_an_own_file_is_one_line_that_names_it(tmp_path, text, message):
    path = tmp_path / "valley.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        profile(str(path), 2)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "num_hosts", "message"),
    [
        ("cabel", 2, r"no profile 'cabel'; there are home-fibre, .*; did you mean cable"),
        ("two-clouds", 1, "needs at least 2 hosts; got 1"),
        ("cable", 0, "needs at least 1 hosts; got 0"),
    ],
)
def test_unknown_profile_or_too_few_hosts_are_refused(name, num_hosts, message):
    with pytest.raises(ConfigError, match=message):
        profile(name, num_hosts)
