"""The pieces of `tah` in numba: entropies, the outlier test, and threads; tests/contracts compares its streams."""

import math
import os
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tahq.quant import get_codec
from tahq.quant.cpu.numbers import Values
from tahq.quant.cpu.tiles import Grid
from tahq.quant.tah.cpu import is_outlier, least_second
from tahq.quant.tah.cpu_lanes import scan
from tahq.quant.tah.cpu_select import Sums, entropies, log2_of, measure_and_sum
from tahq.quant.tah.reference import EPSILON, entropy_, outlier_ratio
from tahq.quant.tiling import Tiling

F = np.float32


def gaussian(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


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


@pytest.mark.parametrize("channels", [8, 256, 1600, 16384])
@pytest.mark.parametrize("scale", [1e38, 1e3, 1e-11, 1e-13, 1e-40])
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
    codec = get_codec("tah", backend="cpu")

    def seconds(num_threads):
        workers = [threading.Thread(target=codec.encode, args=(x,)) for _ in range(num_threads)]
        start = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return time.perf_counter() - start

    codec.encode(x)
    deadline_s = time.monotonic() + PATIENCE_S
    while (ratio := seconds(2) / seconds(1)) >= 1.6:  # 2 if they took turns; the machine may be busy for a while
        assert time.monotonic() < deadline_s, ratio
