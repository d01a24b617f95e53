"""The sum of gradients over replicas: time by size, number of replicas, rate and codec, beside gloo or NCCL.

    python benchmarks/bench_all_reduce.py [--output benchmarks/results/all_reduce_<hardware>_<yyyymm>.md]
    python benchmarks/bench_all_reduce.py --device cuda --replicas 2 --rates 100 1000 10000 0      # a GPU per replica

Every replica is a process in a network namespace of its own. It sums as a worker does (`GradientSum`), but in one
thread: one tensor of fp32, the gradient of its only parameter. gloo, or NCCL over sockets, sums the same tensor between
the same processes. With a rate of 0 there are no namespaces, and GPUs exchange payloads as with `links.inside: nccl`.
Seconds are from a barrier to the last replica's end: the median of some sums after one that does not count. The
breakdown is of replica 0: encoding, decoding, and waiting for frames.

Needs root and a quiet machine: replicas share its cores.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from harness import Table, main, need_gpu
from torch.nn import Parameter

from tahq.comm.group.transport import GroupSpec, open_group
from tahq.comm.link.spec import PeerIdentity
from tahq.comm.topology import Grid
from tahq.comm.transport import Transport
from tahq.comm.zmq.endpoint import EndpointSettings, ZmqEndpoint
from tahq.pipeline.boundary import Boundary, CutIdentity
from tahq.pipeline.gradient_sum import GradientSum, SumCodecs, sum_codec
from tahq.pipeline.spans import Stopwatch
from tahq.quant.config import WireConfig
from tahq_netem.backends.choice import build_network
from tahq_netem.network.description import uniform

PORT, GLOO_PORT = 7100, 7200
CODECS = ("raw:dtype=fp32", "raw:dtype=bf16", "fp8", "eden:bits=4")
BASELINES = {"cpu": {"gloo, fp32": torch.float32}, "cuda": {"NCCL, fp32": torch.float32, "NCCL, bf16": torch.bfloat16}}
OVER_SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
MOST_S = 30.0
"""Sums that fp32 alone would take longer for are left out."""

# -- one replica ---------------------------------------------------------------------------------


class Replica:
    """One process's links to all others: over ZMQ, or over NCCL where `in_site`."""

    def __init__(self, rank: int, addresses: Sequence[str], device: torch.device, *, in_site: bool) -> None:
        self.rank, self.device = rank, device
        self._stopwatch = Stopwatch()
        settings = EndpointSettings(bind=f"{addresses[rank]}:{PORT}", peer_timeout_s=60.0, heartbeat_s=5.0)
        identity = PeerIdentity(1, 1, rank, "bench")
        self._endpoint = ZmqEndpoint(identity, settings)
        self._transports: dict[int, Transport] = {}
        links = {}
        for ends in Grid(1, len(addresses)).links_of(rank):
            other = ends.other(rank)
            dial = "" if rank == ends.lower else f"{addresses[other]}:{PORT}"
            links[other] = self._endpoint.open_link(ends.link, other, f"replica {other}", dial), dial
        self._endpoint.wait_connected(60.0)
        for other, (link, dial) in links.items():
            spec = GroupSpec("nccl", identity, dial, device, 60.0)
            self._transports[other] = open_group(link, spec) if in_site else link
        self._step = 0

    def sum(self, spec: str, parameter: Parameter) -> tuple[float, dict[str, float]]:
        """Seconds of one sum, and their parts."""
        wire = WireConfig()
        boundaries = {
            other: Boundary(
                *(transport, CutIdentity(1, 0, 0, self.rank), SumCodecs(sum_codec(spec, wire), sum_codec(spec, wire))),
                *(self.device, self._stopwatch, other),
            )
            for other, transport in self._transports.items()
        }
        sums = GradientSum({0: [parameter]}, self.rank, boundaries, 1, 0)
        self._step += 1
        sums.post(self._step)
        self.meet()
        self._stopwatch.take()
        begin_s = time.perf_counter()
        sums.open(self._step, 0, lambda boundary, name, shard, _: boundary.send(name, shard))
        sums.close()
        sums.finish(self._step)
        self.synchronize()
        taken_s, parts = time.perf_counter() - begin_s, self._stopwatch.take()
        waited_s = sum(seconds for name, seconds in parts.items() if name.startswith("wait"))
        return taken_s, {"encode": parts.get("encode", 0.0), "decode": parts.get("decode", 0.0), "wait": waited_s}

    def meet(self) -> None:
        """Wait for the device and all replicas."""
        self.synchronize()
        dist.barrier()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def play(rank: int, addresses: Sequence[str], rate: float, sizes: Sequence[int], repeats: int, kind: str) -> None:
    """Print a row of JSON for each size and codec; all replicas do the same."""
    torch.set_num_threads(1)
    device = torch.device(kind, rank % torch.cuda.device_count()) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    if rate:
        interface = next(name for _, name in socket.if_nameindex() if name != "lo")
        os.environ.update({"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface, **OVER_SOCKETS})
    dist.init_process_group(
        "gloo", init_method=f"tcp://{addresses[0]}:{GLOO_PORT}", rank=rank, world_size=len(addresses)
    )
    group = dist.new_group(backend="nccl") if kind == "cuda" else None
    replica = Replica(rank, addresses, device, in_site=kind == "cuda" and not rate)
    for nbytes in sizes:
        least_s = 2 * (len(addresses) - 1) / len(addresses) * nbytes * 8 / rate if rate else 0.0
        if least_s > MOST_S:
            continue
        gradient = torch.randn(nbytes // 4, generator=torch.Generator().manual_seed(rank)).to(device)
        parameter = Parameter(torch.empty_like(gradient))

        def tahq(spec: str, parameter: Parameter = parameter, gradient: torch.Tensor = gradient) -> Any:
            parameter.grad = gradient.clone()
            return replica.sum(spec, parameter)

        def baseline(dtype: torch.dtype, gradient: torch.Tensor = gradient) -> Any:
            mine = gradient.to(dtype, copy=True)
            replica.meet()
            begin_s = time.perf_counter()
            dist.all_reduce(mine, group=group)
            replica.synchronize()
            return time.perf_counter() - begin_s, {}

        ways: dict[str, Callable[[], Any]] = {
            **{name: partial(baseline, dtype) for name, dtype in BASELINES[kind].items()},
            **{spec: partial(tahq, spec) for spec in CODECS},
        }
        count = max(1, min(repeats, int(MOST_S / max(least_s, 1e-3) / 4)))
        for way, run in ways.items():
            found = [run() for _ in range(count + 1)][1:]
            row = {"nbytes": nbytes, "way": way, "seconds": [taken_s for taken_s, _ in found]}
            parts = {name: statistics.median(each[name] for _, each in found) for name in found[0][1]}
            print(json.dumps({**row, "parts": parts}), flush=True)
    dist.barrier()


# -- all replicas --------------------------------------------------------------------------------


def measure(num: int, mbits: float, options: argparse.Namespace) -> list[Mapping[str, Any]]:
    """Rows of replica 0, with the seconds of the slowest replica."""

    def play_all(addresses: list[str], start: Callable[..., "subprocess.Popen[bytes]"]) -> list[bytes]:
        arguments = json.dumps([addresses, 1e6 * mbits, options.sizes, options.repeats, options.device])
        processes = [
            start(rank, [sys.executable, __file__, "--play", str(rank), arguments], stdout=subprocess.PIPE)
            for rank in range(num)
        ]
        return [process.communicate(timeout=3600)[0] for process in processes]

    if mbits:
        config = uniform(num, rate=1e6 * mbits, delay=options.round_trip_ms / 2e3)
        config = config.model_copy(update={"congestion_control": "cubic", "tcp_slow_start_after_idle": False})
        with build_network(config) as network:
            hosts = list(network.plan.hosts)
            addresses = [network.address(host) for host in hosts]
            outputs = play_all(addresses, lambda rank, *args, **named: network.popen(hosts[rank], *args, **named))
    else:
        addresses = [f"127.0.0.{rank + 1}" for rank in range(num)]
        outputs = play_all(addresses, lambda _, *args, **named: subprocess.Popen(*args, **named))
    rows = [[json.loads(line) for line in output.splitlines() if line.startswith(b"{")] for output in outputs]
    return [
        {**of_all[0], "seconds": statistics.median(map(max, zip(*(row["seconds"] for row in of_all), strict=True)))}
        for of_all in zip(*rows, strict=True)
    ]


def rows(options: argparse.Namespace) -> Iterator[list[str]]:
    for num in options.replicas:
        for mbits in options.rates:
            found = measure(num, mbits, options)
            fp32 = {row["nbytes"]: row["seconds"] for row in found if row["way"] == CODECS[0]}
            for row in found:
                parts = [f"{1e3 * row['parts'][name]:.1f}" if row["parts"] else "" for name in PARTS]
                size = f"{row['nbytes'] >> 20} MiB" if row["nbytes"] >= 1 << 20 else f"{row['nbytes'] >> 10} KiB"
                faster = f"{fp32[row['nbytes']] / row['seconds']:.2f}"
                yield [
                    str(num),
                    f"{mbits:g}" if mbits else "not shaped",
                    size,
                    row["way"],
                    f"{1e3 * row['seconds']:.1f}",
                    faster,
                    *parts,
                ]


PARTS = ("encode", "decode", "wait")


def tables(options: argparse.Namespace) -> Iterator[Table]:
    need_gpu(options.device)
    columns = ("replicas", "Mbit/s", "size of fp32", "codec", "ms", "fp32's time / this", *PARTS)
    yield Table(columns, rows(options), f"Round trips of {options.round_trip_ms:g} ms. Parts in ms.")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--play"]:
        play(int(sys.argv[2]), *json.loads(sys.argv[3]))
    else:
        main(
            __doc__,
            tables,
            {
                "--replicas": {"type": int, "nargs": "+", "default": [2, 4]},
                "--rates": {"type": float, "nargs": "+", "default": [100, 1000, 10000], "help": "Mbit/s"},
                "--sizes": {"type": int, "nargs": "+", "default": [1 << n for n in (15, 20, 24, 26, 28, 30)]},
                "--device": {"choices": list(BASELINES), "default": "cpu"},
                "--round-trip-ms": {"type": float, "default": 1.0},
            },
            repeats=5,
        )
