"""A cut in one process: equal to the bit with what a boundary does, and with autograd around it."""

import pytest
import torch
from support.cuts import IDENTITY, cross, cut_sides

from tahq.comm.link.frame import Direction, Purpose
from tahq.pipeline.boundary import CodecTable, codec_key
from tahq.pipeline.probe.cut_model import CodecCut
from tahq.quant import get_codec

SHAPE = (2, 5, 64)
PAIRS = [
    ("tah", "fixed:bits=8"),
    ("tah:group=32,tau=0", "tah"),
    ("fixed:bits=3,round=stochastic", "fixed:bits=4,round=stochastic"),
    ("raw:dtype=bf16", "fixed:bits=6"),
    ("fixed:bits=6", "raw:dtype=fp16"),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random(seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)).to(dtype)


def there_and_back(spec: str, x: torch.Tensor, key: int) -> torch.Tensor:
    codec = get_codec(spec)
    return codec.decode(codec.encode(x, key=key), x.shape, x.dtype, key=key)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("activations", "gradients"), PAIRS)
def test_both_directions_are_decode_of_encode_to_the_bit(activations, gradients, dtype):
    x, g = random(0, dtype).requires_grad_(), random(1, dtype)
    cut = CodecCut(get_codec(activations), get_codec(gradients))
    y = cut(x, forward_key=11, backward_key=12)
    y.backward(g)
    assert (y.dtype, y.shape, x.grad.dtype) == (dtype, x.shape, dtype)
    assert torch.equal(y, there_and_back(activations, x, 11))
    assert torch.equal(x.grad, there_and_back(gradients, g, 12))


def test_a_boundary_delivers_the_same():
    specs, x, g = ("tah", "fixed:bits=4,round=stochastic"), random(2).requires_grad_(), random(3)
    lower, upper = cut_sides(lambda: CodecTable(*specs))
    activation = cross(lower, upper, x.detach(), step=4, micro_batch=2)
    gradient = cross(upper, lower, g, step=4, micro_batch=2, direction=Direction.BACKWARD)
    keys = [codec_key(IDENTITY.name(4, Purpose.TRAIN, 2, direction), IDENTITY.seed) for direction in Direction]
    y = CodecCut(*map(get_codec, specs))(x, forward_key=keys[0], backward_key=keys[1])
    y.backward(g)
    assert torch.equal(y, activation)
    assert torch.equal(x.grad, gradient)


def test_keys_reach_the_codec_of_their_direction():
    codec, x, g = "fixed:bits=2,round=stochastic", random(0), random(1)

    def crossed(forward_key: int, backward_key: int) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = x.clone().requires_grad_()
        y = CodecCut(get_codec(codec), get_codec(codec))(leaf, forward_key=forward_key, backward_key=backward_key)
        y.backward(g)
        return y.detach(), leaf.grad

    base, other_forward, other_backward = crossed(1, 2), crossed(9, 2), crossed(1, 9)
    assert not torch.equal(base[0], other_forward[0])
    assert torch.equal(base[1], other_forward[1])
    assert torch.equal(base[0], other_backward[0])
    assert not torch.equal(base[1], other_backward[1])


def test_one_direction_alone_leaves_the_other_untouched():
    x, g = random(0).requires_grad_(), random(1)
    y = CodecCut(get_codec("tah"), None)(x, forward_key=0, backward_key=0)
    y.backward(g)
    assert torch.equal(x.grad, g)
    z = CodecCut(None, get_codec("tah"))(x, forward_key=0, backward_key=0)
    assert torch.equal(z, x)
    x.grad = None
    z.backward(g)
    assert torch.equal(x.grad, there_and_back("tah", g, 0))


def test_any_strides_come_out_contiguous():
    x = random(0).transpose(0, 1).requires_grad_()
    y = CodecCut(get_codec("fixed"), get_codec("fixed"))(x, forward_key=0, backward_key=0)
    y.backward(torch.ones(()).expand(y.shape))
    assert y.is_contiguous()
    assert torch.equal(y, there_and_back("fixed", x, 0))
