import torch

from tahq.quant import get_codec
from tahq.quant.stochastic_rounding import draws, round_stochastic_

CPU = torch.device("cpu")


def test_mean_over_keys_is_the_value():
    y = torch.tensor([-3.75, -0.1, 0.5, 0.9, 100.25, 32766.5]).repeat(1000)
    num_keys = 200
    mean = sum(round_stochastic_(y.clone(), key=key * 0x9E3779B97F4A7C15 % 2**64) for key in range(num_keys)) / num_keys
    # 200,000 draws for each value, each of standard deviation at most 1/2: 5 sigma are 0.0056.
    assert (mean.double().view(1000, 6).mean(dim=0) - y[:6].double()).abs().max() < 0.0056


def test_draws_are_uniform_and_unrelated_between_elements_and_keys():
    u = draws(2**17, 5, CPU)
    assert 0 <= u.min() < u.max() < 1
    counts = torch.histc(u, bins=64, min=0, max=1)
    expected = 2**17 / 64
    chi2 = ((counts - expected) ** 2 / expected).sum()
    assert 20 < chi2 < 120  # 63 degrees of freedom: mean 63, standard deviation 11
    others = [u.roll(1), u.roll(64), draws(2**17, 4, CPU), draws(2**17, 5 + 2**32, CPU), draws(2**17, 5 + 2**63, CPU)]
    for other in others:
        correlation = torch.corrcoef(torch.stack((u, other)))[0, 1]
        assert correlation.abs() < 5 / 2**8.5  # 5 sigma of 1/√n


def test_fixed_codec_is_unbiased_over_keys():
    tile = torch.randn(1, 64, generator=torch.Generator().manual_seed(0))
    x, num_keys = tile.expand(40, 64), 100  # each of the 40 rows has draws of its own
    codec = get_codec("fixed:bits=3,round=stochastic")
    total = torch.zeros_like(tile)
    for key in range(num_keys):
        back = codec.decode(codec.encode(x, key=key * 0x9E3779B97F4A7C15 % 2**64), x.shape)
        total += back.sum(dim=0, keepdim=True)
    step = tile.abs().max() / 3
    # the standard deviation of one draw is at most step/2; 5 sigma of the mean of 4,000
    assert (total / 4000 - tile).abs().max() < 5 * step / 2 / 4000**0.5
