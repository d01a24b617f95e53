"""The loss scale beside torch's own, step by step, and through a checkpoint."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tahq.comm.control.messages import Commit
from tahq.coordinator.loss_scale import LEAST, MOST, LossScale
from tahq.pipeline.config import LossScaleConfig


def commit(*, apply: bool, abandoned: bool = False) -> Commit:
    return Commit(0, apply, 1.0, evaluate=False, snapshot=False, stop=False, abandoned=abandoned)


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 9), st.integers(0, 60))
def test_scale_is_that_of_grad_scaler_also_through_a_checkpoint(overflows, growth_steps, saved_after):
    config = LossScaleConfig(initial=2.0**16, growth_steps=growth_steps)
    theirs, growth = torch.full((1,), config.initial), torch.zeros(1, dtype=torch.int32)
    ours = LossScale.at_start(config, {})
    for step, overflow in enumerate(overflows):
        torch._amp_update_scale_(theirs, growth, torch.tensor([float(overflow)]), 2.0, 0.5, growth_steps)
        ours = ours.after(commit(apply=not overflow))
        if step == saved_after:
            ours = LossScale.at_start(config, json.loads(json.dumps(ours.saved())))
        assert ours.scale == max(LEAST, theirs.item())
        theirs.clamp_(min=LEAST)


def test_scale_stays_in_an_abandoned_step_and_where_doubling_it_would_overflow():
    scale = LossScale(MOST, growth_steps=1)
    assert scale.after(commit(apply=False, abandoned=True)) == scale
    assert scale.after(commit(apply=True)).scale == MOST


@pytest.mark.parametrize("initial", [3.0, 65535.0, 0.5])
def test_scale_that_would_round_gradients_is_refused(initial):
    with pytest.raises(ValueError, match=r"no power of two|greater than or equal to 1"):
        LossScaleConfig(initial=initial)
