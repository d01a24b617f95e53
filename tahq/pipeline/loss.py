"""The loss of a micro-batch, as a sum, so that a step's loss does not depend on how it was divided."""

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
