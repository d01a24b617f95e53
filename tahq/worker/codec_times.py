"""How long a device takes to encode and decode, for an element of a tensor.

What is timed is what a boundary does: from the tensor on its device to bytes in the host's memory, and back.
"""

from collections.abc import Sequence
from typing import Any

import torch

from tahq.pipeline.boundary import BOUNDARY_DTYPE
from tahq.quant import get_codec
from tahq.quant.config import WireConfig
from tahq.worker.stopwatch import Timer

_DRAWS = 3


def seconds_per_element(spec: str, wire: WireConfig, shape: Sequence[int], device: torch.device) -> tuple[float, float]:
    """Seconds to encode and to decode, each divided by the elements; medians, kernels loaded before.

    A codec that remembers samples is timed on samples that it has seen.

    Args:
        spec: the codec.
        wire: its backend and threads.
        shape: of the tensors, [B, S, C]; normal, with channels of different size, as activations are.
        device: where.

    Raises:
        CodecError: it does not run here, or not on such tensors.
    """
    codec = get_codec(spec, backend=wire.backend, threads=wire.threads)
    codec.prepare(shape, BOUNDARY_DTYPE, device)
    generator = torch.Generator("cpu").manual_seed(0)
    scales = torch.rand(shape[-1], generator=generator) * 3 + 0.1
    x = (torch.randn(*shape, generator=generator) * scales).to(device)
    samples: dict[str, Any] = {"sample_ids": range(shape[0])} if codec.is_stateful else {}
    timer = Timer(device)

    def lap() -> tuple[float, float]:
        start_s = timer.now_s()
        payload = codec.encode(x, key=1, **samples).cpu()
        encoded_s = timer.now_s()
        codec.decode(payload.to(device), shape, BOUNDARY_DTYPE, key=1, **samples)
        return encoded_s - start_s, timer.now_s() - encoded_s

    if codec.is_stateful:
        lap()
    encode_s, decode_s = timer.medians_s(lap)
    return encode_s / x.numel(), decode_s / x.numel()
