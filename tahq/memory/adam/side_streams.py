"""Kernels on tensors that have nothing to do with each other, dealt out to a few streams of their device.

In one stream, a kernel begins when the last program of the one before has ended, and the device is half empty in
between: with a hundred tensors of some millions of elements, a quarter of the time.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch

STREAMS = 3
"""The caller's, and others beside it."""
Job = tuple[torch.Tensor, Callable[[], None]]
"""The tensor by whose size and device a job is dealt out, and the job."""


def run_side_by_side(jobs: Sequence[Job], streams: int = STREAMS) -> None:
    """Run jobs, those on a CUDA device on several streams; what the caller launches afterwards waits for all of them.

    The host waits for nothing. What a job allocates, it must not hand on.
    """
    devices = sorted({tensor.device for tensor, _ in jobs}, key=str)
    for device in devices:
        here = [job for job in jobs if job[0].device == device]
        if device.type == "cuda" and len(here) > 1 and streams > 1:
            _run_on_streams(here, device, min(streams, len(here)))
        else:
            for _, run in here:
                run()


def _run_on_streams(jobs: Sequence[Job], device: torch.device, count: int) -> None:
    current = torch.cuda.current_stream(device)
    for number, part in enumerate(_dealt_out(jobs, count)):
        if number == 0:
            own = part
            continue
        stream = _side_stream(device, number)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _, run in part:
                run()
    for _, run in own:
        run()
    for number in range(1, count):
        current.wait_stream(_side_stream(device, number))


def _dealt_out(jobs: Sequence[Job], count: int) -> list[list[Job]]:
    """The largest first, each to who has least."""
    parts: list[list[Job]] = [[] for _ in range(count)]
    loads = [0] * count
    for job in sorted(jobs, key=lambda job: -job[0].numel()):
        least = loads.index(min(loads))
        parts[least].append(job)
        loads[least] += job[0].numel()
    return parts


@lru_cache(maxsize=64)
def _side_stream(device: torch.device, number: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
