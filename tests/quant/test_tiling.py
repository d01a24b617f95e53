import pytest
import torch

from tahq.quant.tiling import Tiling


@pytest.mark.parametrize(
    ("channels", "group", "expected", "padding"),
    [
        (1600, 64, 64, 0),
        (768, 256, 256, 0),
        (1600, 256, 64, 0),
        (72, 64, 8, 0),
        (100, 64, 64, 28),  # 100 = 4·25: no power of two from 8 divides it
        (1001, 64, 64, 23),
        (7, 8, 8, 1),
        (12, 256, 256, 244),
    ],
)
def test_group_is_the_largest_power_of_two_that_divides_the_channels(channels, group, expected, padding):
    tiling = Tiling.of((2, 3, channels), group)
    assert (tiling.group, tiling.padding) == (expected, padding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_join_saturates_and_keeps_nan(dtype):
    tiles = torch.tensor([3.4e38, -3.4e38, torch.inf, -torch.inf, torch.nan, 1.0, 0.0, -2.0])
    joined = Tiling.of((8,), 8).join(tiles, dtype)
    assert joined[[0, 2]].tolist() == pytest.approx([torch.finfo(dtype).max] * 2, rel=1e-3)
    assert joined[[1, 3]].isfinite().all()
    assert joined[4].isnan()
    assert joined[5:].tolist() == [1.0, 0.0, -2.0]
