"""Q-GaLore on CUDA: its embedding, states that move between devices, a step that does not wait."""

import pytest
import torch
from support.device_waits import host_must_not_wait
from support.samples import normal

from tahq.memory.galore.low_rank_weight import LowRankSettings, LowRankWeight
from tahq.memory.galore.qgalore import LowRankEmbedding
from tahq.memory.galore.subspace import LazyRule

pytestmark = pytest.mark.gpu
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("ends", ["bf16", "int8"])
@pytest.mark.parametrize("num_tokens", [7, 5000])
def test_an_embeddings_rows_and_gradient_are_the_same_each_time(ends, num_tokens):
    """Also where words occur many times, and only deterministic operators may run."""
    weight = LowRankWeight("wte.weight", (700, 320), LowRankSettings(ends=ends).of_ends(), CUDA)
    weight.storage.assign(normal((700, 320)).to(CUDA))
    embedding = LowRankEmbedding(weight, None)
    tokens = torch.randint(0, 50, (num_tokens,), generator=torch.Generator().manual_seed(1)).to(CUDA)
    gradient = normal((num_tokens, 320), 2).to(CUDA)
    found = []
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(3):
            rows = embedding(tokens)
            assert torch.equal(rows, weight.storage.decoded(torch.float32)[tokens])
            rows.backward(gradient)
            found.append(weight.grad.clone())
            weight.discard()
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    expected = torch.zeros(700, 320).index_add_(0, tokens.cpu(), gradient.cpu())
    torch.testing.assert_close(found[0].cpu(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("svd", ["exact", "randomised"])
def test_states_saved_on_the_cpu_go_on_on_cuda(svd):
    settings = LowRankSettings(rank=16, rule=LazyRule(gap=3), svd=svd)

    def steps(weight: LowRankWeight, numbers: range) -> None:
        for step in numbers:
            weight.begin(step)
            for index in range(2):
                weight.take(normal(weight.shape, 10 * step + index).to(weight.device))
            weight.apply(step, 1e-3, 0.1)

    there = LowRankWeight("h.0.weight", (129, 257), settings, CPU)
    there.storage.assign(0.02 * normal((129, 257), 9))
    steps(there, range(5))
    saved = there.weight_tensors() | {f"optimizer/{name}": tensor for name, tensor in there.states().items()}
    here = LowRankWeight("h.0.weight", (129, 257), settings, CUDA)
    here.load(saved.__getitem__)
    steps(there, range(5, 6))  # between two searches, so that both devices project by the same basis
    steps(here, range(5, 6))
    difference = (here.storage.decoded(torch.float32).cpu() - there.storage.decoded(torch.float32)).abs()
    step = float(there.storage.scale.float().max())
    # sums round differently: an update near a border may be rounded to the other side, by one step
    assert float(difference.max()) <= step * (1 + 2**-7)
    assert float((difference > step / 2).float().mean()) < 1e-3
    steps(here, range(6, 12))
    assert bool(here.storage.decoded(torch.float32).isfinite().all())


def test_an_update_waits_for_nothing():
    weight = LowRankWeight("h.0.weight", (512, 256), LowRankSettings(rank=64), CUDA)
    weight.storage.assign(torch.randn(512, 256, device=CUDA))
    gradient = torch.randn(512, 256, device=CUDA)
    weight.begin(0)
    weight.take(gradient)
    weight.apply(0, 1e-3, 0.1)  # searched, and kernels compiled
    with host_must_not_wait():
        weight.begin(1)
        weight.take(gradient)
        weight.apply(1, 1e-3, 0.1)
