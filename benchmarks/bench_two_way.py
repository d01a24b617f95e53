"""What TCP carries when both directions are full: the most that any runtime can use of a pipeline's links.

    python benchmarks/bench_two_way.py [--output benchmarks/results/two_way_<hardware>_<yyyymm>.md]

Hosts in a row, in network namespaces; each sends all the time to the next host (`forward`) or to both neighbours
(`both`), over one plain socket per neighbour. A host in the middle then fills its uplink and its downlink, each shared
by two connections, and its acknowledgements wait behind its own data. The table has the goodput of the uplinks of the
hosts in the middle as a share of the rate and, in brackets, of what a single connection carries (1448 of 1514 bytes);
and how many bytes the last host, which only acknowledges when all send forward, sends for each byte it receives.

Needs root and a quiet machine.
"""

import argparse
import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from harness import Table, main

from tahq.comm.network_model import GOODPUT_SHARE
from tahq_netem.backends.choice import build_network
from tahq_netem.backends.network import Network
from tahq_netem.network.description import uniform

PORT = 7000
CHUNK = bytes(256 * 1024)
HOSTS = 4
SETTLE_S = 6.0

# -- on a host -----------------------------------------------------------------------------------


def receive(listener: socket.socket, received: dict[str, int]) -> None:
    """Count the bytes from every sender, each in a thread."""
    while True:
        connection, (peer, _) = listener.accept()
        threading.Thread(target=count, args=(connection, peer, received), daemon=True).start()


def count(connection: socket.socket, peer: str, received: dict[str, int]) -> None:
    buffer = bytearray(len(CHUNK))
    received[peer] = 0
    while nbytes := connection.recv_into(buffer):
        received[peer] += nbytes


def send(address: str) -> None:
    """Send to one peer until the process ends."""
    deadline_s = time.monotonic() + 10.0
    while True:
        try:
            connection = socket.create_connection((address, PORT))
            break
        except ConnectionRefusedError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.05)
    while True:
        connection.sendall(CHUNK)


def play(address: str, seconds: float, targets: Sequence[str]) -> None:
    """Send to the targets; print the bytes received by sender, and the bytes sent on the wire, of the counted time."""
    received: dict[str, int] = {}
    listener = socket.create_server((address, PORT), backlog=8)
    for task, arguments in [(receive, (listener, received)), *((send, (target,)) for target in targets)]:
        threading.Thread(target=task, args=arguments, daemon=True).start()
    time.sleep(SETTLE_S)
    before, sent_before = dict(received), sent_nbytes()
    time.sleep(seconds)
    after, sent_after = dict(received), sent_nbytes()
    counted = {peer: nbytes - before.get(peer, 0) for peer, nbytes in after.items()}
    print(json.dumps({"received": counted, "wire_nbytes": sent_after - sent_before}), flush=True)
    time.sleep(1.0)  # others may still be counting


def sent_nbytes() -> int:
    """Bytes sent so far by all devices of this namespace but loopback."""
    devices = (line.partition(":") for line in Path("/proc/self/net/dev").read_text().splitlines()[2:])
    return sum(int(counters.split()[8]) for name, _, counters in devices if name.strip() != "lo")


# -- on this machine -----------------------------------------------------------------------------


def neighbours(place: int, pattern: str) -> list[int]:
    """The hosts that a host sends to."""
    ahead = [place + 1] if place + 1 < HOSTS else []
    return ahead if pattern == "forward" else [*([place - 1] if place else []), *ahead]


def measure(network: Network, pattern: str, seconds: float) -> dict[str, dict[str, Any]]:
    """What `play` counted, by the host's address."""
    addresses = {host: network.address(host) for host in network.plan.hosts}
    running = []
    for place, (host, address) in enumerate(addresses.items()):
        targets = [list(addresses.values())[peer] for peer in neighbours(place, pattern)]
        argv = [sys.executable, __file__, "--play", address, str(seconds), *targets]
        running.append(network.popen(host, argv, stdout=subprocess.PIPE, text=True))
    found = [json.loads(process.communicate(timeout=SETTLE_S + seconds + 60)[0]) for process in running]
    return dict(zip(addresses.values(), found, strict=True))


def rows(options: argparse.Namespace) -> Iterator[list[str]]:
    for mbits, delay_ms in options.networks:
        for control in ("cubic", "bbr"):
            config = uniform(HOSTS, rate=1e6 * mbits, delay=delay_ms / 2e3).model_copy(
                update={"congestion_control": control, "tcp_slow_start_after_idle": False}
            )
            cells, acknowledging = [], ""
            for pattern in ("forward", "both"):
                with build_network(config) as network:
                    counted = measure(network, pattern, options.seconds)
                middle = list(counted)[1:-1]
                sent = [8 * sum(row["received"].get(host, 0) for row in counted.values()) for host in middle]
                share = statistics.fmean(sent) / options.seconds / (1e6 * mbits)
                cells.append(f"{share:.3f} ({share / GOODPUT_SHARE:.3f})")
                if pattern == "forward":
                    last = list(counted.values())[-1]
                    acknowledging = f"{last['wire_nbytes'] / sum(last['received'].values()):.4f}"
            yield [f"{mbits:g}", f"{delay_ms:g}", control, *cells, acknowledging]


def tables(options: argparse.Namespace) -> Iterator[Table]:
    columns = ("Mbit/s", "round trip, ms", "TCP", "forward only", "both ways", "bytes to acknowledge a byte")
    yield Table(columns, rows(options), f"{HOSTS} hosts in a row; rates of each host's uplink and downlink.")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--play"]:
        play(sys.argv[2], float(sys.argv[3]), sys.argv[4:])
    else:
        main(
            __doc__,
            tables,
            {
                "--networks": {
                    "type": lambda text: tuple(map(float, text.split("/"))),
                    "nargs": "+",
                    "default": [(300.0, 0.0), (100.0, 0.0), (20.0, 0.0), (100.0, 50.0)],
                    "help": "Mbit/s and round trip in ms, such as 100/50",
                },
                "--seconds": {"type": float, "default": 10.0, "help": "counted seconds"},
            },
        )
