"""Q-GaLore on CUDA: kernels against the plain path to the bit, states that move between devices, a step that learns."""

import pytest
import torch
from support.device_waits import host_must_not_wait

from tahq.memory.galore.low_rank_weight import LowRankSettings, LowRankWeight
from tahq.memory.galore.qgalore import LowRankEmbedding
from tahq.memory.galore.stored_weight import FullWeight, Int8Weight
from tahq.memory.galore.subspace import Int4Projection, LazyRule

pytestmark = pytest.mark.gpu
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SHAPES = [(1, 1), (1, 127), (7, 129), (3, 4097), (512, 1376), (11008, 512)]


def awkward(shape, seed: int) -> torch.Tensor:
    """Ordinary groups, one of one sign, zeros, tiny and huge ones."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    flat = values.view(-1)
    flat[:256] += 5
    flat[256:512] = 0
    flat[512:768] *= 1e-30
    flat[768:1024] *= 1e37
    return values


def assert_equal(one: Int8Weight, other: Int8Weight) -> None:
    for name, tensor in one.tensors().items():
        assert torch.equal(tensor.cpu(), other.tensors()[name].cpu()), name


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("key", [None, 5, 2**63 + 11])
def test_int8_weights_are_those_of_the_cpu_to_the_bit(shape, key):
    there, here = Int8Weight(shape, CPU), Int8Weight(shape, CUDA)
    values = awkward(shape, 0)
    there.assign(values)
    here.assign(values.to(CUDA))
    assert_equal(there, here)
    for step, dtype in enumerate((torch.float32, torch.bfloat16)):
        update = awkward(shape, step + 1).to(dtype)
        there.add(update, keep=0.9997, rate=-0.013, key=key)
        here.add(update.to(CUDA), keep=0.9997, rate=-0.013, key=key)
        assert_equal(there, here)
        assert torch.equal(here.decoded(dtype).cpu(), there.decoded(dtype))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bf16_weights_are_those_of_the_cpu_to_the_bit(shape):
    there, here = (FullWeight(shape, device, torch.bfloat16) for device in (CPU, CUDA))
    for weight in (there, here):
        weight.assign(awkward(shape, 0).to(weight.values.device))
    for step, dtype in enumerate((torch.float32, torch.bfloat16)):
        update = awkward(shape, step + 1).to(dtype)
        for weight in (there, here):
            weight.add(update.to(weight.values.device), keep=0.9997, rate=-0.013, key=2**63 + 11)
        assert torch.equal(here.values.cpu().view(torch.int16), there.values.view(torch.int16))


@pytest.mark.parametrize("ends", ["bf16", "int8"])
@pytest.mark.parametrize("num_tokens", [7, 5000])
def test_an_embeddings_rows_and_gradient_are_the_same_each_time(ends, num_tokens):
    """Also where words occur many times, and only deterministic operators may run."""
    weight = LowRankWeight("wte.weight", (700, 320), LowRankSettings(ends=ends).of_ends(), CUDA)
    weight.storage.assign(awkward((700, 320), 0).to(CUDA).clamp(-9, 9))
    embedding = LowRankEmbedding(weight, None)
    tokens = torch.randint(0, 50, (num_tokens,), generator=torch.Generator().manual_seed(1)).to(CUDA)
    gradient = torch.randn(num_tokens, 320, generator=torch.Generator().manual_seed(2)).to(CUDA)
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


@pytest.mark.parametrize("shape", [(1, 7), (33, 129), (256, 4096)], ids=str)
def test_projections_are_those_of_the_cpu_to_the_bit(shape):
    basis = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    there, here = Int4Projection(shape, CPU), Int4Projection(shape, CUDA)
    there.assign(basis)
    here.assign(basis.to(CUDA))
    assert torch.equal(here.packed.cpu(), there.packed)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(here.decoded(dtype).cpu(), there.decoded(dtype))


@pytest.mark.parametrize("svd", ["exact", "randomised"])
def test_states_saved_on_the_cpu_go_on_on_cuda(svd):
    settings = LowRankSettings(rank=16, rule=LazyRule(gap=3), svd=svd)

    def steps(weight: LowRankWeight, numbers: range) -> None:
        for step in numbers:
            weight.begin(step)
            for index in range(2):
                seed = 10 * step + index
                gradient = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
                weight.take(gradient.to(weight.device))
            weight.apply(step, 1e-3, 0.1)

    there = LowRankWeight("h.0.weight", (129, 257), settings, CPU)
    there.storage.assign(0.02 * torch.randn(129, 257, generator=torch.Generator().manual_seed(9)))
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
