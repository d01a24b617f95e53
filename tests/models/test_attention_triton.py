"""The backward of causal attention against its formula in fp64, on CUDA or in Triton's interpreter.

The interpreter takes no bf16 products and a device's of fp32 are in TF32, so inputs are fp32 there and bf16 here.
"""

import pytest
import torch
from support.interpreter import DEVICE, on_device, sizes
from support.samples import normal

from tahq.models.fused_attention import fused_attention

pytestmark = on_device
IS_CUDA = DEVICE.type == "cuda"
DTYPE, ERROR = (torch.bfloat16, 1e-2) if IS_CUDA else (torch.float32, 1e-6)
only_cuda = pytest.mark.skipif(not IS_CUDA, reason="needs a CUDA device")
# samples, query heads, key heads, positions, channels
SHAPES = sizes(
    [(1, 2, 2, 64, 16), (2, 6, 2, 150, 32)],
    [(1, 7, 1, 129, 64)],
    [(2, 12, 2, 1024, 128), (3, 25, 25, 1000, 64), (1, 8, 8, 2, 64), (1, 4, 1, 4096, 128)],
)


def sample(shape: tuple[int, ...], seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Q, K, V and the gradient of the output; Q, K and V are parts of one tensor, as GPT-2 has them."""
    samples, heads, key_heads, length, width = shape
    joined = normal((samples, length, heads + 2 * key_heads, width), seed=seed).to(DEVICE, DTYPE).transpose(1, 2)
    parts = joined.split([heads, key_heads, key_heads], dim=1)
    return *parts, normal((samples, length, heads, width), seed=seed + 1).to(DEVICE, DTYPE).transpose(1, 2)


def formula(query, key, value, of_output, scale):
    """Output, logarithm of the softmax's sums, and gradients, in fp64."""
    leaves = [each.double().requires_grad_() for each in (query, key, value)]
    groups, length = query.shape[1] // key.shape[1], query.shape[2]
    key, value = (each.repeat_interleave(groups, 1) for each in leaves[1:])
    future = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    scores = (leaves[0] @ key.transpose(2, 3) * scale).masked_fill(future, float("-inf"))
    output = torch.softmax(scores, -1) @ value
    return output.detach(), scores.logsumexp(-1).detach(), torch.autograd.grad(output, leaves, of_output.double())


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.detach().double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("parts", [1, None])
def test_gradients_are_those_of_the_formula(shape, parts):
    from tahq.models.attention_kernels import causal_gradients

    query, key, value, of_output = sample(shape)
    output, norms, exact = formula(query, key, value, of_output, 0.2)
    statistics = output.to(DTYPE), norms.float()
    found = causal_gradients(query, key, value, *statistics, of_output, 0.2, parts)
    assert [each.shape for each in found] == [each.shape for each in (query, key, value)]
    assert max(map(error, found, exact)) < ERROR


def test_the_bits_of_a_head_do_not_depend_on_other_heads_and_samples():
    from tahq.models.attention_kernels import causal_gradients

    query, key, value, of_output = sample((2, 6, 2, 70, 16))
    output, norms, _ = formula(query, key, value, of_output, 0.25)
    whole = causal_gradients(query, key, value, output.to(DTYPE), norms.float(), of_output, 0.25, 2)
    heads = (slice(1, 2), slice(3, 6))
    of_query = (output.to(DTYPE)[heads], norms.float()[heads].contiguous(), of_output[heads])
    part = causal_gradients(query[heads], key[1:, 1:], value[1:, 1:], *of_query, 0.25, 2)
    places = (heads, (slice(1, 2), slice(1, 2)), (slice(1, 2), slice(1, 2)))
    assert all(torch.equal(all_of[at], one) for all_of, at, one in zip(whole, places, part, strict=True))


@only_cuda
@pytest.mark.usefixtures("repeatable_kernels")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_on_cuda_is_the_formula_and_repeats_its_bits(shape):
    query, key, value, of_output = sample(shape)
    exact_output, _, exact = formula(query, key, value, of_output, shape[-1] ** -0.5)
    found = []
    for _ in range(5):
        leaves = [each.clone(memory_format=torch.preserve_format).requires_grad_() for each in (query, key, value)]
        output = fused_attention(*leaves, None, None, 1)
        found.append([output, *torch.autograd.grad(output, leaves, of_output.transpose(1, 2))])
    assert all(torch.equal(a, b) for each in found[1:] for a, b in zip(found[0], each, strict=True))
    assert error(found[0][0].transpose(1, 2), exact_output) < ERROR
    assert max(map(error, found[0][1:], exact)) < ERROR
