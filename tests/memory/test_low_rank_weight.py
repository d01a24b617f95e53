"""A low-rank weight against AdamW, against GaLore written out, and through skipped steps; and its subspace."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.samples import normal
from torch.nn import Parameter

from tahq.errors import SnapshotError
from tahq.memory.galore.low_rank_weight import LowRankSettings, LowRankWeight
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
SHAPES = [(1, 128), (127, 1), (33, 65), (65, 33), (48, 48), (3, 4097)]
PLAIN = {"weights": "fp32", "projections": "fp32", "states": "fp32"}


def settings(**changes) -> LowRankSettings:
    return LowRankSettings(**({"rank": 4, "rule": LazyRule(gap=3)} | changes))


def new_weight(values: torch.Tensor, **changes) -> LowRankWeight:
    weight = LowRankWeight("h.0.weight", tuple(values.shape), settings(**changes), CPU)
    weight.storage.assign(values)
    return weight


def take_steps(weight: LowRankWeight, steps, *, micro_batches=1, lr=0.01, decay=0.1) -> None:
    for step in steps:
        weight.begin(step)
        for index in range(micro_batches):
            weight.take(normal(weight.shape, seed=100 * step + index + 1))
        weight.apply(step, lr, decay)


def step_with(weight: LowRankWeight, gradient: torch.Tensor, step: int, lr=0.01, decay=0.1) -> None:
    weight.begin(step)
    weight.take(gradient)
    weight.apply(step, lr, decay)


def everything(weight: LowRankWeight) -> dict[str, torch.Tensor]:
    states = {f"optimizer/{name}": tensor for name, tensor in weight.states().items()}
    return {name: tensor.clone() for name, tensor in (weight.weight_tensors() | states).items()}


def assert_same(one: LowRankWeight, other: LowRankWeight) -> None:
    left, right = everything(one), everything(other)
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


def fifty_steps(start: torch.Tensor, lr: float, drift: float = 0.0, **changes) -> tuple[LowRankWeight, torch.Tensor]:
    """At full rank and scale 1: the weight, and that of torch's AdamW."""
    weight = new_weight(start, rank=max(start.shape), scale=1.0, **changes)
    parameter = Parameter(start.clone())
    reference = torch.optim.AdamW([parameter], lr=lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, foreach=False)
    for step in range(50):
        parameter.grad = normal(start.shape, seed=step + 1) + drift
        step_with(weight, parameter.grad.clone(), step, lr)
        reference.step()
    return weight, parameter.detach()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fifty_steps_at_full_rank_and_scale_one_equal_adamw(shape):
    """The bits of torch's AdamW except for the order of two roundings per step: 50 · 2⁻²³ of weights of about 1."""
    weight, expected = fifty_steps(normal(shape), 0.01, **PLAIN)
    error = (weight.storage.decoded(torch.float32) - expected).abs()
    assert float(error.mean()) < 1e-6
    assert float(error.max()) < 1e-5


def test_fifty_steps_in_int8_at_full_rank_stay_near_adamws():
    """Each element is within the noise of fifty roundings of half a step at most, that is √50/2 steps, four times."""
    start = normal((64, 96)) * 0.02
    weight, expected = fifty_steps(start, 1e-3, drift=0.5)
    steps = float(weight.storage.scale.float().mean())
    difference = weight.storage.decoded(torch.float32) - expected
    assert float(difference.abs().max()) < 4 * math.sqrt(50) / 2 * steps
    # 8-bit moments are off by up to 2 %, in one direction
    assert float(difference.mean().abs()) < 0.02 * float((expected - start).abs().mean())


def galore_step(weight, moments, basis, gradient, step, *, lr, decay, scale, betas=(0.9, 0.95), epsilon=1e-8):
    """GaLore Alg. 2 with decoupled decay, for one weight with rows ≥ columns, transcribed without tahq's code."""
    low = gradient @ basis.T
    first, second = moments
    first = betas[0] * first + (1 - betas[0]) * low
    second = betas[1] * second + (1 - betas[1]) * low**2
    direction = (first / (1 - betas[0] ** step)) / (torch.sqrt(second / (1 - betas[1] ** step)) + epsilon)
    return weight * (1 - lr * decay) - lr * scale * (direction @ basis), (first, second)


