"""A worker's own decisions: its addresses, and how fast it fetches copies."""

import pytest
from support.runs import tiny

from tahq.config.cluster import ClusterConfig
from tahq.worker.place import WorkerOptions, copy_rate_bits_per_s, listening_addresses

HOSTS = [
    {"address": "192.0.2.1"},
    {"address": "198.51.100.2", "bind": "0.0.0.0:7001", "advertise": "203.0.113.9:7002"},
]


def configured(**changes) -> ClusterConfig:
    return ClusterConfig.model_validate({**tiny(pipeline={"stages": 2}), **changes})


def options(**changes) -> WorkerOptions:
    return WorkerOptions(**({"stage": 0, "peer": "127.0.0.1:5555"} | changes))


def test_takeover_on_another_machine_advertises_that_machine(caplog):
    taking = options(replaces_host=True, stage=1)
    assert listening_addresses(taking, configured(hosts=HOSTS), 1) == ("127.0.0.1:0", None)
    assert "does not have the address 198.51.100.2 of hosts.1" in caplog.text
    own = configured(hosts=[HOSTS[0], {"address": "localhost", "bind": "127.0.0.1:7001"}])
    assert listening_addresses(taking, own, 1) == ("127.0.0.1:7001", "localhost:0")


BY_HAND = {"bind": "127.0.0.1:9000", "advertise": "none"}


@pytest.mark.parametrize(
    ("given", "hosts", "stage", "expected"),
    [
        ({}, "local", 0, ("127.0.0.1:0", None)),
        ({}, HOSTS, 0, ("0.0.0.0:0", "192.0.2.1:0")),
        ({}, HOSTS, 1, ("0.0.0.0:7001", "203.0.113.9:7002")),
        ({"spare": True}, HOSTS, 1, ("127.0.0.1:0", None)),
        (BY_HAND, "local", 1, ("127.0.0.1:9000", "none")),
        (BY_HAND, HOSTS, 1, ("127.0.0.1:9000", "none")),
        ({"spare": True, **BY_HAND}, HOSTS, 1, ("127.0.0.1:9000", "none")),
    ],
)
def test_listening_addresses_follow_the_command_line_then_the_host_entry(given, hosts, stage, expected):
    assert listening_addresses(options(**given), configured(hosts=hosts), stage) == expected


@pytest.mark.parametrize(
    ("changes", "rate"),
    [
        ({}, 10e6),
        ({"links": {"rate": "300mbit"}}, 15e6),
        ({"links": {"rate": "300mbit", "cap_down": "100mbit"}}, 5e6),
        ({"links": {"rate": "300mbit"}, "run": {"copy_rate": "2mbit"}}, 2e6),
    ],
)
def test_copies_take_a_small_share_of_what_is_configured(changes, rate):
    assert copy_rate_bits_per_s(configured(**changes), 1) == pytest.approx(rate)
