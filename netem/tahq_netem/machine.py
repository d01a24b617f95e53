"""What a result was measured on: versions and hardware, fit for JSON."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from tahq import __version__

_PACKAGES = ("torch", "numpy", "numba", "triton", "pyzmq", "pyroute2", "transformers")


def describe_machine(device: str) -> dict[str, Any]:
    """Processor, cores, kernel, versions and, where stages compute on CUDA, the accelerators."""
    found: dict[str, Any] = {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "tahq": __version__,
    }
    versions = {name: _version(name) for name in _PACKAGES}
    found |= {name: text for name, text in versions.items() if text is not None}
    if device != "cpu" and torch.cuda.is_available():
        found["accelerators"] = f"{torch.cuda.device_count()} × {torch.cuda.get_device_name(0)}"
    return found


def one_line(machine: dict[str, Any]) -> str:
    """The same for the head of a table."""
    accelerators = f"{machine['accelerators']}; " if "accelerators" in machine else ""
    return (
        f"{accelerators}{machine['processor']}, {machine['cores']} cores, Linux {machine['kernel']}, "
        f"Python {machine['python']}, torch {machine.get('torch', '?')}"
    )


def processor() -> str:
    """The processor's own name, as the kernel has it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
