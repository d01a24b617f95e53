"""How closely `links: {rate, delay}` is kept under `hosts: local`: goodput and one-way delay, measured.

Two processes, as two hosts, each with tahq's own endpoint on loopback and the given shaping. Goodput: payload
bits of a stream of 1 MB frames, from the first frame's arrival to the last one's. Delay: from `send` of a 64-byte
frame on an idle link to `recv`, by the clock that both processes share; the rate is 1 Gbit/s there, so that the frame
itself takes no time.

Run:  python benchmarks/bench_links.py [--output benchmarks/results/links_<hardware>_<yyyymm>.md]
"""

import argparse
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from machine import describe

from tahq.comm.link.frame import Direction, Frame, LogicalId, Purpose
from tahq.comm.link.shaping import Shaping
from tahq.comm.link.spec import PeerIdentity
from tahq.comm.transport import Transport
from tahq.comm.zmq.endpoint import ZmqEndpoint

RATES_MBIT = (20, 100, 300, 1000)
DELAYS_MS = (5, 20, 100)
FRAME_NBYTES = 1_000_000
SECONDS = 4.0
PINGS = 20


def make_id(number: int) -> LogicalId:
    return LogicalId(1, 0, 0, Purpose.TRAIN, number, 0, Direction.FORWARD)


def open_endpoint(stage: int, shaping: Shaping) -> ZmqEndpoint:
    return ZmqEndpoint(
        identity=PeerIdentity(1, 1, stage, "bench"),
        bind="127.0.0.1:0",
        advertise=None,
        shaping=shaping,
        peer_timeout_s=20.0,
        heartbeat_s=2.0,
    )


def send_frames(pipe: Connection, shaping: Shaping, count: int, nbytes: int, pause_s: float) -> None:
    """The sending host: as many frames as asked for; reports when each was given to the link."""
    endpoint = open_endpoint(0, shaping)
    pipe.send(endpoint.address)
    link = endpoint.open_link(0, 1, "receiver", "")
    endpoint.wait_connected(20.0)
    payload = torch.zeros(nbytes, dtype=torch.uint8)
    sent_s = []
    for number in range(count):
        time.sleep(pause_s)
        sent_s.append(time.monotonic())
        link.send(Frame(make_id(number), 0, torch.uint8, (nbytes,), payload))
    pipe.recv()
    pipe.send(sent_s)
    endpoint.close()


def receive_times(link: Transport, count: int, nbytes: int) -> list[float]:
    """When each frame was there whole."""
    for number in range(count):
        link.expect(make_id(number), nbytes)
    times_s = []
    for _ in range(count):
        link.recv(60.0)
        times_s.append(time.monotonic())
    return times_s


def transfer(shaping: Shaping, count: int, nbytes: int, pause_s: float = 0.0) -> tuple[list[float], list[float]]:
    """When `count` frames were sent and when they arrived."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=send_frames, args=(theirs, shaping, count, nbytes, pause_s), daemon=True)
    process.start()
    endpoint = open_endpoint(1, shaping)
    address = ours.recv()
    link = endpoint.open_link(0, 0, "sender", address)
    endpoint.wait_connected(20.0)
    arrived_s = receive_times(link, count, nbytes)
    ours.send("done")
    sent_s = ours.recv()
    process.join()
    endpoint.close()
    return sent_s, arrived_s


def measure_goodput(rate_mbit: int) -> float:
    """Mbit/s of payload over about `SECONDS` seconds."""
    count = max(4, round(SECONDS * rate_mbit * 1e6 / 8 / FRAME_NBYTES))
    _, arrived_s = transfer(Shaping(rate_mbit * 1e6, 0.01), count, FRAME_NBYTES)
    return (count - 1) * FRAME_NBYTES * 8 / (arrived_s[-1] - arrived_s[0]) / 1e6


def measure_delay(delay_ms: int) -> float:
    """Median one-way milliseconds of a small frame on an idle link."""
    sent_s, arrived_s = transfer(Shaping(1e9, delay_ms / 1e3), PINGS, 64, pause_s=2.5 * delay_ms / 1e3)
    return statistics.median(1e3 * (late - early) for early, late in zip(sent_s, arrived_s, strict=True))


def report(repeats: int) -> str:
    lines = [
        "# How closely links are shaped",
        "",
        f"{describe()}. `python benchmarks/bench_links.py --repeats {repeats}`",
        "",
        "Two processes on loopback under tahq's own shaping; medians of the repeats, with least and most.",
        "",
        "| set | measured | off by |",
        "|---|---|---|",
    ]
    for rate in RATES_MBIT:
        got = [measure_goodput(rate) for _ in range(repeats)]
        lines.append(_row(f"rate: {rate}mbit, payload of 1 MB frames", "Mbit/s", rate, got))
    for delay in DELAYS_MS:
        got = [measure_delay(delay) for _ in range(repeats)]
        lines.append(_row(f"delay: {delay}ms, one way, 64 bytes at idle", "ms", delay, got))
    return "\n".join([*lines, ""])


def _row(what: str, unit: str, wanted: float, got: list[float]) -> str:
    median = statistics.median(got)
    return f"| {what} | {median:.1f} {unit} ({min(got):.1f} to {max(got):.1f}) | {100 * (median / wanted - 1):+.1f} % |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    text = report(options.repeats)
    print(text)
    if options.output is not None:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
