"""How closely `emulate: {rate, delay}` is kept, the goodput of ZMQ, gloo and NCCL, and what CURVE costs.

Two processes on loopback, as two hosts, each with tahq's own endpoint. Goodput: payload bits of a stream of equal
frames, from the first frame's arrival to the last one's. Delay: from `send` of a 64-byte frame on an idle link to
`recv`, at 1 Gbit/s so that the frame itself takes no time. `--device cuda` copies payloads from and to GPUs, as a
stage does, and measures NCCL, which needs two. CURVE: goodput, and CPU seconds of each process per gigabyte, kernel
included, in turns with and without.

    python benchmarks/bench_links.py [--device cuda] [--output benchmarks/results/links_<hardware>_<yyyymm>.md]
"""

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
from harness import Table, main, repeat, spread

from tahq.comm.group.transport import GroupSpec, open_group
from tahq.comm.keys import KeyPair, new_key_pair
from tahq.comm.link.frame import Direction, Frame, LogicalId, Purpose
from tahq.comm.link.shaping import Shaping
from tahq.comm.link.spec import PeerIdentity
from tahq.comm.transport import Transport
from tahq.comm.zmq.endpoint import EndpointSettings, ZmqEndpoint

RATES_MBIT = (20, 100, 300, 1000)
DELAYS_MS = (5, 20, 100)
SIZES_KIB = (64, 256, 1024, 4096, 16384)
TRANSFER_NBYTES = 512 * 1024 * 1024
SHAPED_SECONDS = 4.0
PINGS = 20
TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Stream:
    """Equal frames one way; `keys` are of sender and receiver, none without CURVE."""

    kind: str
    device: str
    shaping: Shaping
    count: int
    nbytes: int
    pause_s: float = 0.0
    keys: tuple[KeyPair, KeyPair] | None = None


@dataclass(frozen=True, slots=True)
class Transfer:
    """When frames were sent and whole at the other end, and CPU seconds of both processes meanwhile."""

    sent_s: list[float]
    arrived_s: list[float]
    cpu_s: tuple[float, float]

    def mbit_per_s(self, nbytes: int) -> float:
        return (len(self.sent_s) - 1) * nbytes * 8 / (self.arrived_s[-1] - self.arrived_s[0]) / 1e6


def open_endpoint(stage: int, stream: Stream) -> ZmqEndpoint:
    return ZmqEndpoint(
        PeerIdentity(1, 1, stage, "bench"),
        EndpointSettings(
            bind="127.0.0.1:0",
            shaping=stream.shaping,
            peer_timeout_s=20.0,
            heartbeat_s=2.0,
            keys=stream.keys[stage] if stream.keys else None,
        ),
    )


def join(endpoint: ZmqEndpoint, stage: int, dial: str, stream: Stream) -> Transport:
    """This end's link over ZMQ, gloo or NCCL."""
    peer_key = stream.keys[1 - stage].public if stream.keys else ""
    control = endpoint.open_link(0, 1 - stage, "neighbour", dial, peer_key)
    endpoint.wait_connected(TIMEOUT_S)
    if stream.kind == "zmq":
        return control
    device = device_of(stage, stream.device)
    return open_group(control, GroupSpec(stream.kind, PeerIdentity(1, 1, stage, "bench"), dial, device, TIMEOUT_S))


def device_of(stage: int, kind: str) -> torch.device:
    return torch.device("cpu" if kind == "cpu" else f"cuda:{stage % torch.cuda.device_count()}")


def frame_id(number: int) -> LogicalId:
    return LogicalId(1, 0, 0, Purpose.TRAIN, number, 0, Direction.FORWARD)


def send_frames(pipe: Connection, stream: Stream) -> None:
    """The sending process; reports when each frame was given to the link, and its CPU seconds."""
    torch.set_num_threads(1)
    endpoint = open_endpoint(0, stream)
    pipe.send(endpoint.address)
    link = join(endpoint, 0, "", stream)
    payload = torch.randint(256, (stream.nbytes,), dtype=torch.uint8, device=device_of(0, stream.device))
    pipe.recv()
    sent_s, before_s = [], time.process_time()
    for number in range(stream.count):
        time.sleep(stream.pause_s)
        sent_s.append(time.monotonic())
        link.send(Frame(frame_id(number), 0, torch.uint8, (stream.nbytes,), payload.to(link.payload_device)))
    pipe.recv()
    pipe.send((sent_s, time.process_time() - before_s))
    link.close()
    endpoint.close()


