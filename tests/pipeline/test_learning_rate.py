import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tahq.pipeline.config import TrainingConfig
from tahq.pipeline.update import learning_rate


def config(schedule="constant", **keys):
    return TrainingConfig(**{"epochs": 1.0, "lr": 1.0, "lr_schedule": schedule} | keys)


def rates(training, total_steps):
    return [learning_rate(training, step, total_steps) for step in range(total_steps)]


@st.composite
def runs(draw):
    total_steps = draw(st.integers(1, 300))
    lr = draw(st.floats(1e-6, 1.0))
    training = config(
        draw(st.sampled_from(["constant", "linear", "cosine", "wsd"])),
        lr=lr,
        min_lr=draw(st.floats(0.0, 1.0)) * lr,
        warmup_steps=draw(st.integers(0, 320)),
        decay_steps=draw(st.none() | st.integers(1, 320)),
        decay_shape=draw(st.sampled_from(["linear", "sqrt"])),
    )
    return training, total_steps


@given(runs())
def test_rate_is_bounded(run):
    training, total_steps = run
    for step, rate in enumerate(rates(training, total_steps)):
        lowest = 0.0 if step < training.warmup_steps else training.min_lr
        assert lowest <= rate <= training.lr
        assert rate > 0 or step >= training.warmup_steps


@given(runs())
def test_rate_rises_through_the_warm_up_and_never_after_it(run):
    training, total_steps = run
    for (step, before), (_, after) in itertools.pairwise(enumerate(rates(training, total_steps))):
        if step < training.warmup_steps:
            # the step into the peak included: equal increments of lr / (w + 1), but for the decay's first
            increment = training.lr / (training.warmup_steps + 1)
            if step + 1 < training.warmup_steps:
                assert after - before == pytest.approx(increment)
        else:
            assert after <= before


def test_rate_does_not_rise_by_rounding():
    # lr · (1 − share) + min_lr · share came to 1.0 after a step at the minimum
    found = rates(config("cosine", min_lr=math.nextafter(1.0, 0.0)), 7)
    assert found == sorted(found, reverse=True)


BY_HAND = [
    # w = 3: 1/4, 2/4, 3/4, then the peak
    ("constant", {"warmup_steps": 3}, [0.25, 0.5, 0.75, 1.0, 1.0]),
    # p = 0, 1/4, 2/4, 3/4 from 1.0 to 0.2; p = 1 would be the fifth step
    ("linear", {"min_lr": 0.2}, [1.0, 0.8, 0.6, 0.4]),
    # 0.2 + 0.8·(1 + cos πp)/2 at p = 0, 1/3, 2/3: cos = 1, 1/2, −1/2
    ("cosine", {"min_lr": 0.2}, [1.0, 0.8, 0.4]),
    # decay over the last 4 of 10: p = 0, 1/4, 2/4, 3/4 at steps 6 … 9
    ("wsd", {"decay_steps": 4}, [1.0] * 7 + [0.75, 0.5, 0.25]),
    # 1 − √p at the same p
    ("wsd", {"decay_steps": 4, "decay_shape": "sqrt"}, [1.0] * 7 + [0.5, 1 - math.sqrt(0.5), 1 - math.sqrt(0.75)]),
    # a tenth of the steps by default
    ("wsd", {}, [1.0] * 91 + [1 - p / 10 for p in range(1, 10)]),
    # a warm-up longer than the run is only warm-up
    ("cosine", {"warmup_steps": 9}, [0.1, 0.2, 0.3, 0.4]),
]


@pytest.mark.parametrize(("schedule", "keys", "expected"), BY_HAND)
def test_rates_by_hand(schedule, keys, expected):
    assert rates(config(schedule, **keys), len(expected)) == pytest.approx(expected)
