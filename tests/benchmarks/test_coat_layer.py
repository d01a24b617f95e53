"""What bench_coat_layer.py counts of a layer, operator by operator, is what the layer saves."""

import pytest
import torch
from coat_layer_parts import Layer, Size, make_layer, saved_by_operator
from coat_norms import norm_variants

from tahq.memory.config import CoatConfig

SIZE = Size(hidden=192, inner=512, heads=3, batch=1, seq_len=64)
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("config", "units"),
    [
        (None, {"RMSNorm": 6.0, "Act Func": 8.0, "FlashAttn": 4.0, "Linear": 2 + 8 / 3}),
        (CoatConfig(), {"RMSNorm": 1.125, "Act Func": 3.0, "FlashAttn": 4.0, "Linear": 1 + 4 / 3}),
    ],
    ids=["bf16", "coat"],
)
def test_bytes_by_operator(config, units):
    layer = Layer(SIZE, CPU, make_layer(SIZE, CPU, config, master=False), master=False)
    found = {operator: nbytes / SIZE.unit for operator, nbytes in saved_by_operator(layer).items()}
    assert found.keys() == units.keys()
    # Statistics of norms and attention and the rotary tables come on top: for 64 tokens they count.
    rest = {"RMSNorm": 0.03, "FlashAttn": 0.75}
    for operator, expected in units.items():
        assert expected <= found[operator] + 1e-9
        assert found[operator] <= expected + rest.get(operator, 0.001)


def test_every_variant_of_the_norm_runs():
    for work in norm_variants(8, 64, CPU).values():
        work()
