"""The loss in chunks of tokens: bit-equal to one over full-size logits that adds up its parts in the same order."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.small_slices import MICRO_BATCH, SEQ_LEN, VOCAB, make_slice, make_spec
from torch.nn import Parameter
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tahq.memory.agoq.stored_gradients import gradient_of, store_gradient
from tahq.models.loss import (
    IGNORED_LABEL,
    chunked_cross_entropy,
    cross_entropy,
    preference_loss,
    summed_cross_entropy,
)
from tahq.models.partition import BlockRange

BATCH, CHANNELS, WORDS = 3, 32, 70


def inputs(seq_len, seed=0):
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randn(BATCH, seq_len, CHANNELS, generator=draw).requires_grad_()
    weight = Parameter(torch.randn(WORDS, CHANNELS, generator=draw) / 8)
    weight.grad = torch.randn(WORDS, CHANNELS, generator=draw)  # of an earlier micro-batch
    labels = torch.randint(WORDS, (BATCH, seq_len), generator=draw)
    labels[:, ::5] = IGNORED_LABEL
    return hidden, weight, labels


def from_full_logits(hidden, weight, labels, num_chunks, divisor, dtype):
    """Logits of all tokens first, then one loss; parts of the weight's gradient are added one after the other."""
    rows, flat = hidden.detach().reshape(-1, CHANNELS).to(dtype), labels.flatten()
    size = -(-len(rows) // num_chunks)
    matrix = weight.detach().to(dtype)
    logits = torch.cat([F.linear(part, matrix) for part in rows.split(size)]).requires_grad_()
    total = torch.zeros(())
    for part, of_part in zip(logits.split(size), flat.split(size), strict=True):
        total = total + summed_cross_entropy(part, of_part)
    (total / divisor).backward()
    of_weight = weight.grad.clone()
    for gradient, part in zip(logits.grad.split(size), rows.split(size), strict=True):
        of_weight += gradient.t().mm(part)
    of_hidden = torch.cat([gradient.mm(matrix) for gradient in logits.grad.split(size)])
    return total.detach(), of_hidden.to(hidden.dtype).view(hidden.shape), of_weight


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 20), st.integers(1, 70), st.sampled_from([torch.float32, torch.bfloat16]))
def test_loss_and_gradients_are_those_of_full_size_logits_for_any_number_of_chunks(seq_len, num_chunks, dtype):
    hidden, weight, labels = inputs(seq_len)
    total, of_hidden, of_weight = from_full_logits(hidden, weight, labels, num_chunks, 7.0, dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
        loss, summed = chunked_cross_entropy(hidden, weight, labels, num_chunks, 7.0)
    loss.backward()
    assert torch.equal(summed, total)
    assert torch.equal(loss.detach(), total / 7.0)
    assert torch.equal(hidden.grad, of_hidden)
    assert torch.equal(weight.grad, of_weight)


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_one_chunk_is_the_ordinary_loss(bf16):
    results = []
    for is_chunked in (False, True):
        hidden, weight, labels = inputs(20)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            if is_chunked:
                loss, summed = chunked_cross_entropy(hidden, weight, labels, 1, 7.0)
            else:
                loss, summed = cross_entropy(F.linear(hidden, weight), labels, 7.0)
        loss.backward()
        results.append((summed, hidden.grad, weight.grad))
    assert all(map(torch.equal, *results))


def test_gradient_in_codes_is_coded_once_for_all_chunks():
    found = []
    for num_chunks in (1, 4):
        hidden, weight, labels = inputs(20)
        weight.grad = None
        store_gradient(weight)
        chunked_cross_entropy(hidden, weight, labels, num_chunks)
        found.append(gradient_of(weight))
    assert weight.grad is None
    error = (found[0] - found[1]).norm() / found[0].norm()
    assert error < 0.005  # fp32 sums in another order round to other codes here and there; four codings err by 0.03


@pytest.mark.parametrize("num_chunks", [None, 1, 4], ids=["whole", "1", "4"])
def test_z_loss_is_differentiated_and_not_reported(num_chunks):
    hidden, weight, labels = inputs(20)
    past = weight.grad.clone()
    logits = F.linear(hidden, weight)
    log_sums = logits.logsumexp(-1)[labels != IGNORED_LABEL]
    expected = (summed_cross_entropy(logits, labels) + 0.1 * log_sums.square().sum()) / 7.0
    gradients = torch.autograd.grad(expected, (hidden, weight))
    if num_chunks is None:
        loss, summed = cross_entropy(F.linear(hidden, weight), labels, 7.0, 0.1)
    else:
        loss, summed = chunked_cross_entropy(hidden, weight, labels, num_chunks, 7.0, 0.1)
    loss.backward()
    torch.testing.assert_close((loss, hidden.grad, weight.grad - past), (expected, *gradients), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(summed, summed_cross_entropy(logits, labels).detach())


def test_evaluation_adds_the_same_chunks():
    hidden, weight, labels = inputs(20)
    trained = chunked_cross_entropy(hidden, weight, labels, 4)[1]
    with torch.no_grad():
        assert torch.equal(chunked_cross_entropy(hidden, weight, labels, 4)[1], trained)


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [each for each in torch.utils._pytree.tree_leaves(result) if isinstance(each, torch.Tensor)]
        self.numel = max([self.numel, *(each.numel() for each in tensors)])
        return result


def test_no_tensor_has_the_logits_of_more_than_one_chunk():
    hidden, weight, labels = inputs(200)
    with Largest() as largest:
        chunked_cross_entropy(hidden, weight, labels, 10)[0].backward()
    assert largest.numel == max(60 * WORDS, hidden.numel())
    assert 60 * WORDS < 600 * WORDS / 2


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_slice_with_chunks_returns_what_its_loss_takes(family):
    labels = torch.arange(MICRO_BATCH * SEQ_LEN).view(MICRO_BATCH, SEQ_LEN) % VOCAB
    x = torch.randn(MICRO_BATCH, SEQ_LEN, make_spec(family).hidden_size)
    losses, logits = [], []
    for num_chunks in (1, 3):
        module = make_slice(make_spec(family), blocks=BlockRange(1, 3, 3))
        module.loss_chunks = num_chunks
        loss, summed = module.loss(module(x), labels, 2.0)
        loss.backward()
        losses.append((float(summed), module.lm_head.weight.grad))
        with torch.no_grad():
            places = torch.arange(MICRO_BATCH)
            logits.append(module.logits(module(x), places))
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-6)
    torch.testing.assert_close(losses[0][1], losses[1][1])
    assert logits[0].shape == (MICRO_BATCH, VOCAB)
    torch.testing.assert_close(logits[0], logits[1])


@pytest.mark.parametrize("num_chunks", [1, 3])
def test_log_probabilities_of_samples_have_gradients_of_their_own(num_chunks):
    module = make_slice(make_spec("llama"), blocks=BlockRange(2, 3, 3)).requires_grad_(False)
    draw = torch.Generator().manual_seed(1)
    hidden, labels = torch.randn(3, SEQ_LEN, 64, generator=draw), torch.randint(VOCAB, (3, SEQ_LEN), generator=draw)
    labels[:, :3], labels[2] = IGNORED_LABEL, IGNORED_LABEL
    each = F.log_softmax(module(x := hidden.clone().requires_grad_()), -1)
    at_labels = each.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    expected, weights = at_labels.where(labels != IGNORED_LABEL, 0.0).sum(1), torch.tensor([1.0, -2.0, 3.0])
    (expected * weights).sum().backward()
    module.loss_chunks = num_chunks
    found = module.log_probs(module(y := hidden.clone().requires_grad_()), labels)
    (found * weights).sum().backward()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(y.grad, x.grad)
    assert found[2] == 0


def test_loss_of_preferences_is_that_of_the_paper_and_leaves_out_rows_without_labels():
    log_probs = torch.tensor([-3.0, -5.0, -4.0, -2.0, 0.0, 0.0], requires_grad=True)
    reference = torch.tensor([-4.0, -4.5, -3.0, -2.0, 0.0, 0.0])
    labels = torch.full((6, 3), IGNORED_LABEL)
    labels[:4, 1] = 7
    loss, sums = preference_loss(log_probs, reference, labels, 0.5, 0.25)
    margins = torch.tensor([0.5 * (1.0 - -0.5), 0.5 * (-1.0 - 0.0)])
    per_pair = 0.75 * torch.log1p(torch.exp(-margins)) + 0.25 * torch.log1p(torch.exp(margins))
    assert loss.item() == pytest.approx(per_pair.sum().item())
    assert sums.tolist() == [2.0, 0.0, -0.25, 1.0]
    loss.backward()
    slopes = 0.5 * (0.25 * torch.sigmoid(margins) - 0.75 * torch.sigmoid(-margins))
    expected = torch.stack([slopes, -slopes], 1).flatten().tolist()
    assert log_probs.grad.tolist() == pytest.approx([*expected, 0.0, 0.0])
