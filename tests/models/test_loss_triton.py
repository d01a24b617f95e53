"""The kernel of cross-entropy against its formula in fp64, on CUDA or in Triton's interpreter.

The interpreter cuts off where bf16 rounds, and takes no bf16 products, so that logits are fp32 there.
"""

import pytest
import torch
from support.interpreter import DEVICE, on_device, sizes
from support.samples import normal
from support.small_slices import saved_storages
from torch.nn import Parameter

from tahq.memory.agoq.stored_gradients import gradient_of, store_gradient
from tahq.memory.recompute import recompute
from tahq.memory.saved_tensors import MicroBatchShape, copied_by_head, head_workspace, saved_by_head
from tahq.memory.stored_slice import build_slice
from tahq.models.config import ModelConfig
from tahq.models.deferred_gradients import DeferredGradients, accumulate_product, linear, product
from tahq.models.keyed_dropout import RandomContext
from tahq.models.loss import IGNORED_LABEL, chunked_cross_entropy, cross_entropy, cross_entropy_of_rows
from tahq.models.model_spec import ModelSpec, load_spec
from tahq.models.slice import ModelSlice, Parts, sharing_copies_of

pytestmark = on_device
DIVISOR = 7.0
every_dtype = pytest.mark.parametrize("dtype", sizes([torch.float32], [], [torch.bfloat16]), ids=str)
every_z = pytest.mark.parametrize("z_loss", [0.0, 1e-2])
only_cuda = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")


@pytest.fixture
def kernels():
    from tahq.models import loss_kernels

    return loss_kernels


def formula(logits: torch.Tensor, labels: torch.Tensor, z_loss: float) -> torch.Tensor:
    """Both losses of each row, from fp64 logits."""
    is_labelled = labels != IGNORED_LABEL
    log_sums = logits.logsumexp(-1)
    at_label = logits.gather(-1, labels.where(is_labelled, 0)[:, None])[:, 0]
    losses = torch.stack((log_sums - at_label, log_sums - at_label + z_loss * log_sums.square()))
    return losses.where(is_labelled, 0.0)


