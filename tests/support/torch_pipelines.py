"""Real pipelines of torch, on loopback: one start of four processes that take every case in turn, two at a time.

Also the same training without a pipeline, with the codec put by hand where ranks meet.
"""

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed import pipelining
from torch.nn import functional

from tahq.errors import ConfigError
from tahq.integrations.boundary_packing import ACTIVATION, GRADIENT, Crossing, Step, packing_key
from tahq.integrations.torch_pipelining import compress
from tahq.quant import get_codec

WORLD = 4
MICRO_BATCHES = 4
STEPS = 2
SHAPE = (2, 8, 64)
"""[B, S, C] of a micro-batch."""
SEED = 7
SCHEDULES = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "bfs": pipelining.ScheduleLoopedBFS,
    "zbv": pipelining.ScheduleZBVZeroBubble,
    "dualpipev": pipelining.ScheduleDualPipeV,
}
SHAPED_LIKE_A_V = ("zbv", "dualpipev")
TWO_CHUNKS = ("interleaved", "bfs", *SHAPED_LIKE_A_V)
RATE = 0.1


@dataclass(frozen=True)
class Case:
    """One training.

    with_others: integers, a float that no codec makes shorter, and a mask of floats cross beside the activations.
    is_subclass: stages have the user's class. is_static: the shapes are given, so torch exchanges none.
    has_refused_steps: the first stage's rank gives each step too few samples first, which torch refuses.
    micro_batches: how many each step has; there is a schedule for each number.
    """

    schedule: str
    ranks: tuple[int, ...]
    activations: str = "tah"
    gradients: str = "fixed:bits=8"
    with_others: bool = False
    dtype: torch.dtype = torch.float32
    first_step: int = 0
    is_subclass: bool = False
    is_static: bool = False
    has_refused_steps: bool = False
    is_evaluated_first: bool = False
    micro_batches: tuple[int, ...] = (MICRO_BATCHES,) * STEPS

    @property
    def num_stages(self) -> int:
        return len(self.ranks) * (2 if self.schedule in TWO_CHUNKS else 1)

    @property
    def has_evaluation(self) -> bool:
        """Torch's own evaluation of a V fails in 2.13, with or without tahq."""
        return self.schedule not in SHAPED_LIKE_A_V

    def place(self, stage: int) -> int:
        """Which of the pipeline's ranks has a stage: in turn, or for a V there and back."""
        count = len(self.ranks)
        is_way_back = self.schedule in SHAPED_LIKE_A_V and stage >= count
        return self.num_stages - 1 - stage if is_way_back else stage % count


class OwnStage(pipelining.PipelineStage):
    """A user's own class of stages."""


class Piece(nn.Module):
    """One stage's layers."""

    def __init__(self, number: int, case: Case) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(number)
        channels = SHAPE[-1]
        self.weight = nn.Parameter((torch.randn(channels, channels, generator=generator) / 8).to(case.dtype))
        self.bias = nn.Parameter(torch.zeros(channels, dtype=case.dtype))
        self._with_others = case.with_others
        self._is_last = number == case.num_stages - 1

    def forward(self, x: torch.Tensor, places: Any = None, scale: Any = None, mask: Any = None) -> Any:
        if places is None:
            places, scale = torch.arange(x.shape[1]).expand(x.shape[0], -1).contiguous(), x[:, :1, :1].abs() + 1
            mask = torch.full(x.shape, -torch.inf, dtype=x.dtype).triu(8)
        y = functional.tanh(functional.linear(x, self.weight, self.bias))
        if not self._with_others:
            return y
        y = (y * scale + (places % 3).to(y.dtype)[..., None]) * mask.exp()
        return y if self._is_last else (y, places, scale, mask)


