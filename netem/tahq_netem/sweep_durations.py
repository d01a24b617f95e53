"""How long the points of a sweep are expected to take: their steps' bounds, which nothing is faster than.

Real and calibrated compute is not known beforehand and counts as nothing; so these are lower limits, good for the
order of points, for what is left on the progress bar, and for not beginning what cannot end in time.
"""

from collections.abc import Sequence

from tahq_netem.bound import LinkSpeed, step_bound_s
from tahq_netem.compute import StageTimes
from tahq_netem.session_config import planned_work
from tahq_netem.sweep_measurement import num_steps
from tahq_netem.sweep_points import Point, by_session
from tahq_netem.sweep_spec import SweepConfig

START_S = 15.0
"""What starting a session is expected to take."""


def expected_step_s(config: SweepConfig, point: Point, times: StageTimes | None) -> float:
    """Seconds of a step; `times` is what stages sleep, None where that is not known."""
    speed = LinkSpeed.of(point.network.plan(point.session.stages))
    return step_bound_s(planned_work(config, point.session, times), speed)


def expected_point_s(config: SweepConfig, point: Point, times: StageTimes | None) -> float:
    """Seconds of all steps of a point, those that settle included."""
    step_s = expected_step_s(config, point, times)
    return step_s * (config.steps.settle + num_steps(config.steps, step_s))


def expected_sweep_s(config: SweepConfig, points: Sequence[Point]) -> float:
    """Seconds of points and of the starts of their sessions, as far as the configuration says."""
    seconds = sum(expected_point_s(config, point, _said_times(point)) for point in points)
    return seconds + START_S * len(by_session(points))


def _said_times(point: Point) -> StageTimes | None:
    key = point.session
    return StageTimes(key.forward_s, key.backward_s) if key.forward_s else None
