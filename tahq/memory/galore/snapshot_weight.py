"""A weight as a snapshot has it, in fp32 whatever it was trained in."""

from collections.abc import Callable

import torch

from tahq.memory.galore.int8_weight import Int8Weight


def snapshot_weight(name: str, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
    """A model's weight from a snapshot.

    Args:
        name: canonical.
        read: a tensor by its name in the snapshot, such as `model/<name>`.
    """
    stored = read(f"model/{name}")
    if stored.dtype != torch.int8:
        return stored.float()
    weight = Int8Weight(tuple(stored.shape), stored.device)
    for folder, tensor in weight.tensors().items():
        tensor.copy_(stored if folder == "model" else read(f"{folder}/{name}"))
    return weight.decoded(torch.float32)
