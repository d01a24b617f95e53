"""What somebody is told whose machine cannot make hosts: by the kernel's refusals, not by the backends' names."""

import errno

import pytest
from pyroute2 import IPRoute, NetlinkError

from tahq.errors import NetworkError
from tahq_netem import backend_choice
from tahq_netem.backend_choice import backend_of_own_hosts
from tahq_netem.description import uniform
from tahq_netem.probe import PARTS, Probe

NO_ROOT = Probe(False, "network namespaces need root", {}, ("cubic",))


def found(*missing: str) -> Probe:
    return Probe(True, None, {name: name not in missing for name in PARTS}, ("reno", "cubic"))


@pytest.fixture
def choose(monkeypatch):
    """choose(probed, config, wanted) is the backend, on a machine where the probe finds that."""

    def call(probed: Probe, config, wanted="auto"):
        monkeypatch.setattr(backend_choice, "probe", lambda: probed)
        return backend_of_own_hosts(config, wanted, "--backend", "run it as root")

    return call


DELAYED = uniform(2, rate=1e7, delay=0.01)


@pytest.mark.parametrize(
    ("probed", "config", "wanted", "backend"),
    [
        (found(), DELAYED, "auto", "kernel"),
        (found(), DELAYED, "tun", "tun"),
        (found("netem"), DELAYED, "auto", "tun"),
        (found("veth"), DELAYED, "auto", "tun"),
        (found("tun", "netem"), uniform(2, rate=1e7), "auto", "kernel"),
        (NO_ROOT, DELAYED, "relay", "relay"),
    ],
)
def test_backend_that_gives_hosts_of_their_own(choose, probed, config, wanted, backend):
    assert choose(probed, config, wanted) == backend


@pytest.mark.parametrize(
    ("probed", "wanted", "message"),
    [
        (NO_ROOT, "auto", "no hosts in namespaces here: network namespaces need root; run it as root"),
        (NO_ROOT, "kernel", "network namespaces need root; run it as root"),
        (found("netem"), "kernel", r"no netem \(module sch_netem\); leave --backend at auto, which takes tun"),
        (found("tun"), "tun", r"no tun \(module tun\); leave --backend at auto, which takes kernel"),
        (found("tun", "netem"), "auto", r"kernel: .* no netem .*; backend tun: .* no tun .* \(modprobe\)"),
        (found("tun", "netem"), "tun", r"kernel: .* no netem .*; backend tun: .* no tun .* \(modprobe\)"),
    ],
)
def test_refusal_says_what_is_missing_and_what_to_do(choose, probed, wanted, message):
    with pytest.raises(NetworkError, match=message) as caught:
        choose(probed, DELAYED, wanted)
    assert "\n" not in str(caught.value)


def test_relay_is_refused_what_only_packets_have(choose):
    with pytest.raises(NetworkError, match="no packets, and so no loss"):
        choose(NO_ROOT, uniform(2, loss=0.01), "relay")


@pytest.fixture
def kernel_without(monkeypatch):
    """kernel_without("veth", …): the kernel refuses links of these kinds as it does without their modules."""

    def refuse(*kinds: str) -> None:
        class Refusing(IPRoute):
            def link(self, command, **options):
                if options.get("kind") in kinds:
                    raise NetlinkError(errno.EOPNOTSUPP, "Operation not supported")
                return self.__getattr__("link")(command, **options)

        monkeypatch.setattr("tahq_netem.namespaces.IPRoute", Refusing)

    return refuse


@pytest.mark.netns
def test_kernel_without_veth_still_has_tun(kernel_without, own_namespaces):
    kernel_without("veth", "bridge")
    assert backend_of_own_hosts(DELAYED, "auto", "--backend", "") == "tun"
    with pytest.raises(
        NetworkError, match=r"this kernel has no veth \(module veth\), bridge .*at auto, which takes tun"
    ):
        backend_of_own_hosts(uniform(2, rate=1e7), "kernel", "--backend", "")


@pytest.mark.netns
def test_kernel_without_veth_and_tun_has_no_hosts(kernel_without, own_namespaces, monkeypatch):
    kernel_without("veth")
    monkeypatch.setattr("tahq_netem.tun_device._TUN", "/dev/net/no-such-device")
    with pytest.raises(NetworkError, match=r"no veth \(module veth\).*no tun \(module tun\).*modprobe"):
        backend_of_own_hosts(uniform(2, rate=1e7), "auto", "--backend", "")
