"""Caps as they are written, and what they come to for a stage's host."""

import pytest

from tahq.comm.config import HostRates, LinksConfig, MachineConfig, host_shaping, parse_cap, with_measured_rates
from tahq.comm.link.shaping import Shaping
from tahq.comm.network_config import EmulatedNetwork
from tahq.comm.network_model import GOODPUT_SHARE as GOODPUT
from tahq.errors import ConfigError
from tahq.units import WRITTEN_BY_HAND


def links(**keys) -> LinksConfig:
    return LinksConfig.model_validate(keys, context=WRITTEN_BY_HAND)


def both(**keys) -> tuple[LinksConfig, EmulatedNetwork]:
    own = {key: keys.pop(key) for key in list(keys) if key in LinksConfig.model_fields}
    return links(**own), EmulatedNetwork.model_validate(keys, context=WRITTEN_BY_HAND)


def host(**keys) -> MachineConfig:
    return MachineConfig.model_validate({"address": "192.0.2.1", **keys}, context=WRITTEN_BY_HAND)


def caps_of(shaping: Shaping) -> tuple[float | None, float | None]:
    return shaping.cap_up_bits_per_s, shaping.cap_down_bits_per_s


@pytest.mark.parametrize(
    ("text", "cap"), [("20mbit", 2e7), (2e7, 2e7), ("60%", "60%"), (" 12.50 % ", "12.5%"), ("100%", "100%")]
)
def test_cap_is_a_rate_or_a_share(text, cap):
    assert parse_cap(text) == cap


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0%", "above 0 % and at most 100 %"),
        ("101%", "above 0 % and at most 100 %"),
        ("half", "a rate, such as 20mbit, or a share, such as 60%"),
        (0.6, "at least 100kbit"),
        ("99kbit", "at least 100kbit"),
        (60, "a rate, such as 20mbit, or a share, such as 60%"),
    ],
)
def test_what_is_neither_is_told_what_is_expected(text, message):
    with pytest.raises(ValueError, match=message):
        parse_cap(text)


@pytest.mark.parametrize("context", [None, WRITTEN_BY_HAND], ids=["json", "yaml"])
def test_caps_are_written_as_they_are_read_and_a_bare_number_is_not_read(context):
    config = links(cap_up="20mbit", cap_down="60%")
    written = config.model_dump(mode="json", context=context)
    assert LinksConfig.model_validate(written, context=context) == config
    if context is not None:
        assert (written["cap_up"], written["cap_down"]) == ("20mbit", "60%")
        with pytest.raises(ValueError, match="needs a unit"):
            links(cap_up=2e7)


@pytest.mark.parametrize("keys", [{"first": "newest"}, {"connections": 0}, {"connections": 17}])
def test_what_no_link_can_be_is_refused(keys):
    with pytest.raises(ValueError, match=next(iter(keys))):
        links(**keys)


def test_share_of_the_imitated_rate():
    shaping = host_shaping(*both(rate="100mbit", delay="5ms", cap_up="60%", cap_down="20mbit"), "local", 1, 2)
    assert shaping == Shaping(1e8, 0.005, 262_144, 6e7, 2e7)


def test_in_namespaces_only_the_caps_are_the_workers_and_a_share_is_of_what_tcp_carries():
    config = both(rate="100mbit", delay="5ms", cap_up="50%", cap_down="50%", hosts={"host1": {"up": "10mbit"}})
    assert host_shaping(*config, "namespaces", 0, 2).rate_bits_per_s is None
    assert caps_of(host_shaping(*config, "namespaces", 0, 2)) == pytest.approx((5e7 * GOODPUT, 5e7 * GOODPUT))
    assert caps_of(host_shaping(*config, "namespaces", 1, 2)) == pytest.approx((5e6 * GOODPUT, 5e7 * GOODPUT))


def test_order_other_than_the_default_caps_an_uplink_whose_rate_is_known_a_little_below_it():
    ordered = {"rate": "100mbit", "first": "gradients"}
    assert host_shaping(*both(**ordered), "namespaces", 0, 2).cap_up_bits_per_s == pytest.approx(95e6 * GOODPUT)
    assert host_shaping(*both(**ordered, cap_up="10mbit"), "namespaces", 0, 2).cap_up_bits_per_s == 1e7
    # What is imitated waits in the worker anyway; and of what is not known nothing can be said.
    assert host_shaping(*both(**ordered), "local", 0, 2).cap_up_bits_per_s is None
    unknown = both(first="gradients")
    assert host_shaping(*unknown, [host()], 0, 1).cap_up_bits_per_s is None
    (measured,) = with_measured_rates(*unknown, [host()], [HostRates(1e8)])
    assert host_shaping(*unknown, [measured], 0, 1).cap_up_bits_per_s == 95e6
    (imitated,) = with_measured_rates(*both(**ordered), [host()], [HostRates(1e9)])
    assert imitated.cap_up is None
    # Nor is it capped to less than a cap may be, which the next to read it from a file would refuse.
    assert host_shaping(*both(**ordered | {"rate": "105kbit"}), "namespaces", 0, 2).cap_up_bits_per_s is None


def test_entry_of_a_list_goes_before_what_links_say():
    hosts = [host(cap_up="5mbit"), host(cap_down="10%")]
    config = both(rate="100mbit", cap_up="20mbit")
    assert [caps_of(host_shaping(*config, hosts, stage, 2)) for stage in (0, 1)] == [(5e6, None), (2e7, 1e7)]


@pytest.mark.parametrize("hosts", ["local", "namespaces", [MachineConfig(address="192.0.2.1")]], ids=str)
def test_share_of_a_rate_that_nobody_knows_says_what_to_do(hosts):
    with pytest.raises(ConfigError, match=r"links\.cap_down: 60% is a share .* stage 0's host .*tahq measure.*20mbit"):
        host_shaping(*both(cap_down="60%"), hosts, 0, 1)


def test_share_of_what_was_measured_becomes_a_rate():
    config = both(cap_up="60%", cap_down="30mbit")
    measured = with_measured_rates(*config, [host(), host(cap_up="50%")], [HostRates(1e8, 5e8), HostRates(2e7)])
    assert [caps_of(host_shaping(*config, measured, stage, 2)) for stage in (0, 1)] == [(6e7, 3e7), (1e7, 3e7)]
    (left,) = with_measured_rates(*config, [host()], [HostRates()])
    with pytest.raises(ConfigError, match="not known"):
        host_shaping(*config, [left], 0, 1)


def test_share_that_comes_to_less_than_a_cap_may_be_is_refused_with_what_it_comes_to():
    """A run with such a cap would not get beyond connecting."""
    at_least = r" is 50kbit; expected at least 100kbit"
    slow = both(rate="1mbit", cap_down="5%")
    with pytest.raises(ConfigError, match=rf"links\.cap_down: 5% of the rate of stage 0's host{at_least}"):
        host_shaping(*slow, "local", 0, 2)
    with pytest.raises(ConfigError, match=r"links\.cap_up: 0\.0000001% of .* stage 1's host is 0\.00956bit"):
        host_shaping(*both(rate="10mbit", cap_up="0.0000001%"), "namespaces", 1, 2)
    hosts = [host(), host(cap_up="0.5%")]
    with pytest.raises(ConfigError, match=rf"hosts\.1\.cap_up: 0.5% of the rate of stage 1's host{at_least}"):
        with_measured_rates(*both(), hosts, [HostRates(1e7), HostRates(1e7)])
    assert caps_of(host_shaping(*both(rate="1mbit", cap_up="10%"), "local", 0, 1)) == (1e5, None)
