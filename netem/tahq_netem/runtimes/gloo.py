"""Runtimes over torch.distributed and gloo: a session of one program per stage, and what these programs share.

The programs (`torch_pipelining`, `bare_async`) are started with PLAN RANK and write each stage's steps as JSON lines. A
step is over when the first stage has finished it, since its last backward is the last of all, and the last stage has
written the loss.

Tensors cross the wire from CPU memory in fp32 or bf16, wherever the stage computes; so the boundary of a stage, which
converts and copies them, is part of its module, and gradients cross it in the same type.

Shapes: B samples per micro-batch, S tokens, C channels.
"""

import itertools
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from pyroute2 import IPRoute
from torch import distributed, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # made at run time

from tahq.config.cluster import ClusterConfig
from tahq.config.file import config_from_json, config_json
from tahq.config.stage_estimate import autocast_dtype
from tahq.data.batches import BatchSource
from tahq.models.loss import summed_cross_entropy
from tahq.models.slice import ModelSlice
from tahq.quant.spec import CodecSpec
from tahq.worker.assembly import StageData, compute_device
from tahq_netem.programs import leave_with_stdin, module_argv
from tahq_netem.runtimes.session import GrowingLines, RuntimeSession, RuntimeStep, SessionRequest
from tahq_netem.sweep.spec import HALF_WIRE, PLAIN_WIRE
from tahq_netem.sweep.stage_times import build_stage

STORE_PORT = 7702
PLAN_FILE = "plan.json"
DTYPES = {CodecSpec.parse(PLAIN_WIRE): torch.float32, CodecSpec.parse(HALF_WIRE): torch.bfloat16}
_TIMEOUT = timedelta(hours=1)
"""Long, since the sweep decides when a step takes too long."""


class GlooSession(RuntimeSession):
    """Processes that joined one gloo group; `module` is the program."""

    def __init__(self, request: SessionRequest, module: str) -> None:
        self._module = module
        self._rows: list[dict[str, Any]] = []
        self._loss_of: dict[int, float | None] = {}
        super().__init__(request)

    def _start_all(self) -> None:
        config, network, hosts = self.request.config, self.request.network, self.request.hosts
        elements = config.training.micro_batch * config.data.seq_len * (config.model.hidden_size or 0)
        frame_nbytes = elements * wire_dtype(config).itemsize
        self._frames = (float(frame_nbytes * config.training.num_micro_batches),) * (len(hosts) - 1)
        self._seconds = GrowingLines(self.request.folder / steps_file(0))
        self._losses = GrowingLines(self.request.folder / steps_file(len(hosts) - 1))
        plan = {
            "config": config_json(config),
            "schedule": self.request.schedule,
            "addresses": [network.address(host) for host in hosts],
            "port": STORE_PORT,
        }
        (self.request.folder / PLAN_FILE).write_text(json.dumps(plan), encoding="utf-8")
        for rank, host in enumerate(hosts):
            self.start(f"rank {rank}", host, module_argv(self._module, PLAN_FILE, str(rank)))

    def steps_so_far(self) -> list[RuntimeStep]:
        """The first stage's rows for which the last stage has written the loss."""
        self._rows += self._seconds.read()
        self._loss_of |= {row["step"]: row["loss"] for row in self._losses.read()}
        finished = list(itertools.takewhile(lambda row: row["step"] in self._loss_of, self._rows))
        del self._rows[: len(finished)]
        return [self._record(row) for row in finished]

    def _record(self, row: Mapping[str, Any]) -> RuntimeStep:
        loss = self._loss_of.pop(row["step"])
        nothing = ((0.0, 0.0),) * (len(self._frames) + 1)  # tensors are sent as they are
        return RuntimeStep(row["step"], row["seconds"], loss, self._frames, self._frames, codec_s=nothing)


def wire_dtype(config: ClusterConfig) -> torch.dtype:
    """The type in which stages exchange tensors, both ways; fp32 where a program packs them itself."""
    return DTYPES.get(CodecSpec.parse(config.wire.activations), torch.float32)


def steps_file(rank: int) -> str:
    """Where a rank writes its steps."""
    return f"steps-{rank}.jsonl"


