import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tahq.errors import ModelError
from tahq.models.costs import counted_costs, mean_positions_seen
from tahq.models.partition import BlockRange, LayerCosts, divide
from tahq.models.slice import slice_parameters

from .conftest import FAMILIES, SEQ_LEN


def sizes_of(ranges):
    return [len(r) for r in ranges]


def stage_costs(costs, sizes):
    bounds = list(itertools.accumulate(sizes, initial=0))
    stages = [sum(costs.blocks[a:b]) for a, b in itertools.pairwise(bounds)]
    stages[0] += costs.embedding
    stages[-1] += costs.head
    return stages


def every_division(num_layers, num_stages):
    for inner in itertools.combinations(range(1, num_layers), num_stages - 1):
        bounds = (0, *inner, num_layers)
        yield [b - a for a, b in itertools.pairwise(bounds)]


@pytest.mark.parametrize(
    ("costs", "num_stages", "expected"),
    [
        (LayerCosts(0.0, (1.0,) * 8, 0.0), 4, [2, 2, 2, 2]),
        (LayerCosts(0.0, (1.0,) * 8, 5.0), 1, [8]),
        (LayerCosts(0.0, (1.0,) * 8, 1.0), 4, [2, 2, 2, 2]),
        (LayerCosts(0.0, (1.0,) * 8, 2.0), 4, [2, 2, 3, 1]),
        (LayerCosts(0.0, (1.0,) * 10, 0.0), 4, [2, 2, 3, 3]),
        (LayerCosts(0.0, (1.0,) * 4, 100.0), 4, [1, 1, 1, 1]),
        (LayerCosts(0.0, (1.0,) * 12, 3.0), 4, [3, 4, 4, 1]),
        (LayerCosts(2.0, (1.0,) * 6, 0.0), 2, [2, 4]),
        (LayerCosts(0.0, (0.1,) * 9, 0.0), 3, [3, 3, 3]),  # equal costs tie although 0.1 + 0.1 + 0.1 is not 0.3
    ],
)
def test_divide_balances_and_gives_ties_to_later_stages(costs, num_stages, expected):
    assert sizes_of(divide(costs, num_stages)) == expected


@given(data=st.data(), num_layers=st.integers(1, 8))
def test_divide_is_the_best_of_all_divisions(data, num_layers):
    num_stages = data.draw(st.integers(1, num_layers))
    cost = st.integers(0, 20).map(float)
    costs = LayerCosts(data.draw(cost), tuple(data.draw(cost) for _ in range(num_layers)), data.draw(cost))

    chosen = sizes_of(divide(costs, num_stages))

    def rank(sizes):
        stages = stage_costs(costs, sizes)
        return max(stages), sum(c * c for c in stages), sizes

    assert rank(chosen) == min(rank(sizes) for sizes in every_division(num_layers, num_stages))


def test_divide_follows_the_users_list():
    ranges = divide(LayerCosts(0.0, (1.0,) * 8, 9.0), 3, [1, 1, 6])
    assert ranges == (BlockRange(0, 1, 8), BlockRange(1, 2, 8), BlockRange(2, 8, 8))


@pytest.mark.parametrize(
    ("num_stages", "listed", "message"),
    [
        (2, [4, 3], r"adds up to 7 blocks, the model has 8"),
        (2, [8], r"lists 1 stages, pipeline.stages is 2"),
        (2, [8, 0], r"at least one block"),
        (2, [9, -1], r"at least one block"),
        (9, None, r"9 stages need at least 9 blocks, the model has 8"),
    ],
)
def test_divide_refuses_stages_that_do_not_fit_the_blocks(num_stages, listed, message):
    with pytest.raises(ModelError, match=message):
        divide(LayerCosts(0.0, (1.0,) * 8, 0.0), num_stages, listed)


@pytest.mark.parametrize("family", FAMILIES)
def test_counted_costs_are_matrices_and_attention(family, tiny_spec):
    spec = tiny_spec(family)
    costs = counted_costs(spec, SEQ_LEN)
    assert costs.embedding == 0.0
    assert costs.head == spec.hidden_size * spec.vocab_size
    shapes = slice_parameters(spec, BlockRange(1, 2, 4)).values()
    matrices = sum(shape.numel() for shape in shapes if len(shape) == 2)
    taken = getattr(spec.hf_config, "num_experts_per_tok", 0)
    matrices += sum(shape.numel() // shape[0] * taken for shape in shapes if len(shape) == 3)
    seen = mean_positions_seen(SEQ_LEN, 5 if family in ("mistral", "phi3", "smollm3") else None)
    assert costs.blocks[1] == matrices + 2 * seen * 32


def test_a_window_makes_a_block_cheaper(tiny_spec):
    costs = counted_costs(tiny_spec("qwen2"), SEQ_LEN).blocks
    assert costs[0] == costs[1] > costs[2] == costs[3]


@pytest.mark.parametrize(("seq_len", "window"), list(itertools.product([1, 4, 9], [None, 1, 2, 9, 20])))
def test_mean_positions_seen_equals_the_count_in_the_mask(seq_len, window):
    query, key = torch.arange(seq_len)[:, None], torch.arange(seq_len)[None]
    seen = (key <= query) & (key > query - (window or seq_len))
    assert mean_positions_seen(seq_len, window) == seen.sum().item() / seq_len
