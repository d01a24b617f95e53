"""What `links.first` and `links.cap_up` make of frames that share an uplink, on a network of namespaces with real TCP.

Three hosts. The one in the middle sends, each `PERIOD_S`, an activation to the next host and right after it a smaller
gradient to the host before, both through one uplink of 20 Mbit/s that they keep nine tenths busy. Told is how long
frames of each kind take from `send` to `recv`. Without a cap everything is handed to TCP at once, and no order is kept.

Needs root. Run:  python benchmarks/bench_link_order.py [--output benchmarks/results/link_order_<hardware>_<yyyymm>.md]
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from machine import describe

from tahq.comm.link.frame import Direction, Frame, LogicalId, Purpose
from tahq.comm.link.shaping import Shaping
from tahq.comm.link.spec import PeerIdentity
from tahq.comm.zmq.endpoint import ZmqEndpoint
from tahq_netem.description import uniform
from tahq_netem.network import Network, build_network

UP = 20e6
CAPS = {"none": None, "95 %": 0.95 * UP * 1448 / 1514}
ORDERS = ("oldest", "activations", "gradients")
NBYTES = {Direction.FORWARD: 800_000, Direction.BACKWARD: 270_000}
PERIOD_S = 0.5
DELAY_S = 0.01
PORT = 7000
SOON_S = 60.0
LINK_OF = {Direction.BACKWARD: 0, Direction.FORWARD: 1}


def make_id(number: int, direction: Direction) -> LogicalId:
    return LogicalId(1, 0, 0, Purpose.TRAIN, number, 0, direction)


def open_endpoint(stage: int, bind: str, first: str = "oldest", cap: float | None = None) -> ZmqEndpoint:
    return ZmqEndpoint(
        identity=PeerIdentity(1, 1, stage, "bench"),
        bind=bind,
        advertise=None,
        shaping=Shaping(cap_up_bits_per_s=cap),
        peer_timeout_s=30.0,
        heartbeat_s=2.0,
        first=first,
    )


def receive(direction: Direction, address: str, count: int) -> list[float]:
    """The host at one end: when each frame was there, by the clock that all hosts of this machine share."""
    stage = 2 * LINK_OF[direction]
    endpoint = open_endpoint(stage, address)
    link = endpoint.open_link(LINK_OF[direction], 1, "middle", "")
    for number in range(count):
        link.expect(make_id(number, direction), NBYTES[direction])
    times_s = []
    for _ in range(count):
        link.recv(SOON_S)
        times_s.append(time.monotonic())
    endpoint.close()
    return times_s


def send(addresses: dict[Direction, str], first: str, cap: float | None, count: int) -> list[float]:
    """The host in the middle: when it sent each pair."""
    endpoint = open_endpoint(1, "", first, cap)
    links = {
        direction: endpoint.open_link(LINK_OF[direction], 2 * LINK_OF[direction], "end", address)
        for direction, address in addresses.items()
    }
    endpoint.wait_connected(SOON_S)
    times_s = []
    for number in range(count):
        times_s.append(time.monotonic())
        for direction, link in links.items():
            nbytes = NBYTES[direction]
            payload = torch.zeros(nbytes, dtype=torch.uint8)
            link.send(Frame(make_id(number, direction), 0, torch.uint8, (nbytes,), payload))
        time.sleep(max(0.0, times_s[0] + (number + 1) * PERIOD_S - time.monotonic()))
    endpoint.close(SOON_S)
    return times_s


def start(network: Network, host: str, *arguments: object) -> "subprocess.Popen[str]":
    argv = [sys.executable, __file__, "--role", *map(str, arguments)]
    return network.popen(host, argv, stdout=subprocess.PIPE, text=True)


def measure(first: str, cap: float | None, count: int) -> dict[Direction, list[float]]:
    """Seconds of each frame from `send` to `recv`, by direction."""
    with build_network(uniform(3, up=UP, delay=DELAY_S)) as network:
        places = {Direction.FORWARD: "host2", Direction.BACKWARD: "host0"}
        addresses = {direction: f"{network.address(host)}:{PORT}" for direction, host in places.items()}
        ends = {way: start(network, places[way], "receive", int(way), addresses[way], count) for way in places}
        middle = start(network, "host1", "send", *addresses.values(), first, cap or 0.0, count)
        sent_s = json.loads(middle.communicate(timeout=600)[0])
        arrived_s = {way: json.loads(end.communicate(timeout=60)[0]) for way, end in ends.items()}
    return {
        way: [late - early for early, late in zip(sent_s, times_s, strict=True)] for way, times_s in arrived_s.items()
    }


def play(role: str, *arguments: str) -> None:
    """What a host of the network runs."""
    if role == "receive":
        way, address, count = arguments
        print(json.dumps(receive(Direction(int(way)), address, int(count))))
    else:
        forward, backward, first, cap, count = arguments
        addresses = {Direction.FORWARD: forward, Direction.BACKWARD: backward}
        print(json.dumps(send(addresses, first, float(cap) or None, int(count))))


def report(count: int) -> str:
    lines = [
        "# What goes first on an uplink",
        "",
        f"{describe()}. `python benchmarks/bench_link_order.py --count {count}`",
        "",
        f"Milliseconds from `send` to `recv`, medians of {count}, with least and most.",
        "",
        "| first | cap_up | activations | gradients |",
        "|---|---|---|---|",
    ]
    for cap_name, cap in CAPS.items():
        for first in ORDERS:
            took_s = measure(first, cap, count)
            cells = (_cell(took_s[way]) for way in (Direction.FORWARD, Direction.BACKWARD))
            lines.append(f"| {first} | {cap_name} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _cell(took_s: list[float]) -> str:
    return f"{1e3 * statistics.median(took_s):.0f} ({1e3 * min(took_s):.0f} to {1e3 * max(took_s):.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=20, help="pairs of frames with each setting")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--role", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        play(*options.role)
        return
    text = report(options.count)
    print(text)
    if options.output is not None:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
