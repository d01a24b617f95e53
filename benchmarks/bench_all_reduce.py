"""The sum of gradients over replicas, on slow links: time by size, number of replicas, rate and codec, beside gloo.

    python benchmarks/bench_all_reduce.py [--output benchmarks/results/all_reduce_<hardware>_<yyyymm>.md]

Every replica is a process in a network namespace of its own. It sums as a worker does (`GradientSum`), but in one
thread: one tensor of fp32, the gradient of its only parameter. gloo sums the same tensor between the same processes.
Seconds are from a barrier to the last replica's end: the median of some sums after one that does not count. The
breakdown is of replica 0: encoding, decoding, and waiting for frames.

Needs root and a quiet machine: all replicas compute on its cores.
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
from typing import Any

import torch
import torch.distributed as dist
from harness import Table, main
from torch.nn import Parameter

from tahq.comm.link.spec import PeerIdentity
from tahq.comm.topology import Grid
from tahq.comm.zmq.endpoint import EndpointSettings, ZmqEndpoint
from tahq.pipeline.boundary import Boundary, CutIdentity
from tahq.pipeline.gradient_sum import GradientSum, SumCodecs, sum_codec
from tahq.pipeline.spans import Stopwatch
from tahq.quant.config import WireConfig
from tahq_netem.backends.choice import build_network
from tahq_netem.network.description import uniform

PORT, GLOO_PORT = 7100, 7200
CODECS = ("raw:dtype=fp32", "raw:dtype=bf16", "fp8", "eden:bits=4")
GLOO = "gloo, fp32"
MOST_S = 30.0
"""Sums that fp32 alone would take longer for are left out."""

# -- one replica ---------------------------------------------------------------------------------


class Replica:
    """One process's links to all others."""

    def __init__(self, rank: int, addresses: Sequence[str]) -> None:
        self.rank = rank
        self._stopwatch = Stopwatch()
        settings = EndpointSettings(bind=f"{addresses[rank]}:{PORT}", peer_timeout_s=60.0, heartbeat_s=5.0)
        self._endpoint = ZmqEndpoint(PeerIdentity(1, 1, rank, "bench"), settings)
        self._transports = {}
        for ends in Grid(1, len(addresses)).links_of(rank):
            other = ends.other(rank)
            dial = "" if rank == ends.lower else f"{addresses[other]}:{PORT}"
            self._transports[other] = self._endpoint.open_link(ends.link, other, f"replica {other}", dial)
        self._endpoint.wait_connected(60.0)
        self._step = 0

    def sum(self, spec: str, parameter: Parameter) -> tuple[float, dict[str, float]]:
        """Seconds of one sum, and their parts."""
        wire, device = WireConfig(), torch.device("cpu")
        boundaries = {
            other: Boundary(
                *(transport, CutIdentity(1, 0, 0, self.rank), SumCodecs(sum_codec(spec, wire), sum_codec(spec, wire))),
                *(device, self._stopwatch, other),
            )
            for other, transport in self._transports.items()
        }
        sums = GradientSum({0: [parameter]}, self.rank, boundaries, 1, 0)
        self._step += 1
        sums.post(self._step)
        dist.barrier()
        self._stopwatch.take()
        begin_s = time.perf_counter()
        sums.open(self._step, 0, lambda boundary, name, shard, _: boundary.send(name, shard))
        sums.close()
        sums.finish(self._step)
        taken_s, parts = time.perf_counter() - begin_s, self._stopwatch.take()
        waited_s = sum(seconds for name, seconds in parts.items() if name.startswith("wait"))
        return taken_s, {"encode": parts.get("encode", 0.0), "decode": parts.get("decode", 0.0), "wait": waited_s}


def play(rank: int, addresses: Sequence[str], rate: float, sizes: Sequence[int], repeats: int) -> None:
    """Print a row of JSON for each size and codec; all replicas do the same."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = next(name for _, name in socket.if_nameindex() if name != "lo")
    dist.init_process_group(
        "gloo", init_method=f"tcp://{addresses[0]}:{GLOO_PORT}", rank=rank, world_size=len(addresses)
    )
    replica = Replica(rank, addresses)
    for nbytes in sizes:
        least_s = 2 * (len(addresses) - 1) / len(addresses) * nbytes * 8 / rate
        if least_s > MOST_S:
            continue
        gradient = torch.randn(nbytes // 4, generator=torch.Generator().manual_seed(rank))
        parameter = Parameter(torch.empty_like(gradient))

        def tahq(spec: str, parameter: Parameter = parameter, gradient: torch.Tensor = gradient) -> Any:
            parameter.grad = gradient.clone()
            return replica.sum(spec, parameter)

        def gloo(gradient: torch.Tensor = gradient) -> Any:
            mine = gradient.clone()
            dist.barrier()
            begin_s = time.perf_counter()
            dist.all_reduce(mine)
            return time.perf_counter() - begin_s, {}

        ways: dict[str, Callable[[], Any]] = {GLOO: gloo, **{spec: lambda s=spec: tahq(s) for spec in CODECS}}
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
    config = uniform(num, rate=1e6 * mbits, delay=options.round_trip_ms / 2e3)
    config = config.model_copy(update={"congestion_control": "cubic", "tcp_slow_start_after_idle": False})
    with build_network(config) as network:
        hosts = list(network.plan.hosts)
        addresses = [network.address(host) for host in hosts]
        arguments = json.dumps([addresses, 1e6 * mbits, options.sizes, options.repeats])
        processes = [
            network.popen(host, [sys.executable, __file__, "--play", str(rank), arguments], stdout=subprocess.PIPE)
            for rank, host in enumerate(hosts)
        ]
        outputs = [process.communicate(timeout=3600)[0] for process in processes]
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
                yield [str(num), f"{mbits:g}", size, row["way"], f"{1e3 * row['seconds']:.1f}", faster, *parts]


PARTS = ("encode", "decode", "wait")


def tables(options: argparse.Namespace) -> Iterator[Table]:
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
                "--round-trip-ms": {"type": float, "default": 1.0},
            },
            repeats=5,
        )
