"""A cut in one process: equal to the bit with what a boundary does, and with autograd around it."""

import pytest
import torch
from support.cuts import IDENTITY, codec_table, cross, cut_sides

from tahq.comm.link.frame import Direction, Purpose
from tahq.pipeline.boundary import codec_key
from tahq.pipeline.probe.cut_model import CodecCut
from tahq.quant import get_codec

SHAPE = (2, 5, 64)
PAIRS = [
    ("tah", "fixed:bits=8"),
    ("tah:group=32,tau=0", "tah"),
    ("fixed:bits=3,round=stochastic", "fixed:bits=4,round=stochastic"),
    ("raw:dtype=bf16", "fixed:bits=6"),
    ("fixed:bits=6", "raw:dtype=fp16"),
    ("tah", None),
    (None, "tah"),
]


def random(seed, dtype=torch.float32):
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)).to(dtype)


def there_and_back(spec, x, key):
    if spec is None:
        return x
    codec = get_codec(spec)
    return codec.decode(codec.encode(x, key=key), x.shape, x.dtype, key=key)


def crossed(specs, x, gradient, keys=(11, 12)):
    """The activation and the gradient that arrive."""
    leaf = x.detach().requires_grad_()
    y = CodecCut.apply(leaf, tuple(spec and get_codec(spec) for spec in specs), keys)
    y.backward(gradient)
    return y.detach(), leaf.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("specs", PAIRS, ids=str)
def test_both_directions_are_decode_of_encode_to_the_bit(specs, dtype):
    x, g = random(0, dtype), random(1, dtype)
    activation, gradient = crossed(specs, x, g)
    assert (activation.dtype, activation.shape, gradient.dtype) == (dtype, x.shape, dtype)
    assert torch.equal(activation, there_and_back(specs[0], x, 11))
    assert torch.equal(gradient, there_and_back(specs[1], g, 12))


def test_a_boundary_delivers_the_same():
    specs, x, g = ("tah", "fixed:bits=4,round=stochastic"), random(2), random(3)
    lower, upper = cut_sides(lambda: codec_table(*specs))
    activation = cross(lower, upper, x, step=4, micro_batch=2)
    gradient = cross(upper, lower, g, step=4, micro_batch=2, direction=Direction.BACKWARD)
    keys = [codec_key(IDENTITY.name(4, Purpose.TRAIN, 2, direction), IDENTITY.seed) for direction in Direction]
    found = crossed(specs, x, g, keys)
    assert torch.equal(found[0], activation)
    assert torch.equal(found[1], gradient)


def test_keys_reach_the_codec_of_their_direction():
    specs, x, g = ("fixed:bits=2,round=stochastic",) * 2, random(0), random(1)
    base = crossed(specs, x, g, (1, 2))
    for direction, keys in enumerate([(9, 2), (1, 9)]):
        other = crossed(specs, x, g, keys)
        assert not torch.equal(base[direction], other[direction])
        assert torch.equal(base[1 - direction], other[1 - direction])


def test_any_strides_come_out_contiguous():
    x = random(0).transpose(0, 1)
    activation, _ = crossed(("fixed", "fixed"), x, torch.ones(()).expand(x.shape))
    assert activation.is_contiguous()
    assert torch.equal(activation, there_and_back("fixed", x, 0))
