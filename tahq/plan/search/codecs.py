"""Codecs that may be chosen, and which of them each link and direction gets.

Speed first, then quality: a plan is found with the codec of fewest bits in each direction, and then links take more
faithful ones, one rung of the ladder at a time in turn, for as long as all together cost no more than `TOLERANCE` of
the tokens a second and their frames have room in memory. So only links that limit the step are coded hard. A more
faithful codec may have shorter frames than a less faithful one: where a rung is too much, such a one above it is tried.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from tahq.plan.prediction import fits_memory, is_long
from tahq.plan.problem import Plan, PlanProblem
from tahq.plan.search.search import Simulations

LADDER: dict[str, tuple[str, ...]] = {
    "activations": (
        *("raw:dtype=bf16", "fixed:bits=8", "wf:bits=6", "fixed:bits=6", "wf:bits=5", "wf:bits=4", "tah"),
        *("wf:bits=3", "wf:bits=2"),
    ),
    "gradients": (
        *("raw:dtype=bf16", "fixed:bits=8", "fixed:bits=6", "eden:bits=6", "eden:bits=5", "eden:bits=4"),
        *("eden:bits=3", "eden:bits=2"),
    ),
}
"""What `--codecs ladder` stands for, by direction, the most faithful first.

Bits an element of a frame are about: raw 16; fixed 8.3 and 6.3; wf 6.1 to 2.1; tah 4.4; eden 6.0 to 2.0. The order
is that of the relative error on the boundary of a trained GPT-2 small (benchmarks/results/frontier_epyc2_202611.md).
"""

TOLERANCE = 0.01
"""Share of the tokens a second that quality may cost in all."""


def fewest_bits(problem: PlanProblem) -> tuple[str, str]:
    """The codec of the shortest frames in each direction; of equals the more faithful."""
    size = problem.model.micro_batches[0]

    def shortest(codecs: Sequence[str]) -> str:
        return min(codecs, key=lambda codec: problem.frame_nbytes(codec, size))

    return shortest(problem.activations), shortest(problem.gradients)


def with_best_codecs(problem: PlanProblem, plan: Plan, simulations: Simulations, limit_s: float | None = None) -> Plan:
    """The plan with the most faithful codecs that speed and memory allow; one a direction where a step is long.

    Args:
        problem: what may be chosen.
        plan: the codecs to begin with are its own.
        simulations: of the same cluster.
        limit_s: how long its step may become; None: `TOLERANCE` longer than it is.
    """
    limit_s = simulations.time_s(plan) * (1 + TOLERANCE) if limit_s is None else limit_s
    places = list(_places(plan))
    while places:
        for place in list(places):
            above = _rungs_above(problem, plan, *place)
            better = next((each for each in above if _is_allowed(simulations, each, limit_s)), None)
            if better is None:
                places.remove(place)
            else:
                plan = better
    return plan


def _is_allowed(simulations: Simulations, plan: Plan, limit_s: float) -> bool:
    return fits_memory(simulations.table, plan) and simulations.time_s(plan) <= limit_s


def _places(plan: Plan) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Links that change together, by direction."""
    links = range(plan.num_stages - 1)
    for direction in ("gradients", "activations"):
        yield from ((direction, group) for group in ([tuple(links)] if is_long(plan) else [(link,) for link in links]))


def _rungs_above(problem: PlanProblem, plan: Plan, direction: str, links: Sequence[int]) -> Iterator[Plan]:
    """The plan with the next more faithful codec on some links, then with those above it of ever shorter frames."""
    allowed, codecs = getattr(problem, direction), list(getattr(plan, direction))
    rung = allowed.index(codecs[links[0]]) if links else 0
    shortest = math.inf
    for codec in reversed(allowed[:rung]):
        nbytes = problem.frame_nbytes(codec, plan.micro_batch)
        if nbytes < shortest:
            shortest = nbytes
            changed = tuple(codec if link in links else each for link, each in enumerate(codecs))
            yield replace(plan, activations=changed) if direction == "activations" else replace(plan, gradients=changed)