def batch(case: Case, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of a step, all micro-batches."""
    generator = torch.Generator().manual_seed(1000 + step)
    shape = (SHAPE[0] * MICRO_BATCHES, *SHAPE[1:])
    x, y = (torch.randn(shape, generator=generator).to(case.dtype) for _ in range(2))
    return x, y


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(output.float(), target.float())


def update(module: nn.Module) -> dict[str, torch.Tensor]:
    """Take a step downhill; returns the gradients."""
    gradients = {}
    for name, parameter in module.named_parameters():
        gradients[name] = parameter.grad.clone()
        parameter.data.add_(parameter.grad, alpha=-RATE)
        parameter.grad = None
    return gradients


class HandMadeCut(torch.autograd.Function):
    """The codec between two chunks: of the activation on its way forward, of its gradient on the way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, case: Case, step: Step, cut: int, micro_batch: int) -> torch.Tensor:
        ctx.place = (case, step, cut, micro_batch)
        return _there_and_back(x, case.activations, step, Crossing(ACTIVATION, cut, micro_batch))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        case, step, cut, micro_batch = ctx.place
        returned = _there_and_back(gradient, case.gradients, step, Crossing(GRADIENT, cut, micro_batch))
        return returned, None, None, None, None


def _there_and_back(x: torch.Tensor, spec: str, step: Step, crossing: Crossing) -> torch.Tensor:
    codec, key = get_codec(spec), packing_key(SEED, step, crossing, 0)
    return codec.decode(codec.encode(x, key=key), x.shape, x.dtype, key=key)


