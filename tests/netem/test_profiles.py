import pytest

from tahq.errors import ConfigError
from tahq_netem.network.description import plan_network
from tahq_netem.network.profiles import load_profile, profile, profile_names

EXPECTED = ["home-fibre", "cable", "dsl", "4g", "5g", "campus", "two-clouds", "satellite"]
OWN = """
title: Radio across the valley
source: ["measured on a Sunday"]
host: {up: 5mbit, down: 10mbit, delay: 12ms, loss: 0.001}
"""


def test_profiles_come_in_the_order_of_the_file():
    assert profile_names() == EXPECTED


@pytest.mark.parametrize("name", EXPECTED)
def test_every_profile_has_rates_delays_and_sources(name):
    plan = plan_network(profile(name, 4))
    assert all(shape.up_bits_per_s and shape.down_bits_per_s for shape in plan.host_shapes.values())
    assert all(path.delay_s > 0 and path.jitter_s < path.delay_s for path in plan.paths.values())
    assert all(len(source) > 40 for source in load_profile(name).source)


def test_cable_has_the_figures_of_its_source():
    plan = plan_network(profile("cable", 2))
    assert plan.rate_bits_per_s("host0", "host1") == 20e6
    assert plan.round_trip_s("host0", "host1") == pytest.approx(2 * 14e-3 + 10e-3)


@pytest.mark.parametrize(("num_hosts", "sites"), [(2, "ae"), (3, "aae"), (4, "aaee")])
def test_hosts_are_divided_among_the_sites_in_order(num_hosts, sites):
    config = profile("two-clouds", num_hosts)
    assert "".join(str(host.site)[0] for host in config.hosts.values()) == sites


def test_two_clouds_are_near_within_and_far_between():
    plan = plan_network(profile("two-clouds", 4))
    assert plan.round_trip_s("host0", "host1") < 1e-3
    assert plan.round_trip_s("host1", "host2") == pytest.approx(0.07)


def test_hosts_can_have_names_of_their_own():
    assert list(profile("dsl", 2, ["home", "lab"]).hosts) == ["home", "lab"]


def test_own_file_is_a_profile(tmp_path):
    path = tmp_path / "valley.yaml"
    path.write_text(OWN)
    plan = plan_network(profile(str(path), 2))
    assert (plan.rate_bits_per_s("host0", "host1"), plan.paths["host0", "host1"].loss) == (5e6, 0.001)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (OWN.replace("5mbit", "5"), "host.up: a rate needs a unit"),
        (OWN.replace("loss", "lost"), "host.lost: Extra inputs"),
        (OWN.replace("host:", "hast:"), "hast"),
        ("title: x\nsource: [y]\n", "expected host .* or sites"),
        ("{", "is not YAML"),
    ],
)
def test_mistake_in_an_own_file_is_one_line_that_names_it(tmp_path, text, message):
    path = tmp_path / "valley.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        profile(str(path), 2)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_file_is_named():
    with pytest.raises(ConfigError, match=r"cannot read the profile nowhere.yaml: No such file"):
        profile("nowhere.yaml", 2)


def test_unknown_name_lists_the_profiles_and_the_nearest():
    with pytest.raises(ConfigError, match=r"no profile 'cabel'; there are home-fibre, .*; did you mean cable"):
        profile("cabel", 2)


def test_fewer_hosts_than_sites_are_refused():
    with pytest.raises(ConfigError, match="needs at least 2 hosts; got 1"):
        profile("two-clouds", 1)


def test_a_network_without_hosts_is_refused():
    with pytest.raises(ConfigError, match="needs at least 1 hosts; got 0"):
        profile("cable", 0)
