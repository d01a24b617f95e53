"""The loss of a micro-batch, as a sum, so that a step's loss does not depend on how it was divided."""

import math

import torch
from torch.nn import functional

IGNORED_LABEL = -100


def summed_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum over the labelled tokens of −log softmax(logits)[label], in nats, computed in fp32.

    The caller divides by the token count of the whole step, which it knows beforehand; the mean of
    micro-batch means would weigh tokens by how many others share their micro-batch.

    Args:
        logits: [B, S, V], any float dtype.
        labels: [B, S] int64; `IGNORED_LABEL` where there is no loss. Already shifted: labels[b, s]
            is what logits[b, s] should predict.

    Returns:
        A scalar fp32 tensor.
    """
    return functional.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
    )


def gradient_scale(num_tokens: int) -> float:
    """What gradients are multiplied by from the loss until the last backward of a step: a power of two, ≥ num_tokens.

    The gradient of a mean over 32,768 tokens has elements of 2e-8 after 30 steps of GPT-2, and fp16's smallest step is
    6e-8: nine tenths of it were lost on a wire of fp16 and the run diverged (experiment log). Times this it is
    that of a mean over 1 to 2 tokens, and fits. Multiplying by a power of two rounds nothing in fp32 and bf16, so that
    no other run's bits depend on it.

    Args:
        num_tokens: of the whole step, equal on every stage; ≥ 1.
    """
    return math.ldexp(1.0, (num_tokens - 1).bit_length())
