"""How closely `links: {rate, delay}` is kept under `hosts: local`, and the goodput of ZMQ, gloo and NCCL.

Two processes on loopback, as two hosts, each with tahq's own endpoint. Goodput: payload bits of a stream of equal
frames, from the first frame's arrival to the last one's. Delay: from `send` of a 64-byte frame on an idle link to
`recv`, at 1 Gbit/s so that the frame itself takes no time. `--device cuda` copies payloads from and to GPUs, as a
stage does, and measures NCCL, which needs two.

    python benchmarks/bench_links.py [--device cuda] [--output benchmarks/results/links_<hardware>_<yyyymm>.md]
"""

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import torch
from harness import Table, main, repeat, spread

from tahq.comm.group.rendezvous import GroupSpec, open_group
from tahq.comm.link.frame import Direction, Frame, LogicalId, Purpose
from tahq.comm.link.shaping import Shaping
from tahq.comm.link.spec import PeerIdentity
from tahq.comm.transport import Transport
from tahq.comm.zmq.endpoint import ZmqEndpoint

RATES_MBIT = (20, 100, 300, 1000)
DELAYS_MS = (5, 20, 100)
SIZES_KIB = (64, 256, 1024, 4096, 16384)
TRANSFER_NBYTES = 512 * 1024 * 1024
SHAPED_SECONDS = 4.0
PINGS = 20
TIMEOUT_S = 60.0


def open_endpoint(stage: int, shaping: Shaping) -> ZmqEndpoint:
    return ZmqEndpoint(
        identity=PeerIdentity(1, 1, stage, "bench"),
        bind="127.0.0.1:0",
        advertise=None,
        shaping=shaping,
        peer_timeout_s=20.0,
        heartbeat_s=2.0,
    )


def join(endpoint: ZmqEndpoint, stage: int, dial: str, kind: str, device: torch.device) -> Transport:
    """This end's link over ZMQ, gloo or NCCL."""
    control = endpoint.open_link(0, 1 - stage, "neighbour", dial)
    endpoint.wait_connected(TIMEOUT_S)
    if kind == "zmq":
        return control
    return open_group(control, GroupSpec(kind, PeerIdentity(1, 1, stage, "bench"), dial, device, TIMEOUT_S))


def device_of(stage: int, kind: str) -> torch.device:
    return torch.device("cpu" if kind == "cpu" else f"cuda:{stage % torch.cuda.device_count()}")


def frame_id(number: int) -> LogicalId:
    return LogicalId(1, 0, 0, Purpose.TRAIN, number, 0, Direction.FORWARD)


def send_frames(
    pipe: Connection, kind: str, device: str, shaping: Shaping, count: int, nbytes: int, pause_s: float
) -> None:
    """The sending process; reports when each frame was given to the link."""
    torch.set_num_threads(1)
    endpoint = open_endpoint(0, shaping)
    pipe.send(endpoint.address)
    link = join(endpoint, 0, "", kind, device_of(0, device))
    payload = torch.randint(256, (nbytes,), dtype=torch.uint8, device=device_of(0, device))
    pipe.recv()
    sent_s = []
    for number in range(count):
        time.sleep(pause_s)
        sent_s.append(time.monotonic())
        link.send(Frame(frame_id(number), 0, torch.uint8, (nbytes,), payload.to(link.payload_device)))
    pipe.recv()
    pipe.send(sent_s)
    link.close()
    endpoint.close()


def transfer(
    kind: str, device: str, shaping: Shaping, count: int, nbytes: int, pause_s: float = 0.0
) -> tuple[list[float], list[float]]:
    """When `count` frames were sent, and when each was there whole on its device."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=send_frames, args=(theirs, kind, device, shaping, count, nbytes, pause_s), daemon=True
    )
    process.start()
    endpoint = open_endpoint(1, shaping)
    link = join(endpoint, 1, ours.recv(), kind, device_of(1, device))
    for number in range(count):
        link.expect(frame_id(number), nbytes)
    ours.send("go")
    arrived_s = []
    for _ in range(count):
        payload = link.recv(TIMEOUT_S).payload.to(device_of(1, device))
        if payload.is_cuda:
            torch.cuda.synchronize(payload.device)
        arrived_s.append(time.monotonic())
    ours.send("done")
    sent_s = ours.recv()
    process.join()
    link.close()
    endpoint.close()
    return sent_s, arrived_s


def goodput_mbit(kind: str, device: str, shaping: Shaping, count: int, nbytes: int) -> float:
    _, arrived_s = transfer(kind, device, shaping, count, nbytes)
    return (count - 1) * nbytes * 8 / (arrived_s[-1] - arrived_s[0]) / 1e6


def delay_ms(delay: int) -> float:
    """Median one-way milliseconds of a small frame on an idle link."""
    times = transfer("zmq", "cpu", Shaping(1e9, delay / 1e3), PINGS, 64, pause_s=2.5 * delay / 1e3)
    return statistics.median(1e3 * (late - early) for early, late in zip(*times, strict=True))


def shaped(options: argparse.Namespace) -> Iterator[tuple[str, str, str]]:
    for rate in RATES_MBIT:
        count = max(4, round(SHAPED_SECONDS * rate / 8))
        got = repeat(options, goodput_mbit, "zmq", "cpu", Shaping(rate * 1e6, 0.01), count, 1_000_000)
        yield f"rate: {rate}mbit, 1 MB frames", spread(got, 1, " Mbit/s"), off(got, rate)
    for delay in DELAYS_MS:
        got = repeat(options, delay_ms, delay)
        yield f"delay: {delay}ms, one way, idle", spread(got, 1, " ms"), off(got, delay)


def off(got: list[float], wanted: float) -> str:
    return f"{100 * (statistics.median(got) / wanted - 1):+.1f} %"


def unshaped(options: argparse.Namespace, kinds: tuple[str, ...]) -> Iterator[list[str]]:
    for size_kib in SIZES_KIB:
        count = max(4, TRANSFER_NBYTES // (1024 * size_kib))
        got = [repeat(options, goodput_mbit, kind, options.device, Shaping(), count, 1024 * size_kib) for kind in kinds]
        yield [f"{size_kib} KiB", *(spread([mbit / 1e3 for mbit in found]) for found in got)]


def tables(options: argparse.Namespace) -> Iterator[Table]:
    torch.set_num_threads(1)
    if options.device == "cpu":
        yield Table(("set", "measured", "off by"), shaped(options), "Shaping: medians, least and largest.")
    kinds = ("zmq", "gloo", "nccl") if options.device == "cuda" else ("zmq", "gloo")
    yield Table(("frames of", *kinds), unshaped(options, kinds), f"Gbit/s of payload, payloads on {options.device}.")


if __name__ == "__main__":
    main(__doc__, tables, {"--device": {"choices": ("cpu", "cuda"), "default": "cpu"}})
