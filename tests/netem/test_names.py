import pytest

from tahq_netem.backends.namespaces import host_address, host_mac, namespace_prefix, owner_pid
from tahq_netem.network.description import MAX_HOSTS


@pytest.mark.parametrize(
    ("taken", "prefix"),
    [
        ([], "tahq-7-"),
        (["tahq-71-host0", "other"], "tahq-7-"),
        (["tahq-7-host0"], "tahq-7.1-"),
        (["tahq-7-host0", "tahq-7.1-host0"], "tahq-7.2-"),
        (["tahq-7.1-host0"], "tahq-7-"),
    ],
)
def test_second_network_of_a_process_gets_names_of_its_own(taken, prefix):
    assert namespace_prefix(7, taken) == prefix


@pytest.mark.parametrize(
    ("name", "pid"),
    [
        ("tahq-12-host0", 12),
        ("tahq-12.3-my-host", 12),
        ("tahq-12-_switch", 12),
        ("tahq-x-host0", None),
        ("tahq-12", None),
        ("my-tahq-12-host0", None),
    ],
)
def test_name_tells_its_owner(name, pid):
    assert owner_pid(name) == pid


def test_addresses_and_macs_are_distinct():
    indices = range(MAX_HOSTS)
    assert len({host_address(index) for index in indices}) == len({host_mac(index) for index in indices}) == MAX_HOSTS
    assert host_address(MAX_HOSTS - 1) == "10.77.0.250"
