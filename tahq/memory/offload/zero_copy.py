"""Whether a step's kernels read moments in host memory directly, or get them lent: the faster one on this machine.

LLMQ §3.1 found either to be faster, depending on the GPU. Both give the same bits.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from tahq.memory.adam.loop import AdamwLoop
from tahq.memory.offload.host_memory import HostMemory, lent
from tahq.memory.offload.host_part import HostPart

_NUM, _NUMEL, _LAPS = 6, 1 << 22, 3

log = logging.getLogger(__name__)


def zero_copy_is_faster(build: Callable[[Mapping[str, Parameter]], Optimizer], device: torch.device) -> bool:
    """Time a few steps of each on parameters of 4 million elements; `build` makes the optimizer of some parameters."""
    lent_s, in_place_s = (_step_s(build, device, in_place=in_place) for in_place in (False, True))
    log.info(
        "moments in host memory: %.3g weights/s where they are lent to the device, %.3g where kernels read them there",
        *(_NUM * _NUMEL / step_s for step_s in (lent_s, in_place_s)),
    )
    return in_place_s < lent_s


def _step_s(build: Callable[[Mapping[str, Parameter]], Optimizer], device: torch.device, *, in_place: bool) -> float:
    """Seconds of the fastest of some steps."""
    memory = HostMemory(device)
    parameters = [Parameter(torch.zeros(_NUMEL, device=device)) for _ in range(_NUM)]
    optimizer = build({str(number): parameter for number, parameter in enumerate(parameters)})
    assert isinstance(optimizer, AdamwLoop)
    hosts = [HostPart(parameter, ("m", "v"), memory) for parameter in parameters]
    for parameter, host in zip(parameters, hosts, strict=True):
        states = optimizer.states_of(parameter)
        host.take_states(states)
        if in_place:
            host.use_in_place(states)
    gradient = torch.zeros(_NUMEL, device=device)
    _lap(optimizer, parameters, hosts, gradient)  # compiles
    return min(_lap(optimizer, parameters, hosts, gradient) for _ in range(_LAPS))


def _lap(
    optimizer: AdamwLoop, parameters: Sequence[Parameter], hosts: Sequence[HostPart], gradient: torch.Tensor
) -> float:
    torch.cuda.synchronize(gradient.device)
    begin_s = time.perf_counter()
    for _, parameter in zip(lent(host.loans() for host in hosts), parameters, strict=True):
        parameter.grad = gradient
        optimizer.step()
        parameter.grad = None
    torch.cuda.synchronize(gradient.device)
    return time.perf_counter() - begin_s
