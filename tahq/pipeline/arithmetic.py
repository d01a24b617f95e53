"""What the bits of a stage's results depend on beside the configuration: its processor, its libraries, its threads.

A snapshot says of each stage what computed it. A stage that is continued by something else goes on as well, and rounds
otherwise sooner or later; so the difference is announced.
"""

import platform
from collections.abc import Mapping
from pathlib import Path

import torch

CPU_INFO = Path("/proc/cpuinfo")


def arithmetic_of(device: torch.device, codec_backend: str) -> dict[str, str]:
    """What computes here, as a snapshot keeps it: short texts by name.

    Args:
        device: where the stage computes.
        codec_backend: `wire.backend`; `auto` stands for the device's own.
    """
    own = "triton" if device.type == "cuda" else "cpu"
    common = {"torch": str(torch.__version__), "codec backend": own if codec_backend == "auto" else codec_backend}
    return common | (_of_gpu(device) if device.type == "cuda" else _of_cpu())


def arithmetic_differences(before: Mapping[str, str], now: Mapping[str, str]) -> tuple[str, ...]:
    """What is another than it was, one text each: ``device: AMD EPYC 7B13 -> Intel Xeon 8481C``.

    Names that one side does not have are what another version of tahq, or another kind of device, knows
    nothing about, and are passed over; of another kind of device the name differs in any case.

    Args:
        before: `arithmetic_of` where the snapshot was written; empty: not known.
        now: here.

    Returns:
        Nothing, if equal operations give equal bits as far as can be told.
    """
    common = (name for name in before if name in now)
    return tuple(f"{name}: {before[name]} -> {now[name]}" for name in common if before[name] != now[name])


def _of_gpu(device: torch.device) -> dict[str, str]:
    return {
        "device": torch.cuda.get_device_name(device),
        "CUDA": str(torch.version.cuda),
        "cuDNN": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
    }


def _of_cpu() -> dict[str, str]:
    return {
        "device": _cpu_model(),
        "vector instructions": torch.backends.cpu.get_cpu_capability(),
        "matrix library": "MKL" if torch.backends.mkl.is_available() else "other",  # type: ignore[no-untyped-call]
        "threads": str(torch.get_num_threads()),
    }


def _cpu_model() -> str:
    """As the kernel calls it; the architecture where it does not say."""
    try:
        lines = CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()
