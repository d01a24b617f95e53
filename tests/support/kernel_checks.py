"""What a backend's kernels must share with the reference, for tests on CUDA and in Triton's interpreter alike."""

import random

import pytest
import torch

from support.agreement import compare
from support.device_waits import host_must_not_wait
from support.tile_agreement import as_bits
from tahq.errors import CodecError
from tahq.quant import CodecSpec, get_codec
from tahq.quant.codec import Codec


def awkward(shape, seed: int = 0) -> torch.Tensor:
    """fp32 values with outliers, equal magnitudes, constant stretches, both zeros and six orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x *= 10.0 ** torch.randint(-6, 1, (*shape[:-1], 1), generator=generator)
    x[torch.rand(shape, generator=generator) < 0.02] *= 50
    flat = x.view(-1)
    count = flat.numel()
    flat[: count // 8] = 0.0
    flat[: count // 16 : 3] = -0.0
    flat[-(count // 8) :] = flat[-1].clone()
    flat[count // 3 : count // 3 + 9] = 77.0
    return x


def check_encoding(spec: str, x: torch.Tensor, *, key: int = 0) -> torch.Tensor:
    """Assert that the kernels' stream of x is the reference's; returns it, on the CPU."""
    expected = get_codec(spec, backend="reference").encode(x.cpu(), key=key)
    got = get_codec(spec, backend="triton").encode(x, key=key).cpu()
    differences = compare(CodecSpec.parse(spec), x.detach().cpu(), expected, got)
    assert differences.num_codes == 0, "codes differ where selections agree"
    if differences.num_selections == 0:
        assert torch.equal(expected, got)
    return got


def check_decoding(spec: str, buf: torch.Tensor, shape, dtype: torch.dtype, device: torch.device, key: int = 0) -> None:
    """Assert that the kernels read from a stream (on the CPU) what the reference does, or refuse it as it does."""
    expected = outcome(get_codec(spec, backend="reference"), buf, shape, dtype, key)
    got = outcome(get_codec(spec, backend="triton"), buf.to(device), shape, dtype, key)
    if isinstance(expected, str) or isinstance(got, str):
        assert expected == got
    else:
        assert (got.shape, got.dtype, got.is_contiguous()) == (expected.shape, dtype, True)
        assert torch.equal(as_bits(expected), as_bits(got))


def outcome(codec: Codec, buf: torch.Tensor, shape, dtype: torch.dtype, key: int) -> torch.Tensor | str:
    """Values on the CPU, or why there are none."""
    try:
        return codec.decode(buf, shape, dtype, key=key).cpu()
    except CodecError as error:
        return str(error)


def check_round_trip(spec: str, x: torch.Tensor, *, key: int = 0, dtype: torch.dtype | None = None) -> None:
    """Encoding and decoding of x, which is where the kernels run."""
    buf = check_encoding(spec, x, key=key)
    check_decoding(spec, buf, x.shape, dtype or x.dtype, x.device, key)


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what torch.empty returns with 0xAA, so that a byte that a kernel does not write shows."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        made = empty(*args, **kwargs)
        made.view(torch.uint8).fill_(0xAA)
        return made

    monkeypatch.setattr(torch, "empty", poisoned)


def damaged(stream: torch.Tensor, rng: random.Random) -> torch.Tensor:
    """A copy with one to eight bytes changed, half of them near the header."""
    buf = stream.clone()
    for _ in range(rng.choice((1, 1, 2, 8))):
        place = rng.randrange(min(48, buf.numel()) if rng.random() < 0.5 else buf.numel())
        buf[place] = rng.choice((0, 0xFF, rng.randrange(256), int(buf[place]) ^ 1 << rng.randrange(8)))
    return buf


def check_no_wait_and_no_compiler(codec: Codec, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """After `prepare`, encoding neither waits for the device nor compiles, whatever the values and the key."""
    from triton.runtime.jit import JITFunction

    def compile_again(*args, **kwargs):
        raise AssertionError("a kernel is compiled in a training step")

    codec.prepare(x.shape, x.dtype, x.device)
    monkeypatch.setattr(JITFunction, "_do_compile", compile_again)
    with host_must_not_wait():
        bufs = [codec.encode(x * factor, key=key) for factor, key in ((1, 0), (0, 1), (3, 16), (1, 2**64 - 1))]
    for buf in bufs:
        codec.decode(buf, x.shape, x.dtype, key=1)
