import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tahq.quant.tiling import Tiling


@pytest.mark.parametrize(
    ("channels", "group", "expected", "padding"),
    [
        (1600, 64, 64, 0),
        (768, 256, 256, 0),
        (1600, 256, 64, 0),
        (72, 64, 8, 0),
        (8, 64, 8, 0),
        (100, 64, 64, 28),  # 100 = 4·25: no power of two from 8 divides it
        (1001, 64, 64, 23),
        (1, 64, 64, 63),
        (7, 8, 8, 1),
        (12, 256, 256, 244),
    ],
)
def test_group_is_the_largest_power_of_two_that_divides_the_channels(channels, group, expected, padding):
    tiling = Tiling.of((2, 3, channels), group)
    assert (tiling.group, tiling.padding) == (expected, padding)


@pytest.mark.parametrize(
    ("shape", "samples", "tokens"), [((64,), 1, 1), ((5, 64), 5, 1), ((5, 3, 64), 5, 3), ((5, 3, 2, 64), 5, 6)]
)
def test_first_dimension_is_the_sample(shape, samples, tokens):
    tiling = Tiling.of(shape, 64)
    assert (tiling.num_samples, tiling.tokens_per_sample, tiling.num_tiles) == (samples, tokens, samples * tokens)


@given(
    shape=st.lists(st.integers(0, 4), min_size=0, max_size=3),
    channels=st.integers(0, 70),
    group=st.sampled_from([8, 16, 32]),
)
def test_join_undoes_split(shape, channels, group):
    x = torch.arange(float(torch.Size([*shape, channels]).numel())).view(*shape, channels)
    tiling = Tiling.of(x.shape, group)
    tiles = tiling.split(x)
    assert tiles.shape[-1] == tiling.group
    assert tiles.sum() == x.sum()
    back = tiling.join(tiles.clone(), torch.float32)
    assert torch.equal(back, x)
    assert back.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_join_saturates_and_keeps_nan(dtype):
    tiles = torch.tensor([3.4e38, -3.4e38, torch.inf, -torch.inf, torch.nan, 1.0, 0.0, -2.0])
    joined = Tiling.of((8,), 8).join(tiles, dtype)
    assert joined[[0, 2]].tolist() == pytest.approx([torch.finfo(dtype).max] * 2, rel=1e-3)
    assert joined[[1, 3]].isfinite().all()
    assert joined[4].isnan()
    assert joined[5:].tolist() == [1.0, 0.0, -2.0]