class PlainTraining:
    """The case without a pipeline: chunk after chunk, micro-batch after micro-batch."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._pieces = [Piece(stage, case) for stage in range(case.num_stages)]

    def results(self) -> dict[str, Any]:
        """What `train` gives, of all stages."""
        is_evaluated_first, has_evaluation = self._case.is_evaluated_first, self._case.has_evaluation
        # before any training, activations cannot be told from a mask of floats and are sent unchanged
        evaluated = [self._evaluate(None, self._case.micro_batches[0])] if is_evaluated_first else []
        steps = []
        for step in range(STEPS):
            steps.append(self._train(step))
            if has_evaluation:
                number = step + is_evaluated_first
                evaluated.append(self._evaluate(Step("eval", number), self._case.micro_batches[step]))
        return {"steps": steps, "eval": evaluated}

    @torch.no_grad()
    def _evaluate(self, step: Step | None, count: int) -> list[float]:
        return [loss.item() for loss in self._losses(*batch(self._case, STEPS), step, count)]

    def _train(self, step: int) -> dict[str, Any]:
        count = self._case.micro_batches[step]
        losses = list(self._losses(*batch(self._case, step), Step("train", self._case.first_step + step), count))
        # Gradients are summed in the order of the backward passes, which only this schedule takes from the end.
        for loss in reversed(losses) if self._case.schedule == "bfs" else losses:
            loss.backward()
        for piece in self._pieces:
            for parameter in piece.parameters():
                parameter.grad.div_(count)
        gradients = {stage: update(piece) for stage, piece in enumerate(self._pieces)}
        return {"losses": [loss.item() for loss in losses], "gradients": gradients}

    def _losses(self, x: torch.Tensor, y: torch.Tensor, step: Step | None, count: int) -> Iterator[torch.Tensor]:
        for micro_batch, (inputs, targets) in enumerate(zip(x.chunk(count), y.chunk(count), strict=True)):
            yield loss_of(self._forward(inputs, step, micro_batch), targets)

    def _forward(self, x: torch.Tensor, step: Step | None, micro_batch: int) -> torch.Tensor:
        case, crossing = self._case, (x,)
        for stage, piece in enumerate(self._pieces):
            output = piece(*crossing)
            crossing = output if isinstance(output, tuple) else (output,)
            if step is not None and stage + 1 < case.num_stages and case.place(stage) != case.place(stage + 1):
                crossing = (HandMadeCut.apply(crossing[0], case, step, stage, micro_batch), *crossing[1:])
        return crossing[0]


def train(case: Case, group: distributed.ProcessGroup) -> dict[str, Any]:
    """This rank's part of a case under torch's schedule."""
    mine = [stage for stage in range(case.num_stages) if case.place(stage) == distributed.get_rank(group)]
    stages = [_stage(case, stage, group) for stage in mine]
    compressed = compress(
        stages, activations=case.activations, gradients=case.gradients, seed=SEED, step=case.first_step
    )
    schedules = {count: _schedule(case, compressed, count) for count in case.micro_batches}
    first = schedules[case.micro_batches[0]]
    evaluated = [_evaluate(first, case, stages)] if case.is_evaluated_first else []
    steps = []
    for step in range(STEPS):
        schedule = schedules[case.micro_batches[step]]
        if case.has_refused_steps and stages[0].is_first:
            with pytest.raises(ValueError):  # the caller of a schedule goes on after an error of its own
                schedule.step(batch(case, 0)[0][:1])
        losses = _run(schedule.step, stages, batch(case, step))
        steps.append({"losses": losses, "gradients": {stage.stage_index: update(stage.submod) for stage in stages}})
        if case.has_evaluation:
            evaluated.append(_evaluate(schedule, case, stages))
    return {"steps": steps, "eval": evaluated}


@torch.no_grad()
def _evaluate(schedule: Any, case: Case, stages: Sequence[pipelining.PipelineStage]) -> list[float]:
    return _run(schedule.eval, stages, batch(case, STEPS))


def _stage(case: Case, number: int, group: distributed.ProcessGroup) -> pipelining.PipelineStage:
    kind = OwnStage if case.is_subclass else pipelining.PipelineStage
    shapes = _shapes(case, number) if case.is_static else {}
    return kind(Piece(number, case), number, case.num_stages, torch.device("cpu"), group=group, **shapes)


def _shapes(case: Case, number: int) -> dict[str, tuple[torch.Tensor, ...]]:
    """The arguments that describe all tensors, and which of them have gradients, to torch."""
    inputs, outputs = (), (torch.zeros(SHAPE, dtype=case.dtype),)
    for stage in range(number + 1):
        inputs, output = outputs, Piece(stage, case)(*outputs)
        tensors = output if isinstance(output, tuple) else (output,)
        outputs = tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors)
    return {"input_args": inputs, "output_args": outputs}


def _schedule(case: Case, stages: list[pipelining.PipelineStage], count: int) -> Any:
    """One stage for schedules of one stage, a list for the others."""
    return SCHEDULES[case.schedule](stages if case.schedule in TWO_CHUNKS else stages[0], count, loss_fn=loss_of)


def _run(call: Any, stages: Sequence[pipelining.PipelineStage], data: tuple[torch.Tensor, torch.Tensor]) -> list[float]:
    inputs = data[:1] if any(stage.is_first for stage in stages) else ()
    if not any(stage.is_last for stage in stages):
        call(*inputs)
        return []
    losses: list[torch.Tensor] = []
    call(*inputs, target=data[1], losses=losses)
    return [loss.item() for loss in losses]


def disagree(group: distributed.ProcessGroup) -> str:
    """The error of every rank when each has another codec."""
    rank = distributed.get_rank(group)
    stage = pipelining.PipelineStage(nn.Identity(), rank, 2, torch.device("cpu"), group=group)
    try:
        compress(stage, gradients=f"fixed:bits={6 + rank}")
    except ConfigError as error:
        return str(error)
    return ""


def run_world(cases: dict[str, Case], folder: Path) -> None:
    """Start the ranks, which write what they found to `folder`, and wait for them."""
    # one process imports torch, and forks the ranks before any thread is
    context = multiprocessing.get_context("spawn")
    parent = context.Process(target=_fork_ranks, args=(cases, folder))
    parent.start()
    parent.join()
    assert parent.exitcode == 0, f"the ranks ended with status {parent.exitcode}"


def _fork_ranks(cases: dict[str, Case], folder: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_run_rank, args=(cases, folder, rank)) for rank in range(WORLD)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert all(process.exitcode == 0 for process in ranks)


def _run_rank(cases: dict[str, Case], folder: Path, rank: int) -> None:
    limit = timedelta(seconds=120)
    store = distributed.FileStore(str(folder / "store"), WORLD)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=limit)
    groups = {ranks: distributed.new_group(list(ranks)) for ranks in sorted({case.ranks for case in cases.values()})}
    found = {name: train(case, groups[case.ranks]) for name, case in cases.items() if rank in case.ranks}
    told = disagree(groups[(2, 3)]) if rank in (2, 3) else ""
    torch.save({"cases": found, "told": told}, folder / f"rank-{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()