def transfer(stream: Stream) -> Transfer:
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=send_frames, args=(theirs, stream), daemon=True)
    process.start()
    endpoint = open_endpoint(1, stream)
    link = join(endpoint, 1, ours.recv(), stream)
    for number in range(stream.count):
        link.expect(frame_id(number), stream.nbytes)
    ours.send("go")
    arrived_s, before_s = [], time.process_time()
    for _ in range(stream.count):
        payload = link.recv(TIMEOUT_S).payload.to(device_of(1, stream.device))
        if payload.is_cuda:
            torch.cuda.synchronize(payload.device)
        arrived_s.append(time.monotonic())
    cpu_s = time.process_time() - before_s
    ours.send("done")
    sent_s, sender_cpu_s = ours.recv()
    process.join()
    link.close()
    endpoint.close()
    return Transfer(sent_s, arrived_s, (sender_cpu_s, cpu_s))


def goodput_mbit(stream: Stream) -> float:
    return transfer(stream).mbit_per_s(stream.nbytes)


def delay_ms(delay: int) -> float:
    """Median one-way milliseconds of a small frame on an idle link."""
    found = transfer(Stream("zmq", "cpu", Shaping(1e9, delay / 1e3), PINGS, 64, pause_s=2.5 * delay / 1e3))
    return statistics.median(1e3 * (late - early) for early, late in zip(found.sent_s, found.arrived_s, strict=True))


def shaped(options: argparse.Namespace) -> Iterator[tuple[str, str, str]]:
    for rate in RATES_MBIT:
        count = max(4, round(SHAPED_SECONDS * rate / 8))
        got = repeat(options, goodput_mbit, Stream("zmq", "cpu", Shaping(rate * 1e6, 0.01), count, 1_000_000))
        yield f"rate: {rate}mbit, 1 MB frames", spread(got, 1, " Mbit/s"), off(got, rate)
    for delay in DELAYS_MS:
        got = repeat(options, delay_ms, delay)
        yield f"delay: {delay}ms, one way, idle", spread(got, 1, " ms"), off(got, delay)


def off(got: list[float], wanted: float) -> str:
    return f"{100 * (statistics.median(got) / wanted - 1):+.1f} %"


def unshaped(options: argparse.Namespace, kinds: tuple[str, ...]) -> Iterator[list[str]]:
    for size_kib in SIZES_KIB:
        count = max(4, TRANSFER_NBYTES // (1024 * size_kib))
        streams = [Stream(kind, options.device, Shaping(), count, 1024 * size_kib) for kind in kinds]
        got = [repeat(options, goodput_mbit, stream) for stream in streams]
        yield [f"{size_kib} KiB", *(spread([mbit / 1e3 for mbit in found]) for found in got)]


def curve(options: argparse.Namespace) -> Iterator[list[str]]:
    """With and without CURVE in turns, under a cap of 1 Gbit/s and without one."""
    kinds = {"plain": None, "CURVE": (new_key_pair(), new_key_pair())}
    for rate in (1e9, None):
        found: dict[str, list[Transfer]] = {kind: [] for kind in kinds}
        for _ in range(options.repeats):
            for kind, keys in kinds.items():
                found[kind].append(
                    transfer(Stream("zmq", "cpu", Shaping(rate), TRANSFER_NBYTES >> 20, 1 << 20, keys=keys))
                )
        for kind, runs in found.items():
            cpu = [[run.cpu_s[end] / (TRANSFER_NBYTES / 1e9) for run in runs] for end in (0, 1)]
            cap = "1 Gbit/s" if rate else "none"
            yield [cap, kind, spread([run.mbit_per_s(1 << 20) for run in runs], 0), *(spread(each) for each in cpu)]


def tables(options: argparse.Namespace) -> Iterator[Table]:
    torch.set_num_threads(1)
    if options.device == "cpu":
        yield Table(("set", "measured", "off by"), shaped(options), "Shaping: medians, least and largest.")
        columns = ("cap of the uplink", "", "Mbit/s", "CPU s/GB, sender", "CPU s/GB, receiver")
        yield Table(columns, curve(options), "CURVE, one direction, frames of 1 MiB.")
    kinds = ("zmq", "gloo", "nccl") if options.device == "cuda" else ("zmq", "gloo")
    yield Table(("frames of", *kinds), unshaped(options, kinds), f"Gbit/s of payload, payloads on {options.device}.")


if __name__ == "__main__":
    main(__doc__, tables, {"--device": {"choices": ("cpu", "cuda"), "default": "cpu"}}, repeats=3)
