"""Links over a path whose round trip is long for the window that its hosts give TCP.

A sender of 64 kB at most, acknowledged after 100 ms, comes to 5 Mbit/s a connection, whatever else the machine does;
the path carries 100.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import support

from tahq_netem.backends.namespaces import write_sysctl
from tahq_netem.network.description import uniform

pytestmark = [pytest.mark.netns, pytest.mark.serial]

PORT = 7000
WINDOW_NBYTES = 64 * 1024
DELAY_S = 0.05
AT_MOST = 8 * WINDOW_NBYTES / (2 * DELAY_S)
"""Of one connection, in bit/s."""

TRANSFER = str(Path(support.__file__).with_name("link_transfer.py"))


@pytest.fixture
def network(build):
    network = build("tun", uniform(2, rate=1e8, delay=DELAY_S))
    write_sysctl(network.namespace("host0"), "net.ipv4.tcp_wmem", f"4096 16384 {WINDOW_NBYTES}")
    return network


def begin(network, host: str, *argv: str) -> subprocess.Popen[str]:
    """A Python program on a host; ADDRESS stands for where host1 listens."""
    address = f"{network.address('host1')}:{PORT}"
    words = [sys.executable, *(address if word == "ADDRESS" else word for word in argv)]
    return network.popen(host, words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def goodputs(program: subprocess.Popen[str]) -> dict[int, float]:
    """Bits a second from host0 to host1 by number of connections, as this program has printed them."""
    output, _ = program.communicate(timeout=60)
    return {int(number): goodput for number, goodput in json.loads(output).items()}


@pytest.mark.acceptance
def test_link_of_four_connections_carries_what_one_cannot(network):
    receiver = begin(network, "host1", TRANSFER, "receive", "ADDRESS", "1", "4")
    got = goodputs(begin(network, "host0", TRANSFER, "send", "ADDRESS", "1", "4"))
    assert receiver.wait(20) == 0
    assert got[1] < AT_MOST
    assert got[4] > 2 * got[1], got
