"""What the planner says where there is no plan: which of counts, schedule, memory and ways is in the way."""

import numpy as np

from tahq.errors import UserError
from tahq.plan.problem import Plan, PlanProblem
from tahq.plan.search.codecs import fewest_bits
from tahq.plan.search.search import Search, Simulations
from tahq.plan.search.stages import StageCosts, Wires
from tahq.plan.search.table import ClusterTable
from tahq.units import format_size


def check_counts(problem: PlanProblem) -> None:
    """Refuse numbers of stages that nothing can be planned for.

    Raises:
        UserError: there are fewer hosts or layers than stages, or no number of stages goes with the schedule.
    """
    stages, hosts, layers = problem.num_stages or 1, len(problem.cluster.hosts), problem.model.num_layers
    if stages > hosts:
        raise UserError(f"{stages} stages need {stages} hosts, the numbers have {hosts}")
    if stages > layers:
        raise UserError(f"{stages} stages need {stages} layers, the model has {layers}")
    if set(problem.schedules) == {"interleaved"} and not _interleaves(problem):
        among = f"{stages}" if problem.num_stages else f"2 to {min(hosts, layers)}"
        chunks, samples = problem.chunks_per_stage, problem.model.global_batch
        raise UserError(
            f"schedule interleaved with {chunks} chunks a stage goes with none of {among} stages: it takes two or "
            f"more, {chunks} layers for each (the model has {layers}), and a multiple of them as micro-batches "
            f"(global_batch is {samples})"
        )


def _interleaves(problem: PlanProblem) -> bool:
    """Whether some number of stages has a layer for every chunk, and whole rounds of micro-batches."""
    most = min(len(problem.cluster.hosts), problem.model.num_layers // problem.chunks_per_stage)
    allowed = {problem.num_stages} if problem.num_stages else set(range(2, most + 1))
    return any(
        problem.model.global_batch // size % stages == 0
        for stages in allowed & set(range(2, most + 1))
        for size in problem.model.micro_batches
    )


def check_ways(table: ClusterTable, plan: Plan) -> None:
    """Refuse the best plan if nothing gets from one of its stages to the next, or back: then no plan is any good.

    Raises:
        UserError: it is so.
    """
    dead = table.dead_hop(plan.hosts)
    if dead is None:
        return
    source, target = (table.problem.cluster.hosts[host] for host in dead)
    ends = [{host.name, host.site} for host in (source, target)]
    failures = [
        path.failure for path in table.problem.cluster.paths if path.source in ends[0] and path.target in ends[1]
    ]
    why = next((failure for failure in failures if failure), "no reason is given")
    raise UserError(
        f"no plan can run{_in_stages(table.problem)}: every choice of hosts that has the memory needs a way through "
        f"which nothing gets, like that from {source.name} to {target.name} ({why})"
    )


def why_nothing_fits(table: ClusterTable) -> str:
    """What the easiest stage of all needs, and what there is."""
    problem = table.problem
    size = problem.model.micro_batches[0]
    count = min(table.num_hosts, problem.model.num_layers, 3)
    stages = StageCosts(table, tuple(range(count)), size, Wires.same(*fewest_bits(problem), count))
    ones = np.ones(count)
    need = float((stages.fixed_nbytes(ones) + stages.held_nbytes(ones)).min())
    largest = int(np.argmax(table.memory))
    name, has = problem.cluster.hosts[largest].name, format_size(float(table.memory[largest]))
    if float(table.memory[largest]) < need:
        return (
            f"no host has the memory for a stage of one block with one micro-batch of {size} in flight: it needs "
            f"{format_size(need)} or more, and the largest, {name}, has {has}"
        )
    if _fits_with_fewer_in_flight(table):
        return (
            f"no choice of hosts{_in_stages(problem)} has the memory for what {' and '.join(problem.schedules)} keeps "
            f"in flight; with fewer micro-batches in flight the model fits: try --schedules 1f1b"
        )
    total = float(problem.model.block_nbytes * problem.model.num_layers)
    total += problem.model.first_nbytes + problem.model.last_nbytes
    return (
        f"no choice of hosts{_in_stages(problem)} has the memory for the model: weights, gradients and optimizer take "
        f"{format_size(total)}, all {table.num_hosts} hosts together have {format_size(float(table.memory.sum()))}"
    )


def _fits_with_fewer_in_flight(table: ClusterTable) -> bool:
    """Whether some division has room for one micro-batch in flight: then only the schedule wants more."""
    return bool(Search(table, range(table.num_hosts), fewest_bits(table.problem), Simulations(table)).candidates())


def _in_stages(problem: PlanProblem) -> str:
    return f" in {problem.num_stages} stages" if problem.num_stages else ""
