"""The benchmark of the runtime drives the engine by hand: it must know what the engine asks of a stage's parts."""

import pytest
from bench_runtime import MICRO_BATCHES, WARM_UP_STEPS, measure_actions

STAGES = 2
STEPS = 2


@pytest.mark.acceptance
def test_every_action_of_every_stage_is_measured():
    cost = measure_actions(STAGES, STEPS)
    assert len(cost.actions_ms) == 2 * MICRO_BATCHES * STAGES * STEPS
    assert len(cost.chain_ms) == STEPS
    assert WARM_UP_STEPS > 0
    assert cost.core_ms > 0
    assert all(ms > 0 for ms in (*cost.actions_ms, *cost.chain_ms))
    assert {"forward", "backward", "wait", "beside:encode", "beside:decode"} <= cost.shares.keys()
