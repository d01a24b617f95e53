"""Reduce-scatter and all-gather by the GPUs' copy engines beside NCCL's, alone and beside matrix products.

    python benchmarks/bench_copy_engines.py [--output benchmarks/results/copy_engines_<hardware>_<yyyymm>.md]
    python benchmarks/bench_copy_engines.py --device cpu --mib 1 --size 64    # over gloo: that it works, no figures

A process per GPU. Each maps the others' memory (CUDA IPC) and pulls what it needs from it on a stream for each peer:
the copy engines do that, and no SM. All-gather pulls the other shards into place; reduce-scatter pulls this rank's
shard of every peer's gradient into a buffer, and adds them with one kernel. Peers are in step because all copy the
same unchanging data in a loop; what it takes to tell them that a shard is ready is not part of it.

Milliseconds are medians over ranks of the mean of a loop. *Beside products*: on another stream, as many bf16 products
of square matrices as take about as long as the collective; how much longer both take than the products alone. Both
ways' results are compared with each other, to the bit for whole numbers.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from harness import Table, main, need_gpu
from torch.multiprocessing.reductions import reduce_tensor

WARM = 3


@dataclass(frozen=True, slots=True)
class Case:
    """One tensor of fp32, `nbytes` long on each of `num_gpus` ranks, and products of `size` × `size` matrices."""

    device: str
    num_gpus: int
    nbytes: int
    size: int
    repeats: int


class Rank:
    """One process: its gradient and shard, the peers' memory, and a stream for each."""

    def __init__(self, case: Case) -> None:
        self.case, self.rank = case, dist.get_rank()
        self.device = torch.device("cuda", self.rank) if case.device == "cuda" else torch.device("cpu")
        shape = (case.num_gpus, case.nbytes // 4 // case.num_gpus)
        generator = torch.Generator().manual_seed(self.rank)
        self.whole = torch.randint(-8, 8, shape, generator=generator).float().to(self.device)
        self.shard = self.whole[self.rank].clone()
        self.gathered, self.pulled = torch.zeros_like(self.whole), torch.zeros_like(self.whole)
        self.wholes, self.shards = self._mapped(self.whole), self._mapped(self.shard)
        self.streams = [torch.cuda.Stream(self.device) for _ in self.peers] if case.device == "cuda" else []

    @property
    def peers(self) -> list[int]:
        """The other ranks, beginning with the next one, so that no two pull from the same at once."""
        return [(self.rank + step) % self.case.num_gpus for step in range(1, self.case.num_gpus)]

    def _mapped(self, own: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor, in its memory."""
        handles: list[Any] = [None] * self.case.num_gpus
        dist.all_gather_object(handles, reduce_tensor(own))
        return [own if rank == self.rank else make(*parts) for rank, (make, parts) in enumerate(handles)]

    def all_gather(self) -> torch.Tensor:
        """By copies: every shard in its place."""
        return self._pulled(self.gathered, lambda peer: self.shards[peer], self.shard)

    def reduce_scatter(self) -> torch.Tensor:
        """By copies: the sum of all ranks' parts of this rank's shard."""
        return self._pulled(self.pulled, lambda peer: self.wholes[peer][self.rank], self.whole[self.rank]).sum(0)

    def _pulled(self, rows: torch.Tensor, of: Callable[[int], torch.Tensor], own: torch.Tensor) -> torch.Tensor:
        """The rows: each peer's, copied on a stream of its own, and this rank's."""
        streams: list[AbstractContextManager[Any]] = [nullcontext() for _ in self.peers]
        if self.streams:
            now = torch.cuda.current_stream(self.device)
            for stream in self.streams:
                stream.wait_stream(now)
            streams = [torch.cuda.stream(stream) for stream in self.streams]
        for peer, context in zip(self.peers, streams, strict=True):
            with context:
                rows[peer].copy_(of(peer), non_blocking=True)
        rows[self.rank].copy_(own)
        for stream in self.streams:
            now.wait_stream(stream)
        return rows

    def nccl_all_gather(self) -> torch.Tensor:
        """By NCCL, or by gloo on CPUs."""
        found = torch.empty_like(self.whole)
        dist.all_gather_into_tensor(found.view(-1), self.shard)
        return found

    def nccl_reduce_scatter(self) -> torch.Tensor:
        """By NCCL, or by gloo on CPUs."""
        found = torch.empty_like(self.shard)
        dist.reduce_scatter_tensor(found, self.whole.view(-1))
        return found

    def ms(self, *works: Callable[[], object]) -> float:
        """Milliseconds of one repetition of all, each on a stream of its own, when all ranks do the same."""
        streams = [torch.cuda.Stream(self.device) for _ in works] if self.streams else [None for _ in works]
        for count in (WARM, self.case.repeats):
            self._synchronize()
            dist.barrier()
            self._synchronize()
            begin_s = time.perf_counter()
            for _ in range(count):
                for work, stream in zip(works, streams, strict=True):
                    with nullcontext() if stream is None else torch.cuda.stream(stream):
                        work()
            self._synchronize()
            took_s = time.perf_counter() - begin_s
        return 1e3 * took_s / self.case.repeats

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def play(case: Case) -> dict[str, Any]:
    """This rank's figures; both ways must agree."""
    is_cuda = case.device == "cuda"
    if not is_cuda:
        torch.multiprocessing.set_sharing_strategy("file_system")
    dist.init_process_group("nccl" if is_cuda else "gloo")
    if is_cuda:
        torch.cuda.set_device(dist.get_rank())
    rank = Rank(case)
    ways = {
        "all-gather": (rank.nccl_all_gather, rank.all_gather),
        "reduce-scatter": (rank.nccl_reduce_scatter, rank.reduce_scatter),
    }
    left = torch.randn(case.size, case.size, device=rank.device, dtype=torch.bfloat16)
    right = torch.randn_like(left)
    alone_ms = rank.ms(lambda: left @ right)
    found = {}
    for name, (nccl, copies) in ways.items():
        is_equal = torch.equal(nccl(), copies())
        each_ms = [rank.ms(work) for work in (nccl, copies)]
        num_products = max(1, round(max(each_ms) / alone_ms))

        def products(count: int = num_products) -> None:
            for _ in range(count):
                left @ right

        products_ms = rank.ms(products)
        beside_ms = [rank.ms(work, products) - products_ms for work in (nccl, copies)]
        found[name] = {"equal": is_equal, "ms": each_ms, "products_ms": products_ms, "beside_ms": beside_ms}
    rank.wholes.clear(), rank.shards.clear()  # the others' memory, before its owners end
    dist.barrier()
    dist.destroy_process_group()
    return found


def measured(case: Case) -> list[dict[str, Any]]:
    """The figures of all ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case.num_gpus}"]
    done = subprocess.run(
        [*command, __file__, "--play", json.dumps(asdict(case))],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONFAULTHANDLER": "1"},
    )
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def rows(cases: list[Case]) -> Iterator[list[str]]:
    for case in cases:
        ranks = measured(case)
        for name in ranks[0]:
            of_name = [rank[name] for rank in ranks]
            if not all(each["equal"] for each in of_name):
                raise SystemExit(f"{name}: the two ways differ")
            moved = case.nbytes * (case.num_gpus - 1) / case.num_gpus
            products_ms = statistics.median(each["products_ms"] for each in of_name)
            for way, number in (("NCCL", 0), ("copy engines", 1)):
                ms, beside_ms = (
                    statistics.median(each[key][number] for each in of_name) for key in ("ms", "beside_ms")
                )
                cells = (f"{ms:.3f}", f"{moved / ms / 1e6:.0f}", f"{products_ms:.2f}", f"{beside_ms:+.3f}")
                yield [name, f"{case.nbytes / 2**20:g}", way, *cells]


def tables(options: argparse.Namespace) -> Iterator[Table]:
    need_gpu(options.device)
    cases = [
        Case(options.device, options.gpus, round(mib * 2**20), options.size, options.repeats) for mib in options.mib
    ]
    columns = ("", "MiB", "by", "ms", "GB/s in", "products alone, ms", "beside them, ms more")
    yield Table(columns, rows(cases), f"{options.gpus} GPUs, fp32; means of {options.repeats} repetitions.")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--play"]:
        sys.stdout.write(f"{json.dumps(play(Case(**json.loads(sys.argv[2]))))}\n")  # a whole line at once
    else:
        main(
            __doc__,
            tables,
            {
                "--device": {"default": "cuda"},
                "--gpus": {"type": int, "default": 2},
                "--mib": {"type": float, "nargs": "+", "default": [16, 64, 256], "help": "on each GPU"},
                "--size": {"type": int, "default": 4096, "help": "of the matrices (default 4096)"},
                "--repeats": {"type": int, "default": 50},
            },
        )
