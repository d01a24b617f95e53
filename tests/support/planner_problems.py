"""Small clusters and models for the planner, drawn from a seed or written by hand."""

import random

from tahq.plan.cluster_numbers import ClusterNumbers, HostNumbers, LayerTimes, PathNumbers
from tahq.plan.problem import HeldBytes, MemoryOption, ModelNumbers, PlanProblem, divisors


def model(num_layers=6, global_batch=4, *, held=0.0, block=0.0, **changes) -> ModelNumbers:
    sizes = divisors(global_batch)
    kept = {size: HeldBytes(block=size * held) for size in sizes}
    trained = block / 16, 0.0, 0.0  # weights, gradients and two moments in fp32
    return ModelNumbers(num_layers, 64, 64, global_batch, (MemoryOption(kept, block),), trained=trained, **changes)


def host(name, forward=0.01, backward=None, *, size=1, **numbers) -> HostNumbers:
    times = LayerTimes(micro_batch=size, block_forward=forward, block_backward=backward or 2 * forward)
    return HostNumbers(name=name, compute=[times], **numbers)


def cluster(*hosts, **numbers) -> ClusterNumbers:
    return ClusterNumbers(hosts=list(hosts), **numbers)


def ask(
    hosts, num_layers=6, global_batch=8, *, held=0.0, block=0.0, paths=(), relay=None, round_trip=0.0, **choices
) -> PlanProblem:
    numbers = cluster(*hosts, paths=list(paths), relay=relay, round_trip=round_trip)
    return PlanProblem(model(num_layers, global_batch, held=held, block=block), numbers, **choices)


def random_problem(seed, num_hosts=3, num_layers=5, global_batch=4, schedules=("1f1b", "gpipe")) -> PlanProblem:
    """Compute 1 : 2 : 4, links from slow to fast, some paths slower or farther still, sometimes little memory."""
    draw = random.Random(seed)
    memory = draw.choice([None, None, 400_000, 800_000])
    hosts = [
        host(
            f"h{index}",
            draw.choice([0.02, 0.04, 0.08]),
            up=draw.choice([1e6, 3e6, 1e7, 1e8]),
            down=draw.choice([2e6, 1e7, 1e8]),
            memory=None if memory is None else memory * draw.choice([1, 2]),
        )
        for index in range(num_hosts)
    ]
    paths = [
        PathNumbers(
            source=one.name,
            target=other.name,
            rate=draw.choice([None, None, 1e6]),
            round_trip=draw.choice([0.002, 0.02, 0.2]),
        )
        for one in hosts
        for other in hosts
        if one.name < other.name
    ]
    return PlanProblem(
        model(num_layers, global_batch, held=25_000.0, block=100_000.0),
        ClusterNumbers(hosts=hosts, paths=paths),
        schedules=schedules,
        piece_nbytes=None,
    )
