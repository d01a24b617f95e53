"""What a dry run looks for on this machine, so that a run is not refused for it at its start.

Files are found and not read, devices counted and not opened. Of machines that are listed in `hosts:` only those count
as this one that are at a loopback address and not reached over ssh, which may begin in another folder.
"""

import socket
from pathlib import Path

import torch

from tahq.config.cluster import ClusterConfig
from tahq.data.sources import as_patterns, find_files
from tahq.errors import ConfigError

_LOOPBACK = ("127.", "localhost", "::1")
_AVAILABLE = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
_SUFFIXES = {"text": "", "tokens": ".bin", "jsonl": ".jsonl"}


def check_local(config: ClusterConfig) -> None:
    """Look for the data, the devices and the congestion control that a run names, as far as they are to be here.

    Raises:
        DataError: there are no such files.
        ConfigError: a device or a congestion control that this machine does not have.
    """
    here = [stage for stage in range(config.pipeline.stages) if _is_here(config, stage)]
    if {0, config.pipeline.stages - 1} & set(here):
        _check_data(config)
    for stage in here:
        _check_device(config, stage)
    if config.hosts == "namespaces":
        _check_congestion_control(config.links.congestion_control)


def _is_here(config: ClusterConfig, stage: int) -> bool:
    if isinstance(config.hosts, str):
        return True
    host = config.hosts[stage]
    return host.ssh is None and host.address.startswith(_LOOPBACK)


def _check_data(config: ClusterConfig) -> None:
    for key, suffix in _SUFFIXES.items():
        named = getattr(config.data, key)
        if named is not None:
            find_files(as_patterns(named), key=f"data.{key}", suffix=suffix, stdlib=key == "text")


def _check_device(config: ClusterConfig, stage: int) -> None:
    own = config.hosts[stage].device if isinstance(config.hosts, list) else "auto"
    key, name = (f"hosts.{stage}.device", own) if own != "auto" else ("run.device", config.run.device)
    kind, _, index = name.partition(":")
    if kind != "cuda":
        return
    count = torch.cuda.device_count()
    if int(index or 0) >= count:
        there = f"cuda:0 to cuda:{count - 1}" if count else "no CUDA device"
        raise ConfigError(f"{key}: {name} is not on this machine, which has {there}")


def _check_congestion_control(name: str | None) -> None:
    """Ask the kernel as a socket would: it may load a module for it."""
    if name is None:
        return
    try:
        with socket.socket() as one:
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
    except FileNotFoundError:
        known = ", ".join(_AVAILABLE.read_text().split())
        raise ConfigError(f"links.congestion_control: there is no {name}; this kernel has {known}") from None
    except PermissionError:  # it is there, and for root alone
        pass
