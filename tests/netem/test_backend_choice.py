"""The choice of a backend: by the kernel's refusals, and with errors that say what to do."""

import errno

import pytest
from pyroute2 import IPRoute, NetlinkError

from tahq.errors import NetworkError
from tahq_netem.backends.choice import choose_backend
from tahq_netem.backends.probe import PARTS, Probe, probe
from tahq_netem.network.description import PathShape, plan_network, uniform

UNSHAPED = plan_network(uniform(2))
RATES = plan_network(uniform(2, rate=1e8))
CAPPED = UNSHAPED.with_path("host0", "host1", PathShape(rate_bits_per_s=1e6))
DELAYED = plan_network(uniform(2, rate=1e7, delay=0.01))
LOSSY = plan_network(uniform(2, loss=0.01))
NO_ROOT = Probe(False, "network namespaces need root", {}, ("cubic",))


def found(*missing: str) -> Probe:
    return Probe(True, None, {name: name not in missing for name in PARTS}, ("reno", "cubic"))


@pytest.mark.parametrize(
    ("missing", "plan", "wanted", "backend"),
    [
        ((), UNSHAPED, "auto", "kernel"),
        ((), LOSSY, "auto", "kernel"),
        ((), DELAYED, "tun", "tun"),
        (("netem",), UNSHAPED, "auto", "tun"),
        (("netem",), UNSHAPED, "kernel", "kernel"),
        (("netem",), DELAYED, "auto", "tun"),
        (("netem", "tun"), RATES, "auto", "kernel"),
        (("veth",), LOSSY, "auto", "tun"),
        (("u32", "tun"), RATES, "auto", "kernel"),
        (("u32",), LOSSY, "auto", "tun"),
        (("u32", "netem"), DELAYED, "auto", "tun"),
    ],
)
def test_best_backend_that_can_build_the_network_is_chosen(missing, plan, wanted, backend):
    assert choose_backend(plan, found(*missing), wanted) == backend


def test_kernel_without_netem_comes_first_where_rates_are_all_that_is_ever_needed():
    assert choose_backend(RATES, found("netem"), rates_only=True) == "kernel"
    assert choose_backend(DELAYED, found("netem"), rates_only=True) == "tun"


@pytest.mark.parametrize(
    ("probed", "plan", "wanted", "message"),
    [
        (NO_ROOT, DELAYED, "auto", "hosts need network namespaces: network namespaces need root; run it as root"),
        (NO_ROOT, DELAYED, "kernel", "network namespaces need root; run it as root"),
        (found("netem"), DELAYED, "kernel", r"no netem \(module sch_netem\); leave backend at auto, which takes tun"),
        (found("tun"), DELAYED, "tun", r"no tun \(module tun\); leave backend at auto, which takes kernel"),
        (found("tun", "htb"), RATES, "tun", r"no tun \(module tun\), htb \(module sch_htb\)"),
        (found("u32"), CAPPED, "auto", r"kernel: .* no u32 .*; backend tun: .* no u32 .* \(modprobe\)"),
        (found("tun", "netem"), DELAYED, "auto", r"tun: .* no tun .*; backend kernel: .* no netem .* \(modprobe\)"),
        (found("tun", "netem"), DELAYED, "tun", r"tun: .* no tun .*; backend kernel: .* no netem .* \(modprobe\)"),
    ],
)
def test_refusal_says_what_is_missing_and_what_to_do(probed, plan, wanted, message):
    with pytest.raises(NetworkError, match=message) as caught:
        choose_backend(plan, probed, wanted)
    assert "\n" not in str(caught.value)


@pytest.fixture
def kernel_without(monkeypatch):
    """kernel_without("veth", …): the kernel refuses links of these kinds as it does without their modules."""

    def refuse(*kinds: str) -> None:
        class Refusing(IPRoute):
            def link(self, command, **options):
                if options.get("kind") in kinds:
                    raise NetlinkError(errno.EOPNOTSUPP, "Operation not supported")
                return self.__getattr__("link")(command, **options)

        monkeypatch.setattr("tahq_netem.backends.namespaces.IPRoute", Refusing)

    return refuse


@pytest.mark.netns
def test_kernel_without_veth_still_has_tun(kernel_without, own_namespaces):
    kernel_without("veth", "bridge")
    assert choose_backend(DELAYED, probe()) == "tun"
    with pytest.raises(NetworkError, match=r"no veth \(module veth\), bridge .*at auto, which takes tun"):
        choose_backend(RATES, probe(), "kernel")


@pytest.mark.netns
def test_kernel_without_veth_and_tun_has_no_hosts(kernel_without, own_namespaces, monkeypatch):
    kernel_without("veth")
    monkeypatch.setattr("tahq_netem.backends.tun._TUN", "/dev/net/no-such-device")
    with pytest.raises(NetworkError, match=r"no tun \(module tun\).*no veth \(module veth\).*modprobe"):
        choose_backend(RATES, probe())
