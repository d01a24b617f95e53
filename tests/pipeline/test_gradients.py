"""Loss, norms and clipping: sums that no division into micro-batches or stages can change."""

import math

import pytest
import torch
from torch.nn import Parameter

from tahq.pipeline.gradients import IGNORED_LABEL, scale_gradients, squared_norms, summed_cross_entropy


def parameter(gradient: list[float] | None) -> Parameter:
    made = Parameter(torch.zeros(len(gradient or [0.0])))
    made.grad = None if gradient is None else torch.tensor(gradient)
    return made


def test_loss_is_the_sum_of_negative_log_probabilities_where_there_is_a_label():
    logits = torch.tensor([[[0.0, math.log(3.0)], [5.0, 5.0]]])
    labels = torch.tensor([[0, IGNORED_LABEL]])
    # softmax(0, ln 3) = (1/4, 3/4): −ln(1/4) = ln 4
    assert float(summed_cross_entropy(logits, labels)) == pytest.approx(math.log(4.0), rel=1e-6)


def test_squared_norms_are_taken_in_fp64_one_a_parameter():
    # 1e-30 squared is 1e-60: zero in fp32, exact enough in fp64
    norms = squared_norms([parameter([3.0, 4.0]), parameter(None), parameter([1e-30])])
    assert norms[:2] == [25.0, 0.0]
    assert norms[2] == pytest.approx(1e-60, rel=1e-6)
    assert squared_norms([]) == []


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_squared_norm_of_a_gradient_that_is_not_finite_is_not_finite(value):
    finite, other = squared_norms([parameter([1.0]), parameter([1.0, value])])
    assert finite == 1.0
    assert not math.isfinite(other)


def test_clipping_multiplies_and_a_factor_of_one_touches_nothing():
    parameters = [parameter([2.0, -4.0]), parameter(None)]
    scale_gradients(parameters, 0.5)
    assert parameters[0].grad is not None
    assert parameters[0].grad.tolist() == [1.0, -2.0]
    version = parameters[0].grad._version
    scale_gradients(parameters, 1.0)
    assert parameters[0].grad._version == version
