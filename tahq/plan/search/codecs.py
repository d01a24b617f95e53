"""Codecs that may be chosen, and the choice for each link and direction.

Speed first, then quality: a plan is found with the codec of fewest bits in each direction, and then links take more
faithful ones, one rung of the ladder at a time in turn, for as long as all together cost no more than `TOLERANCE` of
the tokens per second and their frames fit in memory. So only links that limit the step are compressed hard. A more
faithful codec may have shorter frames than a less faithful one: where a rung costs too much, a higher one with shorter
frames is tried.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from tahq.plan.prediction import fits_memory, is_long
from tahq.plan.problem import PipelinePlan, PlanProblem
from tahq.plan.search.search import Simulations

LADDER: dict[str, tuple[str, ...]] = {
    "activations": (
        *("raw:dtype=bf16", "fixed:bits=8", "wf:bits=6", "fixed:bits=6", "wf:bits=5", "wf:bits=4", "tah"),
        *("wf:bits=3", "wf:bits=2"),
    ),
    "gradients": (
        *("raw:dtype=bf16", "fixed:bits=8", "fixed:bits=6", "eden:bits=5", "eden:bits=4", "eden:bits=3"),
        "eden:bits=2",
    ),
}
"""The meaning of `--codec ladder`, by direction, the most faithful first.

Bits per element of a frame are about: raw 16; fixed 8.3 and 6.3; wf 6.1 to 2.1; tah 4.4; eden 5.0 to 2.0. The order
is that of the relative error on the boundary of a trained GPT-2 small (benchmarks/results/frontier_epyc2_202611.md).
"""

TOLERANCE = 0.01
"""Share of the tokens per second that quality may cost in all."""


def with_best_codecs(simulations: Simulations, plan: PipelinePlan, limit_s: float | None = None) -> PipelinePlan:
    """The plan with the most faithful codecs that speed and memory allow; one per direction where a step is long.

    It begins with the plan's own codecs. Its step may take `limit_s`; None: `TOLERANCE` longer than it does.
    """
    limit_s = simulations.time_s(plan) * (1 + TOLERANCE) if limit_s is None else limit_s
    links = range(plan.num_stages - 1)
    groups = [tuple(links)] if is_long(plan) else [(link,) for link in links]
    places = [(direction, group) for direction in ("gradients", "activations") for group in groups if group]
    while places:
        for place in list(places):
            for above in _rungs_above(simulations.table.problem, plan, *place):
                if fits_memory(simulations.table, above) and simulations.time_s(above) <= limit_s:
                    plan = above
                    break
            else:
                places.remove(place)
    return plan


def _rungs_above(
    problem: PlanProblem, plan: PipelinePlan, direction: str, links: Sequence[int]
) -> Iterator[PipelinePlan]:
    """The plan with the next more faithful codec on some links, then with those above it of ever shorter frames."""
    allowed, codecs = getattr(problem, direction), getattr(plan, direction)
    shortest = math.inf
    for codec in reversed(allowed[: allowed.index(codecs[links[0]])]):
        nbytes = problem.frame_nbytes(codec, plan.micro_batch)
        if nbytes < shortest:
            shortest = nbytes
            changed = tuple(codec if link in links else each for link, each in enumerate(codecs))
            yield replace(plan, activations=changed) if direction == "activations" else replace(plan, gradients=changed)
