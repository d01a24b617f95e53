import itertools

import pytest
import torch

from tahq.models.costs import counted_costs, mean_positions_seen, measured_costs
from tahq.models.partition import BlockRange
from tahq.models.slice import slice_parameters

from .conftest import FAMILIES, SEQ_LEN


@pytest.mark.parametrize("family", FAMILIES)
def test_counted_costs_are_matrices_and_attention(family, tiny_spec):
    spec = tiny_spec(family)
    costs = counted_costs(spec, SEQ_LEN)
    assert costs.embedding == 0.0
    assert costs.head == spec.hidden_size * spec.vocab_size
    shapes = slice_parameters(spec, BlockRange(1, 2, 4)).values()
    matrices = sum(shape.numel() for shape in shapes if len(shape) == 2)
    seen = mean_positions_seen(SEQ_LEN, 5 if family == "mistral" else None)
    assert costs.blocks[1] == matrices + 2 * seen * 32


def test_a_window_makes_a_block_cheaper(tiny_spec):
    costs = counted_costs(tiny_spec("qwen2"), SEQ_LEN).blocks
    assert costs[0] == costs[1] > costs[2] == costs[3]


@pytest.mark.parametrize(("seq_len", "window"), list(itertools.product([1, 4, 9], [None, 1, 2, 9, 20])))
def test_mean_positions_seen_equals_the_count_in_the_mask(seq_len, window):
    query, key = torch.arange(seq_len)[:, None], torch.arange(seq_len)[None]
    seen = (key <= query) & (key > query - (window or seq_len))
    assert mean_positions_seen(seq_len, window) == seen.sum().item() / seq_len


def test_measured_costs_time_every_kind_of_part(tiny_spec):
    ticks = itertools.accumulate(itertools.cycle([1.0, 3.0]))
    costs = measured_costs(tiny_spec("qwen2"), 2, SEQ_LEN, "cpu", repeats=2, clock=lambda: next(ticks))
    assert costs.embedding == costs.head == 3.0
    assert costs.blocks == (3.0,) * 4
