"""Tied embeddings kept in step: both copies end with the sum of both gradients."""

import torch
from torch.nn import Parameter

from tahq.pipeline.gradients import TiedEmbedding


def copy_with(gradient: torch.Tensor | None) -> Parameter:
    parameter = Parameter(torch.zeros(5, 4))
    parameter.grad = gradient
    return parameter


def test_one_stage_that_owns_both_copies_sums_their_gradients():
    first, second = torch.rand(5, 4), torch.rand(5, 4)
    embedding, head = copy_with(first), copy_with(second)
    tied = TiedEmbedding(embedding, head, None)
    tied.exchange(0)
    assert torch.equal(embedding.grad, first + second)
    assert torch.equal(head.grad, first + second)
    assert embedding.grad is not head.grad
    assert tied.uncounted is head


def test_a_copy_without_a_gradient_counts_as_zero():
    embedding, head = copy_with(None), copy_with(torch.ones(5, 4))
    TiedEmbedding(embedding, head, None).exchange(0)
    assert torch.equal(embedding.grad, torch.ones(5, 4))
