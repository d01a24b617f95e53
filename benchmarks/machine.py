"""What a result was measured on: one line, for the head of every result file."""

import os
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch


def processor() -> str:
    """The processor's own name, as the kernel has it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def describe() -> str:
    """Processor, cores, versions and date."""
    today = datetime.now(UTC).date().isoformat()
    return (
        f"{processor()}, {os.cpu_count()} cores, Linux {platform.release()}, "
        f"Python {platform.python_version()}, torch {torch.__version__}, {today}"
    )


def describe_device() -> str:
    """As `describe`, with the accelerators where there are any."""
    count = torch.cuda.device_count()
    return f"{count} × {torch.cuda.get_device_name(0)}; {describe()}" if count else describe()


def need_gpu(device: str = "cuda") -> None:
    """End the program with status 2 where it is to run on a GPU (`auto` too), and there is none."""
    if device != "cpu" and not torch.cuda.is_available():
        print(
            f"{Path(sys.argv[0]).name}: there is no CUDA device here; its first lines say what it needs",
            file=sys.stderr,
        )
        sys.exit(2)
