"""Codecs that may be chosen, and which of them each link and direction gets.

Speed first, then quality: a plan is found with the codec of fewest bits in each direction, and then links take more
faithful ones, one rung of the ladder at a time in turn, for as long as all together cost no more than `TOLERANCE` of
the tokens a second. So only links that limit the step are coded hard.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tahq.coordinator.planner_prediction import is_long
from tahq.coordinator.planner_problem import Plan, PlanProblem
from tahq.coordinator.planner_search import Simulations

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


def with_best_codecs(problem: PlanProblem, plan: Plan, simulations: Simulations) -> Plan:
    """The plan with the most faithful codecs that speed allows; one a direction where a step is long to simulate."""
    limit_s = simulations.time_s(plan) * (1 + TOLERANCE)
    places = list(_places(plan))
    while places:
        for place in list(places):
            better = _one_rung_up(problem, plan, *place)
            if better is None or simulations.time_s(better) > limit_s:
                places.remove(place)
            else:
                plan = better
    return plan


def _places(plan: Plan) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Links that change together, by direction."""
    links = range(plan.num_stages - 1)
    for direction in ("gradients", "activations"):
        yield from ((direction, group) for group in ([tuple(links)] if is_long(plan) else [(link,) for link in links]))


def _one_rung_up(problem: PlanProblem, plan: Plan, direction: str, links: Sequence[int]) -> Plan | None:
    """The plan with the next more faithful codec on some links; None: they have the best."""
    allowed, codecs = getattr(problem, direction), list(getattr(plan, direction))
    rung = allowed.index(codecs[links[0]]) if links else 0
    if rung == 0:
        return None
    for link in links:
        codecs[link] = allowed[rung - 1]
    if direction == "activations":
        return replace(plan, activations=tuple(codecs))
    return replace(plan, gradients=tuple(codecs))
