"""What CURVE costs on a link: goodput and CPU seconds a gigabyte, with it and without.

Two processes on loopback, each with tahq's own endpoint and one link, whose uplink is capped by tahq's shaping, as a
user caps one. Goodput: payload bits of a stream of equal frames, from the first frame's arrival to the last one's, all
posted before. CPU: seconds of all threads of a process meanwhile, kernel included, by gigabyte of payload. Runs with
and without take turns, so that whatever else the machine does is in both.

Run:  python benchmarks/bench_curve.py [--rates 1gbit none] [--output benchmarks/results/curve_<hardware>.md]
"""

import argparse
import multiprocessing
import statistics
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from harness import describe

from tahq.comm.keys import KeyPair, new_key_pair
from tahq.comm.link.frame import Direction, Frame, LogicalId, Purpose
from tahq.comm.link.shaping import Shaping
from tahq.comm.link.spec import PeerIdentity
from tahq.comm.zmq.endpoint import ZmqEndpoint
from tahq.units import parse_rate

CONNECT_S = 30.0
RECEIVE_S = 60.0


@dataclass(frozen=True)
class Stream:
    """What a run carries; `keys` are of sender and receiver, None: no CURVE."""

    rate_bits_per_s: float | None
    frame_nbytes: int
    num_frames: int
    keys: tuple[KeyPair, KeyPair] | None

    def public_key(self, stage: int) -> str:
        return "" if self.keys is None else self.keys[stage].public


@dataclass(frozen=True)
class Measured:
    """Bits a second of payload, and CPU seconds a gigabyte of it at either end."""

    goodput_bits_per_s: float
    sender_s: float
    receiver_s: float


def open_endpoint(stage: int, stream: Stream) -> ZmqEndpoint:
    return ZmqEndpoint(
        identity=PeerIdentity(1, 1, stage, "bench"),
        bind="127.0.0.1:0",
        advertise=None,
        shaping=Shaping(stream.rate_bits_per_s),
        peer_timeout_s=20.0,
        heartbeat_s=2.0,
        keys=None if stream.keys is None else stream.keys[stage],
    )


def make_id(number: int) -> LogicalId:
    return LogicalId(1, 0, 0, Purpose.TRAIN, number, 0, Direction.FORWARD)


def send_frames(pipe: Connection, stream: Stream) -> None:
    """The sending process: tells its address, sends when told, and then what it cost."""
    torch.set_num_threads(1)
    endpoint = open_endpoint(0, stream)
    pipe.send(endpoint.address)
    link = endpoint.open_link(0, 1, "receiver", "", stream.public_key(1))
    endpoint.wait_connected(CONNECT_S)
    payload = torch.randint(256, (stream.frame_nbytes,), dtype=torch.uint8)
    pipe.recv()
    before_s = time.process_time()
    for number in range(stream.num_frames):
        link.send(Frame(make_id(number), 0, torch.uint8, (stream.frame_nbytes,), payload))
    pipe.recv()
    pipe.send(time.process_time() - before_s)
    link.close()
    endpoint.close()


def measure(stream: Stream) -> Measured:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=send_frames, args=(theirs, stream), daemon=True)
    process.start()
    endpoint = open_endpoint(1, stream)
    link = endpoint.open_link(0, 0, "sender", ours.recv(), stream.public_key(0))
    endpoint.wait_connected(CONNECT_S)
    for number in range(stream.num_frames):
        link.expect(make_id(number), stream.frame_nbytes)
    before_s = time.process_time()
    ours.send("go")
    arrived_s = []
    for _ in range(stream.num_frames):
        link.recv(RECEIVE_S)
        arrived_s.append(time.monotonic())
    receiver_s = time.process_time() - before_s
    ours.send("done")
    sender_s = ours.recv()
    process.join()
    link.close()
    endpoint.close()
    gigabytes = stream.num_frames * stream.frame_nbytes / 1e9
    goodput = (stream.num_frames - 1) * stream.frame_nbytes * 8 / (arrived_s[-1] - arrived_s[0])
    return Measured(goodput, sender_s / gigabytes, receiver_s / gigabytes)


def rows(rate: str, options: argparse.Namespace) -> list[str]:
    """Two lines of the table: plain, and CURVE with its share of the plain goodput."""
    rate_bits_per_s = None if rate == "none" else parse_rate(rate)
    frame_nbytes = options.frame_kib * 1024
    count = max(4, options.transfer_mib * 1024 // options.frame_kib)
    kinds = {"plain": None, "CURVE": (new_key_pair(), new_key_pair())}
    runs: dict[str, list[Measured]] = {kind: [] for kind in kinds}
    for _ in range(options.repeats):
        for kind, keys in kinds.items():
            runs[kind].append(measure(Stream(rate_bits_per_s, frame_nbytes, count, keys)))
    plain = statistics.median(run.goodput_bits_per_s for run in runs["plain"])
    return [f"| {rate} | {kind} | {cells(runs[kind], plain)} |" for kind in kinds]


def cells(runs: list[Measured], plain_bits_per_s: float) -> str:
    goodputs = [run.goodput_bits_per_s for run in runs]
    goodput = statistics.median(goodputs)
    sender_s = statistics.median(run.sender_s for run in runs)
    receiver_s = statistics.median(run.receiver_s for run in runs)
    spread = f"{min(goodputs) / 1e6:.0f} to {max(goodputs) / 1e6:.0f}"
    return f"{goodput / 1e6:.0f} ({spread}) | {goodput / plain_bits_per_s:.3f} | {sender_s:.2f} | {receiver_s:.2f}"


def report(options: argparse.Namespace) -> str:
    command = f"--rates {' '.join(options.rates)} --repeats {options.repeats} --transfer-mib {options.transfer_mib}"
    lines = [
        "# What CURVE costs on a link",
        "",
        f"{describe()}. `python benchmarks/bench_curve.py {command} --frame-kib {options.frame_kib}`",
        "",
        "Two processes on loopback, one direction, one connection; medians of the repeats, which take turns. Goodput "
        "in Mbit/s of payload with least and most; CPU seconds of each process for a gigabyte of payload.",
        "",
        "| cap of the uplink | | goodput | of plain | CPU s/GB, sender | CPU s/GB, receiver |",
        "|---|---|---|---|---|---|",
    ]
    for rate in options.rates:
        lines += rows(rate, options)
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", nargs="+", default=["1gbit", "none"], help="caps of the uplink; none: not capped")
    parser.add_argument("--frame-kib", type=int, default=1024)
    parser.add_argument("--transfer-mib", type=int, default=512, help="payload a measurement")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    text = report(options)
    print(text)
    if options.output is not None:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
