"""Goodput of the transports between two neighbours: ZMQ, gloo and, on two CUDA devices, NCCL.

Two processes on loopback, each with tahq's own transport and nothing else. Goodput: payload bits of a stream of
equal frames, from the first frame's arrival to the last one's, all posted before; checksums, headers and receipts
are part of it. `--device cuda` measures NCCL, and has the payloads of ZMQ and gloo copied from one device and to
the other, as a stage does.

Run:  python benchmarks/bench_transports.py [--device cuda] [--output benchmarks/results/transports_<hardware>.md]
"""

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from machine import describe_device

from tahq.comm.group.rendezvous import GroupSpec, open_group
from tahq.comm.link.frame import Direction, Frame, LogicalId, Purpose
from tahq.comm.link.shaping import Shaping
from tahq.comm.link.spec import PeerIdentity
from tahq.comm.transport import Transport
from tahq.comm.zmq.endpoint import ZmqEndpoint

SIZES_KIB = (64, 256, 1024, 4096, 16384)
TRANSFER_MIB = 512
PEER_TIMEOUT_S = 20.0
CONNECT_S = 60.0


def open_endpoint(stage: int) -> ZmqEndpoint:
    return ZmqEndpoint(
        identity=PeerIdentity(1, 1, stage, "bench"),
        bind="127.0.0.1:0",
        advertise=None,
        shaping=Shaping(),
        peer_timeout_s=PEER_TIMEOUT_S,
        heartbeat_s=2.0,
    )


def join(endpoint: ZmqEndpoint, stage: int, dial: str, kind: str, device: torch.device) -> Transport:
    """This end's link, whatever carries it."""
    control = endpoint.open_link(0, 1 - stage, "neighbour", dial)
    endpoint.wait_connected(CONNECT_S)
    if kind == "zmq":
        return control
    backend = "nccl" if kind == "nccl" else "gloo"
    return open_group(control, GroupSpec(backend, PeerIdentity(1, 1, stage, "bench"), dial, device, PEER_TIMEOUT_S))


def make_id(number: int, direction: Direction) -> LogicalId:
    return LogicalId(1, 0, 0, Purpose.TRAIN, number, 0, direction)


def device_of(stage: int, kind: str) -> torch.device:
    return torch.device("cpu" if kind == "cpu" else f"cuda:{stage % torch.cuda.device_count()}")


def send_frames(pipe: Connection, kind: str, device_kind: str, nbytes: int, count: int) -> None:
    """The sending process: waits until all is posted, then sends, then waits until all has come."""
    torch.set_num_threads(1)
    device = device_of(0, device_kind)
    endpoint = open_endpoint(0)
    pipe.send(endpoint.address)
    link = join(endpoint, 0, "", kind, device)
    tensor = torch.randint(256, (nbytes,), dtype=torch.uint8, device=device)
    pipe.recv()
    for number in range(count):
        link.send(Frame(make_id(number, Direction.FORWARD), 0, torch.uint8, (nbytes,), tensor.to(link.payload_device)))
    pipe.recv()
    link.close()
    endpoint.close()


def receive_times(link: Transport, device: torch.device, count: int) -> list[float]:
    """When each frame was there, on the device."""
    times_s = []
    for _ in range(count):
        payload = link.recv(PEER_TIMEOUT_S).payload.to(device)
        if payload.is_cuda:
            torch.cuda.synchronize(device)
        times_s.append(time.monotonic())
    return times_s


def measure(kind: str, device_kind: str, nbytes: int, count: int) -> float:
    """Mbit/s of payload."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=send_frames, args=(theirs, kind, device_kind, nbytes, count), daemon=True)
    process.start()
    device = device_of(1, device_kind)
    endpoint = open_endpoint(1)
    link = join(endpoint, 1, ours.recv(), kind, device)
    for number in range(count):
        link.expect(make_id(number, Direction.FORWARD), nbytes)
    ours.send("go")
    arrived_s = receive_times(link, device, count)
    ours.send("done")
    process.join()
    link.close()
    endpoint.close()
    return (count - 1) * nbytes * 8 / (arrived_s[-1] - arrived_s[0]) / 1e6


def report(kinds: Sequence[str], sizes_kib: Sequence[int], options: argparse.Namespace) -> str:
    lines = [
        "# Goodput of the transports",
        "",
        f"{describe_device()}. `python benchmarks/bench_transports.py --device {options.device} "
        f"--repeats {options.repeats} --transfer-mib {options.transfer_mib}`",
        "",
        f"Two processes on loopback, payloads on {options.device}, one direction. Gbit/s of payload; medians of the "
        "repeats, with least and most.",
        "",
        f"| frames of | {' | '.join(kinds)} |",
        f"|---|{'---|' * len(kinds)}",
    ]
    for size_kib in sizes_kib:
        count = max(4, options.transfer_mib * 1024 // size_kib)
        cells = []
        for kind in kinds:
            got = [measure(kind, options.device, size_kib * 1024, count) / 1e3 for _ in range(options.repeats)]
            cells.append(f"{statistics.median(got):.2f} ({min(got):.2f} to {max(got):.2f})")
        lines.append(f"| {size_kib} KiB | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--sizes-kib", type=int, nargs="+", default=SIZES_KIB)
    parser.add_argument("--transfer-mib", type=int, default=TRANSFER_MIB, help="payload a measurement")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    kinds = ("zmq", "gloo", "nccl") if options.device == "cuda" else ("zmq", "gloo")
    text = report(kinds, options.sizes_kib, options)
    print(text)
    if options.output is not None:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
