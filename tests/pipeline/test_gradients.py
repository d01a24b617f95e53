"""Loss, norms, clipping and tied gradients; the batches of steps whose gradients are not finite."""

import math

import pytest
import torch
from safetensors import safe_open
from torch.nn import Parameter

from tahq.data.batches import StepBatch
from tahq.memory.agoq.stored_gradients import scale_gradients
from tahq.models.loss import IGNORED_LABEL, summed_cross_entropy
from tahq.pipeline.gradients import (
    TiedEmbedding,
    squared_norms,
)
from tahq.pipeline.stage import MAX_KEPT_BATCHES, keep_batch


def parameter(gradient: list[float] | None) -> Parameter:
    made = Parameter(torch.zeros(len(gradient or [0.0])))
    made.grad = None if gradient is None else torch.tensor(gradient)
    return made


def test_loss_is_the_sum_of_negative_log_probabilities_where_there_is_a_label():
    logits = torch.tensor([[[0.0, math.log(3.0)], [5.0, 5.0]]])
    labels = torch.tensor([[0, IGNORED_LABEL]])
    # softmax(0, ln 3) = (1/4, 3/4): −ln(1/4) = ln 4
    assert float(summed_cross_entropy(logits, labels)) == pytest.approx(math.log(4.0), rel=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_gradient_is_not_copied_for_its_norm_on_cuda(dtype):
    gradient = Parameter(torch.ones(2**27, dtype=dtype, device="cuda"))
    gradient.grad = torch.full_like(gradient, 2.0)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert squared_norms([gradient]) == pytest.approx([4.0 * 2**27], rel=1e-15)
    assert torch.cuda.max_memory_allocated() - before < 2**29


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


def test_stage_that_owns_both_tied_copies_sums_their_gradients_and_counts_one():
    embedding, head = parameter([1.0, 2.0]), parameter([4.0, 8.0])
    tied = TiedEmbedding(embedding, head, None)
    tied.exchange(0)
    assert embedding.grad.tolist() == head.grad.tolist() == [5.0, 10.0]
    assert embedding.grad is not head.grad
    assert tied.uncounted is head
    embedding.grad = None  # counts as zero
    tied.exchange(1)
    assert embedding.grad.tolist() == [5.0, 10.0]


def batch(first: int) -> StepBatch:
    tokens = torch.arange(first, first + 12).reshape(4, 3)
    return StepBatch(tokens, tokens + 1, torch.arange(4), 12, f"digest{first}", micro_batch_size=2)


def test_newest_batches_are_kept_as_they_were(tmp_path):
    last = MAX_KEPT_BATCHES + 3
    paths = [keep_batch(tmp_path, step, batch(step)) for step in range(1, last + 1)]
    assert sorted(tmp_path.iterdir()) == paths[3:]
    assert paths[-1].name == f"step-{last:08}.safetensors"
    with safe_open(paths[-1], "pt") as file:
        assert file.metadata() == {"step": str(last), "digest": f"digest{last}", "micro_batch": "2"}
        assert torch.equal(file.get_tensor("tokens"), batch(last).tokens)
        assert torch.equal(file.get_tensor("labels"), batch(last).labels)
        assert torch.equal(file.get_tensor("sample_ids"), torch.arange(4))