def test_low_rank_steps_equal_galore_algorithm_2():
    start = normal((40, 24)).double()
    weight, found = new_weight(start.float(), **PLAIN), start
    moments = (torch.zeros(40, 4).double(), torch.zeros(40, 4).double())
    basis = torch.zeros(4, 24).double()
    for step in range(10):
        gradient = normal((40, 24), seed=step + 1)
        if step % 3 == 0:
            basis = torch.linalg.svd(gradient.double(), full_matrices=False).Vh[:4]
            kept = torch.linalg.svd(gradient, full_matrices=False).Vh[:4].double()
            basis = basis * (basis * kept).sum(1, keepdim=True).sign()  # the same of two signs
        step_with(weight, gradient, step)
        found, moments = galore_step(found, moments, basis, gradient.double(), step + 1, lr=0.01, decay=0.1, scale=0.25)
    torch.testing.assert_close(weight.storage.decoded(torch.float32).double(), found, rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", [(40, 24), (24, 40)])
def test_four_micro_batches_accumulate_to_the_sum_projected_by_the_firsts_subspace(shape):
    weight = new_weight(normal(shape), **PLAIN)
    gradients = [normal(shape, seed=index + 1) for index in range(4)]
    weight.begin(0)
    for gradient in gradients:
        weight.take(gradient)
    basis = weight.subspace.basis(torch.float32)
    u, _, vh = torch.linalg.svd(gradients[0], full_matrices=False)
    assert torch.equal(basis, vh[:4] if shape == (40, 24) else u[:, :4].t())
    expected = project(torch.stack(gradients).double().sum(0), basis.double())
    # sums of 40 products of about 1, rounded at 2⁻²⁴ each
    torch.testing.assert_close(weight.grad.double(), expected, rtol=0, atol=1e-4)
    assert weight.grad.shape == weight.low_shape


def test_a_step_that_is_not_applied_leaves_no_trace():
    weight, other = (new_weight(normal((33, 65))) for _ in range(2))
    take_steps(weight, range(3))
    take_steps(other, range(3))
    weight.begin(3)  # a search is due
    weight.take(normal((33, 65), seed=77))
    weight.discard()
    assert (weight.grad, weight.subspace.found_nbytes) == (None, 0)
    assert weight.subspace.is_due(4)
    assert_same(weight, other)
    take_steps(weight, range(4, 9))
    take_steps(other, range(4, 9))
    assert_same(weight, other)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_search_in_a_non_finite_gradient_makes_the_step_non_finite(bad):
    weight = new_weight(normal((33, 65)))
    gradient = normal((33, 65), seed=1)
    gradient[5, 7] = bad
    for step in range(2):  # the first search of all is still due at the second step
        weight.begin(step)
        weight.take(gradient)
        assert not weight.grad.isfinite().all()
        weight.discard()
    take_steps(weight, [2])
    assert weight.subspace.refreshed_at == 2
    weight.begin(5)
    weight.take(gradient)  # projected by the basis there is
    assert not weight.grad.isfinite().all()
    weight.discard()
    assert weight.subspace.refreshed_at == 2
    assert weight.storage.decoded(torch.float32).isfinite().all()


def test_a_weight_without_gradient_is_left_alone_and_can_be_saved_and_loaded():
    weight = new_weight(normal((33, 65)))
    before = everything(weight)
    weight.begin(0)
    weight.apply(0, 0.01, 0.1)
    after = everything(weight)
    assert all(torch.equal(before[name], after[name]) for name in before)
    other = new_weight(torch.zeros(33, 65))
    other.load(after.__getitem__)
    assert_same(weight, other)


OFTEN = {"rule": LazyRule(gap=1, max_gap=4, queue=2, threshold=0.01)}
LATE = {"rule": LazyRule(gap=5).spread(4, 5)}  # Searches at steps 0 and 7
CHANGES = [{}, LATE, PLAIN, {"weights": "bf16"}, {"rank": 65}, {"svd": "randomised"}, OFTEN]


@pytest.mark.parametrize("changes", CHANGES, ids=str)
@pytest.mark.parametrize("shape", [(33, 65), (1, 128)], ids=str)
def test_resuming_from_saved_tensors_is_exact_to_the_bit(shape, changes):
    """Two micro-batches a step, searches at steps 0, 3, 6 …; saved after five steps, between searches."""
    whole = new_weight(normal(shape), **changes)
    take_steps(whole, range(10), micro_batches=2)
    half = new_weight(normal(shape), **changes)
    take_steps(half, range(5), micro_batches=2)
    saved = everything(half)
    resumed = LowRankWeight("h.0.weight", shape, settings(**changes), CPU)
    resumed.load(saved.__getitem__)
    take_steps(resumed, range(5, 10), micro_batches=2)
    assert_same(resumed, whole)


def test_states_from_before_searches_were_spread_go_on_as_they_were():
    """They have the same form; their gaps say when each search is due."""
    together = new_weight(normal((33, 65)))
    take_steps(together, range(2))
    saved = everything(together)
    spread = new_weight(normal((33, 65)), rule=LazyRule(gap=3).spread(2, 3))
    assert spread.subspace.gap == 4
    spread.load(saved.__getitem__)
    for weight in (spread, together):
        take_steps(weight, range(2, 10))
    assert_same(spread, together)
    assert spread.subspace.refreshed_at == 9


def test_states_of_another_rank_are_refused():
    saved = everything(new_weight(normal((33, 65)), rank=8))
    with pytest.raises(
        SnapshotError, match=r"exp_avg/h\.0\.weight is torch\.uint8 \[8, 65\] in the checkpoint, expected"
    ):
        new_weight(normal((33, 65))).load(saved.__getitem__)


def test_stochastic_rounding_depends_on_name_and_step():
    found = []
    for name, step in (("a", 0), ("b", 0), ("a", 1), ("a", 0)):
        weight = LowRankWeight(name, (16, 64), settings(rank=16), CPU)
        weight.storage.assign(normal((16, 64)) * 0.02)
        step_with(weight, normal((16, 64), seed=9), step, lr=1e-4, decay=0.0)
        found.append(weight.storage.codes.clone())
    assert torch.equal(found[0], found[3])
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


CPU = torch.device("cpu")
BASIS_SHAPES = [(12, 8), (8, 12), (9, 9), (33, 5), (1, 6), (6, 1)]


def low_rank_gradient(shape, rank, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape[0], rank, generator=generator) @ torch.randn(rank, shape[1], generator=generator)


@pytest.mark.parametrize("shape", BASIS_SHAPES, ids=str)
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


@pytest.mark.parametrize(
    ("gap", "similarities", "expected"),
    [
        (200, [0.5] * 4, 200),
        (200, [0.3, *[0.5] * 5], 400),
        (200, [0.5, 0.5, 0.39, 0.5, 0.5], 200),
        (400, [0.9] * 5, 700),
        (700, [0.9] * 5, 700),
    ],
)
def test_gap_doubles_after_as_many_similarities_as_the_queue_holds(gap, similarities, expected):
    """Q-GaLore §3.2, with a limit."""
    assert LazyRule(queue=5, threshold=0.4, max_gap=700).next_gap(gap, similarities) == expected


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


def test_the_first_gap_is_for_the_second_search_only():
    gradient = low_rank_gradient((8, 6), 2)
    _, at = searched(LazyRule(gap=4, max_gap=8, queue=2).spread(3, 4), 40, lambda step: gradient)
    assert at == [0, 6, 10, 18, 26, 34]


def test_a_subspace_that_turns_and_a_rule_that_is_not_lazy_keep_the_gap():
    turning = [torch.zeros(8, 6) for _ in range(6)]
    for place, gradient in enumerate(turning):
        gradient[0, place], gradient[1, (place + 1) % 6] = 2.0, 1.0
    _, at = searched(LazyRule(gap=3, queue=2), 16, lambda step: turning[step // 3])
    assert at == [0, 3, 6, 9, 12, 15]
    _, at = searched(LazyRule(gap=5, queue=1, is_lazy=False), 16, lambda step: turning[0])
    assert at == [0, 5, 10, 15]


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
