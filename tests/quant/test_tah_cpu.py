"""`tah` in numba answers to the reference: equal streams, equal values, equal refusals."""

import math
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.agreement import compare
from support.same_outcome import assert_same_outcome, bits_of

from tahq.quant.cpu.numbers import Values
from tahq.quant.cpu.tiles import Grid
from tahq.quant.spec import CodecSpec
from tahq.quant.tah import cpu as tah_cpu
from tahq.quant.tah.cpu_kernels import is_outlier, least_second
from tahq.quant.tah.cpu_lanes import scan
from tahq.quant.tah.cpu_select import Sums, entropies, log2_of, measure_and_sum
from tahq.quant.tah.reference import EPSILON, entropy_, outlier_ratio
from tahq.quant.tah.reference import decode as decode_reference
from tahq.quant.tah.reference import encode as encode_reference
from tahq.quant.tah.stream import TahLayout
from tahq.quant.tiling import Tiling

FOLDER = Path(os.environ.get("TAHQ_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data"))
FIXTURE = FOLDER / "gpt2small_boundary.safetensors"
SPECS = [
    "tah",
    "tah:tau=0,group=32",
    "tah:tau=0.5,int4=1/3,group=16",
    "tah:tau=1,low=4,high=4,group=256",
    "tah:tau=inf,low=2,high=8,int4=0.5,group=8",
    "tah:low=2,high=3,int4=0.2,group=128",
    "tah:int4=0",
    "tah:int4=1",
    "tah:select=low",
    "tah:adaptive=off,int4=0.7",
    "tah:alloc=token",
    "tah:alloc=token,select=low,low=5,high=7,tau=0",
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
F = np.float32


def gaussian(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def spanning(shape):
    """Values over 60 powers of ten, so that a tile's lie far apart and tiles do from each other."""
    powers = torch.randint(-30, 30, shape, generator=torch.Generator().manual_seed(1))
    return gaussian(shape) * 10.0**powers


def spoiled(shape):
    x = gaussian(shape)
    x.view(-1)[::131] = torch.nan
    x.view(-1)[7::257] = torch.inf
    x.view(-1)[50::301] = -torch.inf
    return x


INPUTS = {
    "gaussian": gaussian,
    "heavy tails": lambda shape: gaussian(shape) ** 7,
    "spikes": lambda shape: torch.where(gaussian(shape, 3) > 2.3, gaussian(shape) * 50, gaussian(shape)),
    "zeros": torch.zeros,
    "zeros of both signs": lambda shape: gaussian(shape).sign() * 0.0,
    "constant": lambda shape: torch.full(shape, -0.3),
    "rows of constants": lambda shape: gaussian((*shape[:-1], 1)).expand(shape),
    "one spike a row": lambda shape: torch.zeros(shape).index_fill(-1, torch.tensor([shape[-1] // 2]), 3.0),
    "denormal": lambda shape: gaussian(shape) * 1e-41,
    "least": lambda shape: gaussian(shape).sign() * 1e-45,
    "largest": lambda shape: gaussian(shape).clamp(-1, 1) * 3.4e38,
    "spanning": spanning,
    "not finite": spoiled,
    "all NaN": lambda shape: torch.full(shape, torch.nan),
}
SHAPES = [(2, 7, 256), (3, 4, 100), (2, 5, 1), (1, 2, 1001), (7,)]


def assert_agrees(spec, x, threads=1):
    """Both write the same stream but for near ties of the entropies, and read both streams to the same values."""
    layout = TahLayout.of(CodecSpec.parse(spec) if isinstance(spec, str) else spec, x.shape)
    theirs, ours = encode_reference(layout, x), tah_cpu.encode(layout, x, threads=threads)
    found = compare(layout.spec, x, theirs, ours)
    assert found.num_codes == 0
    assert found.num_selections or torch.equal(theirs, ours)
    for stream in (theirs, ours):
        for dtype in DTYPES:
            expected = decode_reference(layout, stream, dtype)
            assert torch.equal(bits_of(tah_cpu.decode(layout, stream, dtype, threads=threads)), bits_of(expected))
    return found


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("spec", SPECS)
def test_streams_and_values_equal_the_references(spec, kind):
    for shape in SHAPES:
        assert_agrees(spec, INPUTS[kind](shape))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", INPUTS)
def test_narrow_inputs_are_read_exactly(kind, dtype):
    for shape in SHAPES:
        assert_agrees("tah:tau=1.3,group=32", INPUTS[kind](shape).to(dtype))


@pytest.mark.parametrize("alloc", [64, 320, 1600])
@pytest.mark.parametrize("select", ["high", "low"])
def test_allocation_tiles_of_any_width_agree(alloc, select):
    assert_agrees(f"tah:alloc={alloc},select={select},int4=0.4", gaussian((2, 5, 1600)))
    assert_agrees(f"tah:alloc={alloc},select={select},int4=0.4", spoiled((2, 5, 1600)))


@pytest.mark.parametrize("spec", ["tah", "tah:alloc=token,tau=0", "tah:group=8,int4=0.3", "tah:adaptive=off"])
def test_number_of_threads_does_not_change_the_bytes(spec):
    x = gaussian((3, 83, 1001))
    x[1, 4, 7] = torch.nan
    layout = TahLayout.of(CodecSpec.parse(spec), x.shape)
    one = tah_cpu.encode(layout, x)
    values = tah_cpu.decode(layout, one, torch.bfloat16)
    for threads in (2, 3):
        assert torch.equal(one, tah_cpu.encode(layout, x, threads=threads))
        assert torch.equal(bits_of(values), bits_of(tah_cpu.decode(layout, one, torch.bfloat16, threads=threads)))


@pytest.mark.skipif(not FIXTURE.exists(), reason="no gpt2small_boundary.safetensors; set TAHQ_SHARED_DATA")
def test_boundary_tensors_of_a_model_agree():
    from safetensors.torch import load_file

    for x in load_file(FIXTURE).values():
        assert assert_agrees("tah", x, threads=2).num_selections <= 4


def test_strided_input_is_taken_and_not_written():
    x = gaussian((5, 4, 96)).transpose(0, 1)
    kept = x.clone()
    layout = TahLayout.of(CodecSpec.parse("tah"), x.shape)
    assert torch.equal(tah_cpu.encode(layout, x), encode_reference(layout, x.contiguous()))
    assert torch.equal(x, kept)


@st.composite
def specs(draw):
    low = draw(st.integers(2, 8))
    text = (
        f"tah:group={draw(st.sampled_from([8, 16, 32, 64, 128, 256]))},low={low},high={draw(st.integers(low, 8))},"
        f"int4={draw(st.integers(0, 7))}/7,tau={draw(st.sampled_from(['0', '0.3', '1', '1.01', '2', '9', 'inf']))},"
        f"alloc={draw(st.sampled_from(['group', 'token']))},select={draw(st.sampled_from(['high', 'low']))}"
    )
    return CodecSpec.parse(text)


@settings(max_examples=150)
@given(
    spec=specs(),
    shape=st.lists(st.integers(1, 4), max_size=2),
    channels=st.integers(1, 300),
    pool=st.lists(st.floats(width=32), min_size=1, max_size=6),
    seed=st.integers(0, 99),
    dtype=st.sampled_from(DTYPES),
)
def test_any_tensor_agrees(spec, shape, channels, pool, seed, dtype):
    index = torch.randint(len(pool), (*shape, channels), generator=torch.Generator().manual_seed(seed))
    assert_agrees(spec, torch.tensor(pool)[index].to(dtype))


@settings(max_examples=150)
@given(data=st.data(), seed=st.integers(0, 3), spec=st.sampled_from(["tah:int4=0.5", "tah:alloc=token,tau=0"]))
def test_mutated_stream_is_refused_as_the_reference_refuses_it(data, seed, spec):
    x = gaussian((2, 3, 100), seed)
    if seed == 3:
        x[0, 1, 70] = torch.nan
    layout = TahLayout.of(CodecSpec.parse(spec), x.shape)
    buf = tah_cpu.encode(layout, x)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, buf.numel() - 1))
        buf[place] = data.draw(st.integers(0, 255))
    assert_same_outcome(spec, x.shape, buf)


def test_logarithm_is_within_its_bound():
    values = np.concatenate((np.geomspace(1.2e-38, 3e38, 20000), np.linspace(0.7, 1.42, 20000))).astype(F)
    exact = np.log2(values.astype(np.float64))
    got = np.array([log2_of(value) for value in values])
    assert (np.abs(got - exact) <= 1e-7 * np.abs(exact) + 1e-7).all()
    assert log2_of(F(1.0)) == 0
    assert math.isfinite(log2_of(F(0.0)))


def entropies_of(rows, exponent=0):
    """In nats, of rows that are allocation tiles of tiles of eight, as values times 2^exponent."""
    count, channels = rows.shape
    tiling = Tiling.of((count, channels), 8)
    of_tiles, sums, out = np.empty(tiling.num_tiles, np.int32), Sums.room(count), np.empty(count, F)
    y = np.empty(channels, F)
    measure_and_sum(Values.of(rows), Grid.of(tiling), tiling.tiles_per_token, 0, count, of_tiles, sums, y)
    entropies(sums, exponent, out)
    return torch.from_numpy(out).double() * math.log(2)


@pytest.mark.parametrize("channels", [8, 64, 256, 1600, 16384])
@pytest.mark.parametrize("scale", [1e38, 1e3, 1.0, 1e-11, 1e-13, 1e-30, 1e-40])
def test_entropy_is_close_to_the_exact_one(channels, scale):
    """Half a step of 2^−20 bits, and rounding: some units of 2^−24 of log2 of the sum, which is at most 15.

    Subnormal values cannot be scaled to about 1 by one factor: logarithms of up to 40 cancel, and half of what
    `support.agreement` allows remains.
    """
    bound = 5e-6 if scale < 1e-38 else 2.5e-6
    rows = (gaussian((20, channels), channels) ** 3 / 150 * scale).clamp(-3.4e38, 3.4e38)
    for exponent in (-100, 0, 20, 127):
        magnitude = rows.double().abs() * 2.0**exponent
        if magnitude.max() >= 2048:  # no exponent of an encoder gives that
            continue
        share = magnitude / (magnitude.sum(dim=1, keepdim=True) + EPSILON)
        exact = -(share * (share + EPSILON).log()).sum(dim=1)
        assert (entropies_of(rows, exponent) - exact).abs().max() < bound
        assert (entropy_(magnitude.float()).double() - exact).abs().max() < 3e-6  # the reference's own


def test_equal_distributions_rank_as_equals_whatever_their_scale():
    for pattern in ([1.0] * 64, [0.0] * 63 + [1.0], [1.0, -1.0] * 4 + [0.0] * 56):
        expected = math.log(2) * round(math.log2(sum(map(abs, pattern))))
        for exponent, scales in ((0, [0.1, 1.0, 77.7, 1234.5]), (-117, [3e38, 1e37]), (120, [1e-36, 3e-35, 1.1e-34])):
            rows = torch.tensor(pattern) * torch.tensor(scales).unsqueeze(1)
            assert entropies_of(rows, exponent).unique().tolist() == [expected]
    assert entropies_of(torch.zeros(1, 64)).item() == 0


@given(
    pool=st.lists(st.floats(0, 2047, width=32), min_size=2, max_size=5),
    tau=st.sampled_from([0.0, 1e-30, 0.5, 1.0, 1.0000001, 1.5, 2.0, 3.0, 1e30, math.inf]),
    seed=st.integers(0, 50),
    factor=st.sampled_from([1.0, 1e-10, 1e-13, 1e-37]),
)
def test_outlier_test_is_the_references(pool, tau, seed, factor):
    index = torch.randint(len(pool), (1, 32), generator=torch.Generator().manual_seed(seed))
    y = torch.tensor(pool)[index] * factor
    y[0, 1:] *= y[0, 0] / (y[0].max() + 1e-45)  # often a pair close to the threshold
    y = y.nan_to_num(0.0).clamp(max=2047.0)
    expected = bool((outlier_ratio(y) > tau).item())
    largest = F(y.max())
    room = np.empty(32, np.float32)
    extent = scan(y[0].numpy(), 0, F(1.0), least_second(largest, F(tau)), room)
    assert is_outlier(room, largest, extent.beyond, F(tau)) == expected


PATIENCE_S = 15.0


@pytest.mark.serial
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores")
def test_two_python_threads_encode_at_the_same_time():
    x = gaussian((2, 512, 1600))
    layout = TahLayout.of(CodecSpec.parse("tah"), x.shape)

    def seconds(num_threads):
        workers = [threading.Thread(target=tah_cpu.encode, args=(layout, x)) for _ in range(num_threads)]
        start = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return time.perf_counter() - start

    tah_cpu.encode(layout, x)
    deadline_s = time.monotonic() + PATIENCE_S
    while (ratio := seconds(2) / seconds(1)) >= 1.6:  # 2 if they took turns; the machine may be busy for a while
        assert time.monotonic() < deadline_s, ratio