def exact(logits: torch.Tensor, labels: torch.Tensor, z_loss: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The formula's losses of each row, and the gradient of the second ones over DIVISOR."""
    leaf = logits.detach().double().requires_grad_()
    losses = formula(leaf, labels, z_loss)
    (losses[1].sum() / DIVISOR).backward()
    return losses.detach(), leaf.grad


def sample(tokens: int, vocab: int, dtype: torch.dtype, scale: float = 3.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits as columns of a larger tensor of NaN, and labels of which every fourth is ignored."""
    logits = torch.full((tokens, vocab + 3), float("nan"), dtype=dtype, device=DEVICE)[:, 1 : vocab + 1]
    logits.copy_(scale * normal((tokens, vocab)))
    labels = torch.randint(vocab, (tokens,), generator=torch.Generator().manual_seed(1))
    labels[1::4] = IGNORED_LABEL
    return logits, labels.to(DEVICE)


def close(got: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    tolerance = tolerance if got.dtype == torch.float32 else 2.0**-8
    torch.testing.assert_close(got.double(), expected, atol=tolerance * float(expected.abs().max()), rtol=tolerance)


@every_dtype
@every_z
@pytest.mark.parametrize(
    ("tokens", "vocab", "scale"),
    sizes([(5, 70, 3.0), (3, 4097, 3.0), (2, 9001, 1e4), (1, 1, 1.0)], [], [(300, 131_073, 3.0), (64, 262_144, 30.0)]),
)
def test_losses_and_gradient_are_the_formulas(kernels, tokens, vocab, scale, z_loss, dtype):
    logits, labels = sample(tokens, vocab, dtype, scale)
    expected, of_logits = exact(logits, labels, z_loss)
    before = logits.clone()
    only_losses = kernels.losses_of_rows(logits, labels)
    assert torch.equal(logits, before)
    losses = kernels.losses_of_rows(logits, labels, DIVISOR, z_loss)
    close(losses, expected)
    close(logits, of_logits)
    assert torch.equal(only_losses[0], losses[0])
    assert not logits[labels == IGNORED_LABEL].any()
    around = logits._base
    assert around[:, 0].isnan().all()
    assert around[:, vocab + 1 :].isnan().all()


@every_dtype
def test_minus_infinity_is_a_word_that_never_comes(kernels, dtype):
    logits, labels = sample(2, 9001, dtype)
    logits[0, :5000] = float("-inf")  # a whole block
    labels[0], labels[1] = 8000, 3
    expected, of_logits = exact(logits, labels, 0.1)
    close(kernels.losses_of_rows(logits, labels, DIVISOR, 0.1), expected)
    close(logits, of_logits)


@every_dtype
@pytest.mark.parametrize(
    "break_row",
    [
        lambda logits, labels: logits[1, 4500].fill_(float("nan")),
        lambda logits, labels: logits[1, 7].fill_(float("inf")),
        lambda logits, labels: logits[1].fill_(float("-inf")),
        lambda logits, labels: labels[1].fill_(5000),
        lambda logits, labels: labels[1].fill_(-3),
    ],
    ids=["NaN", "infinity", "nothing", "label above", "label below"],
)
def test_broken_row_has_nan_as_its_loss_and_spoils_no_other(kernels, break_row, dtype):
    logits, labels = sample(3, 5000, dtype)
    labels[1] = 7
    intact = logits.clone()
    expected = kernels.losses_of_rows(intact, labels, DIVISOR)
    break_row(logits, labels)
    losses = kernels.losses_of_rows(logits, labels, DIVISOR)
    assert losses[:, 1].isnan().all()
    assert torch.equal(losses[:, ::2], expected[:, ::2])
    assert torch.equal(logits[::2], intact[::2])


def made_logits(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A leaf [2, 3, 70], logits computed from it, and labels."""
    leaf = normal((2, 3, 70)).to(DEVICE, dtype).requires_grad_()
    labels = torch.arange(6, device=DEVICE).view(2, 3)
    labels[0, 1] = IGNORED_LABEL
    return leaf, leaf * 1.0, labels


@every_dtype
@every_z
@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_backward_multiplies_by_the_gradient_of_the_loss(z_loss, factor, dtype):
    leaf, logits, labels = made_logits(dtype)
    losses, of_logits = exact(leaf.view(6, 70), labels.flatten(), z_loss)
    loss, summed = cross_entropy(logits, labels, DIVISOR, z_loss)
    (factor * loss).backward()
    close(torch.stack((summed, loss.detach() * DIVISOR)), losses.sum(1))
    close(leaf.grad.view(6, 70), factor * of_logits)
    with torch.no_grad():
        assert torch.equal(cross_entropy(leaf, labels)[1], summed)


@every_dtype
def test_losses_of_samples_can_be_differentiated_with_a_weight_for_each(dtype):
    leaf, logits, labels = made_logits(dtype)
    with torch.no_grad():
        before = cross_entropy_of_rows(logits, labels)
    losses, of_logits = exact(leaf.view(6, 70), labels.flatten(), 0.0)
    found = cross_entropy_of_rows(logits, labels)
    assert torch.equal(found, before)
    close(found.detach(), losses[0].view(2, 3).sum(1))
    weights = torch.tensor([2.0, -0.5], device=DEVICE)
    (found * weights).sum().backward()
    close(leaf.grad, DIVISOR * of_logits.view(2, 3, 70) * weights[:, None, None])


def test_logits_that_were_overwritten_are_not_taken_for_logits():
    _, logits, labels = made_logits(torch.float32)
    squares = logits.square().sum()
    loss, _ = cross_entropy(logits, labels)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.backward()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def head(dtype: torch.dtype) -> tuple[torch.Tensor, Parameter, torch.Tensor]:
    """Hidden states [2, 13, 32], a head of 72 words with the gradient of an earlier micro-batch, and labels."""
    hidden = normal((2, 13, 32)).to(DEVICE, dtype).requires_grad_()
    weight = Parameter(normal((72, 32), seed=1).to(DEVICE) / 4)
    weight.grad = normal((72, 32), seed=2).to(DEVICE)
    labels = torch.arange(26, device=DEVICE).view(2, 13)
    labels[:, ::5] = IGNORED_LABEL
    return hidden, weight, labels


@every_dtype
@every_z
@pytest.mark.parametrize("num_chunks", [1, 2, 5, 26])
def test_chunks_give_the_bits_of_full_size_logits_whose_parts_are_added_in_order(num_chunks, z_loss, dtype):
    hidden, weight, labels = head(dtype)
    rows, matrix, size = hidden.detach().view(26, 32), weight.detach().to(dtype), -(-26 // num_chunks)
    logits = torch.cat([linear(part, matrix) for part in rows.split(size)]).requires_grad_()
    whole = cross_entropy(logits, labels, DIVISOR, z_loss)
    whole[0].backward()
    summed, total = torch.zeros((), device=DEVICE), Parameter(weight.detach().clone())
    total.grad = weight.grad.clone()
    for part, gradient, label in zip(
        rows.split(size), logits.grad.split(size), labels.view(26).split(size), strict=True
    ):
        with torch.no_grad():
            summed += cross_entropy(linear(part, matrix), label)[1]
            accumulate_product(total, gradient.t(), part, is_whole=True)
    of_hidden = torch.cat([gradient.mm(matrix) for gradient in logits.grad.split(size)])
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=dtype is torch.bfloat16):
        loss, found = chunked_cross_entropy(hidden, weight, labels, num_chunks, DIVISOR, z_loss)
    loss.backward()
    assert torch.equal(found, summed)
    assert torch.equal(hidden.grad.view(26, 32), of_hidden)
    assert torch.equal(weight.grad, total.grad)
    torch.testing.assert_close((loss, found), whole, rtol=0 if num_chunks == 1 else 1e-6, atol=0)


def test_head_whose_gradients_are_put_off_gets_the_same_ones():
    found = []
    for deferred in (None, DeferredGradients()):
        hidden, weight, labels = head(torch.float32)
        logits = product(hidden, weight, None, transposed=True, deferred=deferred)
        cross_entropy(logits, labels, DIVISOR, 0.1)[0].backward()
        if deferred is not None:
            deferred.run()
        found.append((hidden.grad, weight.grad))
    assert all(map(torch.equal, *found))


def last_part(tokens: int, channels: int, vocab: int) -> tuple[ModelSlice, ModelSpec]:
    """Final norm and head of a Llama, which has the gradients of an earlier micro-batch."""
    config = ModelConfig(family="llama", num_layers=1, hidden_size=channels, num_heads=2)
    spec = load_spec(config, vocab_size=vocab, seq_len=tokens)
    module = build_slice(spec, Parts(range(0), head=True), seed=0, device=DEVICE, random=RandomContext(0)).train()
    recompute(module, "none")
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return module, spec


def loss_of(module: ModelSlice, tokens: int, *, bf16: bool = False) -> torch.Tensor:
    x = normal((1, tokens, module.spec.hidden_size)).to(DEVICE).requires_grad_()
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=bf16):
        return module.loss(module(x), torch.arange(tokens, device=DEVICE)[None], DIVISOR)[0]


def test_count_equals_what_is_kept_of_logits():
    module, spec = last_part(30, 32, 72)
    saved = saved_storages(lambda: loss_of(module, 30)).items()
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    kept = sum(tensor.untyped_storage().nbytes() for at, tensor in saved if at not in own)
    assert kept == saved_by_head(spec, MicroBatchShape(1, 30, on_cuda=True))


@only_cuda
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("num_chunks", [1, 4])
@pytest.mark.parametrize(("tokens", "channels"), [(4096, 256), (256, 1024)])
def test_peak_is_the_counted_one(tokens, channels, num_chunks, bf16):
    module, spec = last_part(tokens, channels, 2**15)
    module.loss_chunks = num_chunks
    shape = MicroBatchShape(1, tokens, bf16, loss_chunks=num_chunks, on_cuda=True)
    with sharing_copies_of([module]):
        loss_of(module, tokens, bf16=bf16).backward()
        torch.cuda.synchronize()
        copies = copied_by_head(spec, shape)
        before = torch.cuda.memory_allocated() - copies
        torch.cuda.reset_peak_memory_stats()
        loss_of(module, tokens, bf16=bf16).backward()
        peak = torch.cuda.max_memory_allocated() - before
    counted = copies + saved_by_head(spec, shape) + head_workspace(spec, shape, adds_in_place=False)
    assert peak == pytest.approx(counted, rel=0.05)


@only_cuda
@pytest.mark.parametrize("has_past", [False, True])
@pytest.mark.parametrize("is_stored", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_product_is_added_to_the_gradient_unrounded(has_past, is_stored, dtype):
    left, right = normal((72, 26)).to(DEVICE, dtype), normal((26, 32), seed=1).to(DEVICE, dtype)
    weight, past = Parameter(normal((72, 32)).to(DEVICE)), normal((72, 32), seed=2).to(DEVICE)
    if is_stored:
        store_gradient(weight)
    expected = 2 * left.double() @ right.double()
    if has_past:
        weight.grad, expected = past.clone(), expected + past.double()
    accumulate_product(weight, left, right, is_whole=False)
    accumulate_product(weight, left, right, is_whole=True)
    assert (weight.grad is None) == is_stored
    close(gradient_of(weight).float(), expected, 0.07 if is_stored else 1e-5)


@only_cuda
def test_rows_beyond_two_to_the_31_elements_are_reached(kernels):
    vocab = 2**17
    logits = torch.zeros(2**14 + 8, vocab, dtype=torch.bfloat16, device=DEVICE)
    logits[-1, 5] = 20.0
    labels = torch.full((len(logits),), 7, device=DEVICE)
    expected, of_logits = exact(logits[-2:], labels[-2:], 0.0)
    losses = kernels.losses_of_rows(logits, labels, DIVISOR)
    close(losses[:, -2:], expected)
    close(logits[-2:], of_logits)
