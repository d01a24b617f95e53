"""A cut in one process: equal to the bit with what a boundary does, and with autograd around it."""

import pytest
import torch

from tahq.comm.link.frame import Direction, Purpose
from tahq.comm.link.inproc_transport import InprocPair, VirtualClock
from tahq.errors import CodecError
from tahq.pipeline.boundary import Boundary, CodecTable, CutIdentity, Stopwatch, codec_key
from tahq.pipeline.probe.cut_model import CodecCut, is_lossless, transfer
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
    specs, x = ("tah", "fixed:bits=4,round=stochastic"), random(2).requires_grad_()
    identity = CutIdentity(run=1, seed=3, cut=0)
    pair = InprocPair(VirtualClock())
    sides = [Boundary(end, identity, CodecTable(*specs), torch.device("cpu"), Stopwatch()) for end in pair.transports]
    got = {}
    for direction, (sender, receiver), tensor in (
        (Direction.FORWARD, sides, x.detach()),
        (Direction.BACKWARD, sides[::-1], random(3)),
    ):
        receiver.post(4, Purpose.TRAIN, direction, [2], SHAPE)
        sender.send(4, Purpose.TRAIN, direction, 2, tensor)
        got[direction] = receiver.receive(4, Purpose.TRAIN, direction, 2, SHAPE)
    keys = [codec_key(identity.name(4, Purpose.TRAIN, 2, direction), 3) for direction in Direction]
    y = CodecCut(*map(get_codec, specs))(x, forward_key=keys[0], backward_key=keys[1])
    y.backward(random(3))
    assert torch.equal(y, got[Direction.FORWARD])
    assert torch.equal(x.grad, got[Direction.BACKWARD])


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


def test_a_stateful_codec_is_told_whose_samples_cross():
    """AQ-SGD: what changed since a sample's last visit is all that is lost, so a second visit is more exact."""
    codec, x = get_codec("aqsgd:bits=4"), random(0)
    first = transfer(codec, x, 0, [7, 3])
    moved = first + 0.01 * random(1)
    again = transfer(codec, moved.flip(0), 0, [3, 7]).flip(0)
    assert torch.equal(first, x.half().float())
    control = transfer(get_codec("aqsgd:bits=4,cache=none"), moved, 0)
    assert (again - moved).norm() < (control - moved).norm() / 20


def test_without_ids_nothing_is_remembered():
    cut, x = CodecCut(get_codec("aqsgd:bits=4"), None), random(0)
    for _ in range(2):  # a second visit would send changes
        assert torch.equal(cut(x, forward_key=0, backward_key=0), x.half().float())


def test_sample_ids_reach_both_directions():
    codecs = get_codec("aqsgd:bits=4"), get_codec("aqsgd:bits=4")
    x = random(0).requires_grad_()
    CodecCut(*codecs)(x, forward_key=0, backward_key=0, sample_ids=[7, 3]).backward(random(1))
    assert [codec.state_nbytes for codec in codecs] == [codecs[0].state_nbytes] * 2
    assert codecs[0].state_nbytes > 0
