"""What TCP carries of a pipeline's links when both directions of all are full: the most that any runtime can use.

    python benchmarks/bench_two_way.py [--output benchmarks/results/two_way_<hardware>_<yyyymm>.md]

Hosts in a row, in network namespaces; each sends all the time to the next one (`forward`), or to both neighbours
(`both`), over a plain socket each, and nothing else runs. A host in the middle then fills its uplink and its downlink,
each shared by two connections, and its acknowledgements wait behind its own data. Said is what came of each such
host's uplink, as a share of its rate and of what one connection alone carries of that (1448 of 1514 bytes); and what
the last host, which only acknowledges where all send forward, puts on the wire for a byte that it gets.

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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from harness import describe

from tahq.comm.network_model import GOODPUT_SHARE
from tahq_netem.backends.choice import build_network
from tahq_netem.backends.network import Network
from tahq_netem.network.description import uniform

PORT = 7000
CHUNK = bytes(256 * 1024)
CONTROLS = ("cubic", "bbr")


@dataclass(frozen=True, slots=True)
class Counted:
    """What one host saw in the seconds that count."""

    received: dict[str, int]
    """Bytes of data by sender."""
    wire_nbytes: int
    """What left its network device, headers included."""


# -- on a host -----------------------------------------------------------------------------------


class Host:
    """Listens, dials, sends without end and counts what comes."""

    def __init__(self, address: str) -> None:
        self._listener = socket.create_server((address, PORT), backlog=8)
        self._received: dict[str, int] = {}

    def receive(self) -> None:
        """From whoever dials in, each in a thread."""
        while True:
            connection, (peer, _) = self._listener.accept()
            threading.Thread(target=self._count, args=(connection, peer), daemon=True).start()

    def _count(self, connection: socket.socket, peer: str) -> None:
        buffer = bytearray(len(CHUNK))
        self._received[peer] = 0
        while nbytes := connection.recv_into(buffer):
            self._received[peer] += nbytes

    def received(self) -> dict[str, int]:
        """Bytes so far, by sender."""
        return dict(self._received)


def send(address: str) -> None:
    """To one peer, without end."""
    deadline_s = time.monotonic() + 10.0
    while True:
        try:
            connection = socket.create_connection((address, PORT))
            break
        except ConnectionRefusedError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.05)
    with connection:
        while True:
            connection.sendall(CHUNK)


def play(address: str, settle_s: float, seconds: float, targets: Sequence[str]) -> None:
    """Send to the targets; print what came in the seconds that count, by sender."""
    host = Host(address)
    for task, arguments in [(host.receive, ()), *((send, (target,)) for target in targets)]:
        threading.Thread(target=task, args=arguments, daemon=True).start()
    time.sleep(settle_s)
    before, sent_before = host.received(), sent_nbytes()
    time.sleep(seconds)
    after, sent_after = host.received(), sent_nbytes()
    received = {peer: count - before.get(peer, 0) for peer, count in after.items()}
    print(json.dumps(asdict(Counted(received, sent_after - sent_before))), flush=True)
    time.sleep(1.0)  # others may still be counting


def sent_nbytes() -> int:
    """What all devices of this namespace but loopback have sent so far."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    devices = (line.partition(":") for line in lines)
    return sum(int(counters.split()[8]) for name, _, counters in devices if name.strip() != "lo")


# -- on this machine -----------------------------------------------------------------------------


def neighbours(place: int, num_hosts: int, pattern: str) -> list[int]:
    """To whom a host sends."""
    ahead = [place + 1] if place + 1 < num_hosts else []
    return ahead if pattern == "forward" else [*([place - 1] if place else []), *ahead]


def measure(network: Network, pattern: str, settle_s: float, seconds: float) -> dict[str, Counted]:
    """What was counted, by the host's address."""
    hosts = list(network.plan.hosts)
    running = []
    for place, host in enumerate(hosts):
        targets = [network.address(hosts[peer]) for peer in neighbours(place, len(hosts), pattern)]
        argv = [sys.executable, __file__, "--play", network.address(host), str(settle_s), str(seconds), *targets]
        running.append(network.popen(host, argv, stdout=subprocess.PIPE, text=True))
    found = [json.loads(process.communicate(timeout=settle_s + seconds + 60)[0]) for process in running]
    return {network.address(host): Counted(**counted) for host, counted in zip(hosts, found, strict=True)}


def sent_by_middle(counted: Mapping[str, Counted], seconds: float) -> list[float]:
    """Bits a second of each host that has two neighbours."""
    hosts = list(counted)
    return [8 * sum(row.received.get(host, 0) for row in counted.values()) / seconds for host in hosts[1:-1]]


def acknowledged(counted: Mapping[str, Counted]) -> float:
    """Bytes on the wire for each byte received, of the last host, which sends no data."""
    last = list(counted.values())[-1]
    return last.wire_nbytes / sum(last.received.values())


def report(options: argparse.Namespace) -> str:
    lines = [
        "# What TCP carries when both directions are full",
        "",
        f"{describe()}. `python benchmarks/bench_two_way.py --hosts {options.hosts} --seconds {options.seconds:g} "
        f"--settle {options.settle:g}`",
        "",
        f"{options.hosts} hosts in a row in namespaces, rates of each one's uplink and of its downlink. Goodput of the",
        "uplinks of those in the middle, mean over them and over the seconds, as a share of the rate and, in brackets,",
        "of what one connection alone carries of it.",
        "",
        "| Mbit/s | round trip, ms | TCP | forward only | both ways | acknowledging a byte, forward only |",
        "|---|---|---|---|---|---|",
    ]
    for mbits, delay_ms in options.networks:
        for control in options.controls:
            config = uniform(options.hosts, rate=1e6 * mbits, delay=delay_ms / 2e3).model_copy(
                update={"congestion_control": control, "tcp_slow_start_after_idle": False}
            )
            cells = []
            for pattern in ("forward", "both"):
                with build_network(config) as network:
                    counted = measure(network, pattern, options.settle, options.seconds)
                share = statistics.fmean(sent_by_middle(counted, options.seconds)) / (1e6 * mbits)
                cells.append(f"{share:.3f} ({share / GOODPUT_SHARE:.3f})")
                if pattern == "forward":
                    acknowledging = f"{acknowledged(counted):.4f}"
            lines.append(f"| {mbits:g} | {delay_ms:g} | {control} | {' | '.join(cells)} | {acknowledging} |")
            print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument(
        *("--networks", "-n"),
        type=lambda text: tuple(map(float, text.split("/"))),
        nargs="+",
        default=[(300.0, 0.0), (100.0, 0.0), (20.0, 0.0), (100.0, 50.0)],
        help="Mbit/s and round trip in ms, such as 100/50",
    )
    parser.add_argument("--controls", nargs="+", default=list(CONTROLS), help="TCP's congestion controls")
    parser.add_argument("--settle", type=float, default=6.0, help="seconds that do not count")
    parser.add_argument("--seconds", type=float, default=10.0, help="that do")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--play", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.play:
        address, settle_s, seconds, *targets = options.play
        play(address, float(settle_s), float(seconds), targets)
        return
    text = report(options)
    print(text)
    if options.output is not None:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