@dataclass(frozen=True, slots=True)
class StagePart:
    """One process's part of the pipeline; batches are for the first and the last stage."""

    rank: int
    config: ClusterConfig
    schedule: str
    module: nn.Module
    """From a micro-batch's tensor in CPU memory to the next; the last stage's returns logits."""
    device: torch.device
    optimizer: torch.optim.Optimizer
    batches: BatchSource | None
    log: "StepLog"

    @property
    def is_first(self) -> bool:
        """Whether its input is tokens."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether it computes the loss."""
        return self.rank == self.config.pipeline.stages - 1

    @property
    def boundary(self) -> tuple[int, int, int]:
        """[B, S, C] of the tensors that cross a cut."""
        config = self.config
        return config.training.micro_batch, config.data.seq_len, config.model.hidden_size or 0

    def loss(self, logits: torch.Tensor, labels: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """A micro-batch's part of the step's loss."""
        return summed_cross_entropy(logits, labels.to(self.device)) / max(num_tokens, 1)

    def train(self, run_step: Callable[[int], Sequence[torch.Tensor]]) -> None:
        """Train until the process is ended; `run_step` gives the last stage the micro-batches' losses."""
        for step in itertools.count():
            losses = run_step(step)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.log.write(step, math.fsum(float(loss) for loss in losses) if self.is_last else None)


class Boundaries(nn.Module):
    """A slice between two wires: from CPU memory to its device and back, fp32 inside; the last stage's output stays."""

    def __init__(self, module: ModelSlice, config: ClusterConfig, device: torch.device, *, is_last: bool) -> None:
        super().__init__()
        self.module = module
        self._device = device
        self._dtype = autocast_dtype(config, device)
        self._is_last = is_last
        self._wire_dtype = wire_dtype(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the slice."""
        with torch.autocast(self._device.type, self._dtype or torch.bfloat16, enabled=self._dtype is not None):
            on_device = x.to(self._device)
            # Tokens unchanged, activations in fp32: converted on the device, which halves the bytes to copy.
            y: torch.Tensor = self.module(on_device.float() if x.is_floating_point() else on_device)
        # torch's schedules want the strides that they saw on the meta device; rows of logits may be padded
        return y.contiguous() if self._is_last else y.to(self._wire_dtype).cpu()


class StepLog:
    """Steps as JSON lines: number, seconds since the last, loss."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8", buffering=1)
        self._begin_s = time.perf_counter()

    def write(self, step: int, loss: float | None) -> None:
        """Log that a step has ended now."""
        now_s = time.perf_counter()
        seconds, self._begin_s = now_s - self._begin_s, now_s
        loss = loss if loss is not None and math.isfinite(loss) else None
        self._file.write(json.dumps({"step": step + 1, "seconds": seconds, "loss": loss}) + "\n")


def join(argv: Sequence[str]) -> StagePart:
    """Build the stage that the command line names (PLAN RANK), and join the group of all of them."""
    leave_with_stdin()
    plan, rank = json.loads(Path(argv[1]).read_text(encoding="utf-8")), int(argv[2])
    config = config_from_json(plan["config"])
    torch.set_num_threads(config.run.threads or 1)
    device = compute_device(config, rank, None)
    is_last = rank == config.pipeline.stages - 1
    module = Boundaries(build_stage(config, rank, device), config, device, is_last=is_last)
    module.train()
    batches = batches_of(config) if rank == 0 or is_last else None
    join_group(plan["addresses"], plan["port"], rank)
    optimizer, log = optimizer_of(config, module), StepLog(Path(steps_file(rank)))
    return StagePart(rank, config, plan["schedule"], module, device, optimizer, batches, log)


def batches_of(config: ClusterConfig) -> BatchSource:
    """The run's batches."""
    training = config.training
    return BatchSource(
        StageData.load(config).dataset,
        seed=config.run.seed,
        global_batch=training.global_batch,
        micro_batch=training.micro_batch,
    )


def optimizer_of(config: ClusterConfig, module: nn.Module) -> torch.optim.Optimizer:
    """The configuration's AdamW, of all the module's parameters."""
    training = config.training
    return torch.optim.AdamW(
        module.parameters(), training.lr, training.betas, training.epsilon, training.weight_decay, fused=True
    )


def join_group(addresses: Sequence[str], port: int, rank: int) -> None:
    """Join the default group; the first rank keeps its store."""
    # Without a name gloo takes loopback in a namespace, and hangs.
    os.environ["GLOO_SOCKET_IFNAME"] = device_of(addresses[rank])
    store = TCPStore(addresses[0], port, len(addresses), is_master=rank == 0, timeout=_TIMEOUT)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=len(addresses), timeout=_TIMEOUT)


def device_of(address: str) -> str:
    """The name of the network device that has an IPv4 address, in this process's namespace."""
    if address.startswith("127."):
        return "lo"
    with IPRoute() as kernel:
        for entry in kernel.get_addr(address=address):
            return str(entry.get_attr("IFA_LABEL"))
    raise OSError(f"no network device here has the address {address}")
