"""Runtimes over torch.distributed and gloo, seen from the sweep: one program per stage, configured by a file.

The programs (`torch_pipelining`, `bare_async`) write each stage's steps as JSON lines. A step is over when the first
stage has finished it, since its last backward is the last of all, and the last stage has written the loss.
"""

import itertools
import json
from collections.abc import Mapping
from typing import Any

import torch

from tahq.config.cluster import ClusterConfig
from tahq.config.file import config_json
from tahq.quant.spec import CodecSpec
from tahq_netem.programs import module_argv
from tahq_netem.runtimes.session import GrowingLines, RuntimeSession, RuntimeStep, SessionRequest
from tahq_netem.sweep.spec import HALF_WIRE, PLAIN_WIRE

STORE_PORT = 7702
PLAN_FILE = "plan.json"
DTYPES = {CodecSpec.parse(PLAIN_WIRE): torch.float32, CodecSpec.parse(HALF_WIRE): torch.bfloat16}


class GlooSession(RuntimeSession):
    """Processes that joined one gloo group.

    Args:
        request: the session.
        module: the program; `python -m` takes the plan's path and a rank.
    """

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
            self.start(f"rank {rank}", host, module_argv(self._module, PLAN_FILE, str(rank)), stage=rank)

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
