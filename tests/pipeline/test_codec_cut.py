"""A cut in one process: equal to the bit with what a boundary does, and with autograd around it."""

import pytest
import torch
from support.cuts import IDENTITY, cross, cut_sides

from tahq.comm.link.frame import Direction, Purpose
from tahq.errors import CodecError
from tahq.pipeline.boundary import CodecTable, codec_key
from tahq.pipeline.probe.cut_model import CodecCut, is_lossless
from tahq.quant import get_codec
from tahq.quant.spec import RawSpec

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


@pytest.mark.parametrize("lossless", [None, "raw:dtype=fp32", "raw:dtype=bf16"])
def test_codecs_that_change_nothing_do_no_work(lossless):
    codec = get_codec(lossless) if lossless else None
    x = random(0, torch.bfloat16).requires_grad_()
    assert CodecCut(codec, codec)(x, forward_key=0, backward_key=0) is x


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spec", [RawSpec("fp32"), RawSpec("fp16"), RawSpec("bf16")], ids=str)
def test_lossless_means_that_every_value_comes_back(spec, dtype):
    x = torch.tensor([[1.0, 1 / 3, 1e-7, 6e4, 3e38, 1e-40]]).to(dtype)
    comes_back = torch.equal(there_and_back(str(spec), x, 0), x)
    assert is_lossless(get_codec(spec), dtype) == comes_back


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


def test_input_and_incoming_gradient_are_not_written():
    x, g = random(0), random(1)
    before = x.clone(), g.clone()
    CodecCut(get_codec("tah"), get_codec("tah"))(x.requires_grad_(), forward_key=0, backward_key=0).backward(g)
    assert torch.equal(x.detach(), before[0])
    assert torch.equal(g, before[1])


def test_any_strides_come_out_contiguous():
    x = random(0).transpose(0, 1).requires_grad_()
    y = CodecCut(get_codec("fixed"), get_codec("fixed"))(x, forward_key=0, backward_key=0)
    y.backward(torch.ones(()).expand(y.shape))
    assert y.is_contiguous()
    assert torch.equal(y, there_and_back("fixed", x, 0))


def test_without_gradients_nothing_is_recorded():
    with torch.no_grad():
        y = CodecCut(get_codec("tah"), get_codec("tah"))(random(0), forward_key=0, backward_key=0)
    assert not y.requires_grad


def test_what_the_codec_refuses_is_raised():
    with pytest.raises(CodecError):
        CodecCut(get_codec("tah"), None)(torch.zeros(2, 8, dtype=torch.float64), forward_key=0, backward_key=0)
