"""What this machine can do, and the choice of a backend by it, with errors that say what to do."""

import errno
import os
import platform
import socket
import struct
from contextlib import nullcontext

import pytest

from tahq.comm.network_config import PairConfig
from tahq.errors import NetworkError
from tahq_netem.backends import namespaces
from tahq_netem.backends.choice import PARTS, Probe, build_network, choose_backend, probe
from tahq_netem.network.description import PathShape, plan_network, uniform

UNSHAPED = plan_network(uniform(2))
RATES = plan_network(uniform(2, rate=1e8))
CAPPED = UNSHAPED.with_path("host0", "host1", PathShape(rate_bits_per_s=1e6))
DELAYED = plan_network(uniform(2, rate=1e7, delay=0.01))
LOSSY = plan_network(uniform(2, loss=0.01))
ERROR, DONE, CONNECTION = 2, 3, 20  # types of netlink messages
NO_ROOT = Probe(False, "network namespaces need root", {}, ("cubic",))


def found(*missing: str) -> Probe:
    return Probe(True, None, {name: name not in missing for name in PARTS}, ("reno", "cubic"))


@pytest.mark.parametrize(
    ("missing", "plan", "wanted", "backend"),
    [
        ((), UNSHAPED, "auto", "kernel"),
        ((), DELAYED, "tun", "tun"),
        (("netem",), UNSHAPED, "kernel", "kernel"),
        (("netem",), DELAYED, "auto", "tun"),
        (("netem", "tun"), RATES, "auto", "kernel"),
        (("veth",), LOSSY, "auto", "tun"),
        (("u32", "tun"), RATES, "auto", "kernel"),
    ],
)
def test_best_backend_that_can_build_the_network_is_chosen(missing, plan, wanted, backend):
    assert choose_backend(plan, found(*missing), wanted) == backend


def test_kernel_without_netem_comes_first_where_only_rates_are_ever_needed():
    assert choose_backend(RATES, found("netem"), rates_only=True) == "kernel"
    assert choose_backend(DELAYED, found("netem"), rates_only=True) == "tun"


@pytest.mark.parametrize(
    ("probed", "plan", "wanted", "message"),
    [
        (NO_ROOT, DELAYED, "auto", "hosts need network namespaces: network namespaces need root; run it as root"),
        (found("netem"), DELAYED, "kernel", r"no netem \(module sch_netem\); leave backend at auto, which takes tun"),
        (found("tun"), DELAYED, "tun", r"no tun \(module tun\); leave backend at auto, which takes kernel"),
        (found("tun", "htb"), RATES, "tun", r"no tun \(module tun\), htb \(module sch_htb\)"),
        (found("u32"), CAPPED, "auto", r"kernel: .* no u32 .*; backend tun: .* no u32 .* \(modprobe\)"),
        (found("tun", "netem"), DELAYED, "auto", r"tun: .* no tun .*; backend kernel: .* no netem .* \(modprobe\)"),
    ],
)
def test_refusal_says_what_is_missing_and_what_to_do(probed, plan, wanted, message):
    with pytest.raises(NetworkError, match=message) as caught:
        choose_backend(plan, probed, wanted)
    assert "\n" not in str(caught.value)


def test_every_missing_part_is_listed_with_its_consequence():
    lines = found("netem", "tun").lines()
    assert [line.split()[0] for line in lines] == ["kernel", "root", "namespaces", *PARTS, "TCP"]
    text = {line.split()[0]: line for line in lines}
    assert text["htb"].split() == ["htb", "yes"]
    assert "no (module sch_netem): without it, backend kernel shapes rates only" in text["netem"]
    assert "backend tun does not work" in text["tun"]
    without_namespaces = "\n".join(NO_ROOT.lines())
    assert "no: network namespaces need root; without them there are no hosts" in without_namespaces
    assert without_namespaces.count("not tried") == len(PARTS)


def answer(kind: int, body: bytes) -> bytes:
    return struct.pack("=IHHII", 16 + len(body), kind, 0, 0, 0) + body


def status(number: int = 0, kind: int = ERROR) -> bytes:
    return answer(kind, struct.pack("=i", -number))


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ((status(kind=DONE), status(errno.ENOENT)), None),
        ((answer(CONNECTION, bytes(72)) * 2, status(kind=DONE), status(errno.ENOENT)), None),
        # Without tcp_diag the kernel answers as if there was no connection.
        ((status(errno.ENOENT), status(errno.ENOENT)), "it has no module tcp_diag"),
        ((status(errno.ENOENT, DONE), status(errno.ENOENT)), "it has no module tcp_diag"),
        ((status(kind=DONE), status(errno.EOPNOTSUPP)), "CONFIG_INET_DIAG_DESTROY"),
        ((status(kind=DONE), status(errno.EPERM)), "Operation not permitted"),
    ],
)
def test_kernel_can_reset_if_it_lists_connections_and_looks_for_one(monkeypatch, answers, reason):
    kernel, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    monkeypatch.setattr(namespaces, "_diag_socket", lambda: kernel)
    with far:
        for each in answers:
            far.send(each)
        with pytest.raises(NetworkError, match=reason) if reason else nullcontext():
            namespaces.try_reset()


@pytest.mark.netns
def test_probe_finds_the_parts_of_this_machine_and_leaves_nothing(own_namespaces):
    here = probe()
    assert (here.kernel, here.is_root) == (platform.release(), os.geteuid() == 0)
    assert here.namespaces_obstacle is None
    assert here.parts.keys() == PARTS.keys()
    assert {"cubic", "reno"} & {*here.congestion_controls}
    if here.obstacle("kernel", CAPPED) is None:  # a part that is said to work does work in a network
        pair = PairConfig(between=("host0", "host1"), rate=1e6)
        with build_network(uniform(2, rate=1e7).model_copy(update={"pairs": [pair]}), backend="kernel") as network:
            assert network.backend == "kernel"
