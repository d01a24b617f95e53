import errno
import os
import platform

import pytest
from pyroute2 import IPRoute, NetlinkError

from tahq.errors import NetworkError
from tahq_netem.backends.choice import build_network
from tahq_netem.backends.probe import PARTS, Probe, probe
from tahq_netem.network.description import PairConfig, PathShape, plan_network, uniform

UNSHAPED = plan_network(uniform(2))
RATES = plan_network(uniform(2, rate=1e8))
CAPPED = UNSHAPED.with_path("host0", "host1", PathShape(rate_bits_per_s=1e6))
DELAYED = plan_network(uniform(2, delay=0.01))
LOSSY = plan_network(uniform(2, loss=0.01))
NO_ROOT = Probe(False, "network namespaces need root", {}, ("cubic",))


def found(*missing: str) -> Probe:
    return Probe(True, None, {name: name not in missing for name in PARTS}, ("reno", "cubic"))


def test_every_missing_part_is_listed_with_what_that_means():
    lines = found("netem", "tun").lines()
    assert [line.split()[0] for line in lines] == ["kernel", "root", "namespaces", *PARTS, "TCP"]
    text = {line.split()[0]: line for line in lines}
    assert text["htb"].split() == ["htb", "yes"]
    assert "no (module sch_netem): without it, backend kernel shapes rates only" in text["netem"]
    assert "backend tun does not work" in text["tun"]


def test_without_namespaces_nothing_else_was_tried():
    text = "\n".join(NO_ROOT.lines())
    assert "no: network namespaces need root; without them there are no hosts" in text
    assert text.count("not tried") == len(PARTS)


@pytest.mark.netns
def test_probe_finds_what_this_machine_has_and_leaves_nothing(own_namespaces):
    here = probe()
    assert here.kernel == platform.release()
    assert here.is_root == (os.geteuid() == 0)
    assert here.namespaces_obstacle is None
    assert here.parts.keys() == PARTS.keys()
    assert "cubic" in here.congestion_controls or "reno" in here.congestion_controls


@pytest.mark.netns
def test_part_that_fails_half_way_does_not_make_others_fail(own_namespaces, monkeypatch):
    class WithoutClasses(IPRoute):
        def tc(self, command, *arguments, **options):
            if command == "add-class":
                raise NetlinkError(errno.EINVAL, "Invalid argument")
            return self.__getattr__("tc")(command, *arguments, **options)

    usual = probe().parts
    monkeypatch.setattr("tahq_netem.backends.namespaces.IPRoute", WithoutClasses)
    assert probe().parts == {**usual, "htb": False}


@pytest.mark.netns
@pytest.mark.parametrize("error", [OSError(errno.EROFS, "x"), NetlinkError(errno.EPERM, "x"), NetworkError("x")])
def test_namespace_that_cannot_be_prepared_is_none(own_namespaces, monkeypatch, error):
    def refuse():
        raise error

    monkeypatch.setattr("tahq_netem.backends.namespaces._prepare", refuse)
    here = probe()
    assert here.namespaces_obstacle is not None
    assert here.parts == {}


@pytest.mark.netns
def test_namespace_that_cannot_be_entered_is_none(own_namespaces, monkeypatch):
    def refuse(_namespace):
        raise NetworkError("cannot enter it")

    monkeypatch.setattr("tahq_netem.backends.probe.netlink", refuse)
    assert probe().namespaces_obstacle == "cannot enter it"


@pytest.mark.netns
def test_what_the_probe_finds_can_be_used(own_namespaces):
    """A part that is said to work does work in a network: here veth, bridge, htb and u32."""
    if probe().obstacle("kernel", CAPPED):
        pytest.skip("this kernel lacks a part of the kernel backend")
    config = uniform(2, rate=1e7).model_copy(update={"pairs": [PairConfig(between=("host0", "host1"), rate=1e6)]})
    with build_network(config, backend="kernel") as network:
        assert network.backend == "kernel"
