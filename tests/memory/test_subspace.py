"""Bases: projections by them, their storage in INT4, and when they are searched again."""

from collections import deque

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.samples import normal

from tahq.memory.galore.subspace import (
    Int4Projection,
    LazyRule,
    LazySubspace,
    exact_basis,
    low_rank_shape,
    pack,
    project,
    project_back,
    randomised_basis,
    rank_of,
    similarity,
    unpack,
)

CPU = torch.device("cpu")
SHAPES = [(12, 8), (8, 12), (9, 9), (33, 5), (1, 6), (6, 1)]


def low_rank_gradient(shape, rank, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape[0], rank, generator=generator) @ torch.randn(rank, shape[1], generator=generator)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("method", ["exact", "randomised"])
def test_a_gradient_of_the_rank_survives_projection_there_and_back(shape, method):
    rank = rank_of(shape, 2)
    gradient = low_rank_gradient(shape, rank)
    basis = exact_basis(gradient, rank) if method == "exact" else randomised_basis(gradient, rank, 7)
    assert basis.shape == (rank, min(shape))
    torch.testing.assert_close(basis @ basis.t(), torch.eye(rank), rtol=0, atol=1e-5)
    low = project(gradient, basis)
    assert low.shape == low_rank_shape(shape, rank)
    # products of at most 33 terms of about 10, each rounded at 2⁻²⁴
    torch.testing.assert_close(project_back(low, basis, shape), gradient, rtol=1e-4, atol=1e-4)


def test_random_combinations_find_nearly_all_that_the_exact_basis_finds():
    generator = torch.Generator().manual_seed(4)
    gradient = low_rank_gradient((96, 64), 8) + 0.1 * torch.randn(96, 64, generator=generator)
    kept = [float(project(gradient, b).norm()) for b in (exact_basis(gradient, 8), randomised_basis(gradient, 8, 1))]
    assert kept[0] * 0.999 <= kept[1] <= kept[0] * (1 + 1e-5)


def test_similarity_ignores_the_sign_and_knows_nothing_of_zeros():
    basis = exact_basis(torch.randn(10, 6), 3)
    assert similarity(basis, -basis) == pytest.approx(1.0)
    assert similarity(basis, basis[[1, 0, 2]]) == pytest.approx(0.0, abs=1e-6)
    assert similarity(torch.zeros(3, 6), basis) == 0.0


def paper_gaps(similarities, *, gap, queue, threshold, cap):
    """Q-GaLore §3.2, transcribed: starting with an interval t, the similarities of the previous k intervals; if they
    remain greater than the threshold, t → 2t. With a cap."""
    previous, gaps = deque(maxlen=queue), []
    for cosine in similarities:
        previous.append(cosine)
        if len(previous) == queue and all(c >= threshold for c in previous) and gap < cap:
            gap = min(2 * gap, cap)
        gaps.append(gap)
    return gaps


def test_gaps_equal_the_papers_rule():
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        cosines = (torch.rand(30, generator=generator) * 0.8 + 0.2).tolist()
        gap, kept, found = 200, [], []
        for cosine in cosines:
            kept = [*kept, cosine][-5:]
            gap = LazyRule(queue=5, threshold=0.4, max_gap=3000).next_gap(gap, kept)
            found.append(gap)
        assert found == paper_gaps(cosines, gap=200, queue=5, threshold=0.4, cap=3000)


def searched(rule, num_steps, gradient_at):
    subspace = LazySubspace((2, 6), CPU, "fp32", rule, "exact")
    at = []
    for step in range(num_steps):
        if subspace.is_due(step):
            subspace.search(gradient_at(step), 0)
            at.append(step)
        subspace.keep(step)
    return subspace, at


def test_a_stable_subspace_is_searched_less_and_less_often():
    gradient = low_rank_gradient((8, 6), 2)
    subspace, at = searched(LazyRule(gap=3, max_gap=12, queue=2, threshold=0.4), 60, lambda step: gradient)
    assert at == [0, 3, 6, 12, 24, 36, 48]
    assert subspace.gap == 12
    assert subspace.num_searches == 7


def test_a_subspace_that_turns_and_a_rule_that_is_not_lazy_keep_the_gap():
    turning = [torch.zeros(8, 6) for _ in range(6)]
    for place, gradient in enumerate(turning):
        gradient[0, place], gradient[1, (place + 1) % 6] = 2.0, 1.0
    _, at = searched(LazyRule(gap=3, queue=2), 16, lambda step: turning[step // 3])
    assert at == [0, 3, 6, 9, 12, 15]
    _, at = searched(LazyRule(gap=5, queue=1, is_lazy=False), 16, lambda step: turning[0])
    assert at == [0, 5, 10, 15]


def test_ranks():
    assert rank_of((512, 2048), None) == 128
    assert rank_of((5, 9), None) == 2
    assert rank_of((1, 9), None) == 1
    assert rank_of((8, 4), 100) == 4


# -- storage in INT4 --


@given(st.lists(st.integers(0, 15), min_size=1, max_size=70))
def test_codes_are_packed_two_per_byte_and_come_back(codes):
    packed = pack(torch.tensor(codes, dtype=torch.uint8))
    assert packed.numel() == (len(codes) + 1) // 2
    assert unpack(packed, len(codes)).tolist() == codes
    assert packed[0] & 15 == codes[0]  # the first of two has the low half


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (3, 85), (16, 64), (33, 129)])
def test_every_element_in_int4_is_within_half_a_step(shape):
    basis = normal(shape, 1)
    projection = Int4Projection(shape, CPU)
    projection.assign(basis)
    error = (projection.decoded(torch.float32) - basis).flatten().abs()
    for group, errors in zip(basis.flatten().double().split(256), error.split(256), strict=True):
        width = float(group.max().clamp(min=0) - group.min().clamp(max=0))
        # the step is up to 2⁻⁷ larger than a fifteenth for being rounded up to bf16
        assert float(errors.max()) <= width / 15 * 0.5 * (1 + 2**-7) + 1e-6
