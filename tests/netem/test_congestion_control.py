from pathlib import Path

import pytest

from tahq.errors import NetworkError
from tahq_netem.backends.namespace_group import NamespaceGroup, set_congestion_control
from tahq_netem.backends.namespaces import read_sysctl

pytestmark = pytest.mark.netns

SYSCTL = Path("/proc/sys/net/ipv4")


@pytest.fixture
def namespace(own_namespaces):
    group = NamespaceGroup(["a"])
    yield group["a"]
    group.close()


def test_every_algorithm_of_the_kernel_can_be_set(namespace):
    allowed = (SYSCTL / "tcp_allowed_congestion_control").read_text()
    for name in (SYSCTL / "tcp_available_congestion_control").read_text().split():
        assert set_congestion_control(namespace, name) == name
        assert read_sysctl(namespace, "net.ipv4.tcp_congestion_control") == name
    assert (SYSCTL / "tcp_allowed_congestion_control").read_text() == allowed


def test_cubic_is_the_default_where_there_is_one(namespace):
    available = (SYSCTL / "tcp_available_congestion_control").read_text().split()
    before = read_sysctl(namespace, "net.ipv4.tcp_congestion_control")
    assert set_congestion_control(namespace, None) == ("cubic" if "cubic" in available else before)


def test_machine_keeps_its_own(namespace):
    before = (SYSCTL / "tcp_congestion_control").read_text()
    set_congestion_control(namespace, "reno")
    assert (SYSCTL / "tcp_congestion_control").read_text() == before


def test_unknown_algorithm_is_refused_with_those_there_are(namespace):
    with pytest.raises(NetworkError, match=r"no congestion control warp.*this kernel has .*reno"):
        set_congestion_control(namespace, "warp")
