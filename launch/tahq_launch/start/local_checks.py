"""Checks of a configuration against this machine, so that a run is not refused at its start.

Files are looked up but not read, devices counted but not opened. Of the machines listed in `hosts:`, only those that
are `local` or at a loopback address count as this one, and not those reached over ssh, which may start in another
folder.
"""

import socket
from collections.abc import Iterator
from pathlib import Path

import torch

from tahq.comm.zmq.addresses import LOOPBACK
from tahq.config.cluster import ClusterConfig
from tahq.data.sources import STDLIB, as_patterns, find_files
from tahq.errors import ConfigError, DataError, ModelError, UserError
from tahq.hub import DATA_FILES, is_hub_name, local_folder, pinned, pinned_data
from tahq_launch.trackers import check_trackers

_CONGESTION_CONTROLS = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
_SUFFIXES: dict[str, str | tuple[str, ...]] = {"text": "", "tokens": ".bin", "records": DATA_FILES}


def check_local(config: ClusterConfig) -> None:
    """Find the data, devices and congestion control that stages on this machine need; UserError if one is missing."""
    check_trackers(config)
    here = set(config.local_stages)
    if isinstance(config.hosts, list):
        here |= {n for n, host in enumerate(config.hosts) if host.ssh is None and host.address.startswith(LOOPBACK)}
    for stage in sorted(here):
        for error in check_stage(config, stage, reads_data=is_end(config, stage)):
            raise error
    if config.hosts == "namespaces" and config.emulate.congestion_control is not None:
        _check_congestion_control(config.emulate.congestion_control)


def files_needed(config: ClusterConfig) -> dict[str, list[str]]:
    """Files that workers read, by key: the model's on all of them, the others on the first and the last stage."""
    model, data = config.model.path, config.data
    needed = {"model.path": [model] if model is not None and not is_hub_name(pinned(model)) else []}
    is_file = data.tokenizer not in ("bytes", model) and not is_hub_name(pinned(data.tokenizer))
    needed["data.tokenizer"] = [data.tokenizer] if is_file else []
    for key, (kind, named) in data.files.items():
        patterns = [each for each in as_patterns(named) if (kind, each) != ("text", STDLIB)]
        needed[key] = [each for each in patterns if not is_hub_name(pinned_data(key, each))]
    return {key: paths for key, paths in needed.items() if paths}


def is_end(config: ClusterConfig, stage: int) -> bool:
    """Whether a stage reads data: the first and the last of a pipeline do."""
    return stage % config.pipeline.stages in (0, config.pipeline.stages - 1)


def check_stage(config: ClusterConfig, stage: int, *, reads_data: bool) -> Iterator[UserError]:
    """What a worker of this stage would miss on this machine: its device, the model's folder, the data."""
    if config.model.path is not None:
        try:
            if not local_folder(config.model.path).is_dir():
                yield ModelError(f"model.path: no such folder: {config.model.path} (relative to {Path.cwd()})")
        except ModelError as error:
            yield error
    try:
        if reads_data:
            for key, (kind, named) in config.data.files.items():
                patterns = [each for each in as_patterns(named) if not is_hub_name(each)]
                if patterns:
                    find_files(patterns, key=key, suffix=_SUFFIXES[kind], stdlib=kind == "text")
    except DataError as error:
        yield error
    try:
        _check_device(config, stage)
    except ConfigError as error:
        yield error


def _check_device(config: ClusterConfig, stage: int) -> None:
    own = config.hosts[stage].device if isinstance(config.hosts, list) else "auto"
    key, name = (f"hosts.{stage}.device", own) if own != "auto" else ("run.device", config.run.device)
    kind, _, index = name.partition(":")
    count = torch.cuda.device_count()
    if kind == "cuda" and int(index or 0) >= count:
        devices = f"cuda:0 to cuda:{count - 1}" if count else "no CUDA device"
        raise ConfigError(f"{key}: {name} is not on this machine, which has {devices}")


def _check_congestion_control(name: str) -> None:
    """Ask the kernel as a socket would: it may load a module for it."""
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
    except FileNotFoundError:
        known = ", ".join(_CONGESTION_CONTROLS.read_text().split())
        raise ConfigError(f"emulate.congestion_control: {name} does not exist; this kernel has {known}") from None
    except PermissionError:  # it exists, for root only
        pass


_MOST_LR, _MOST_LR_OF_A_TRAINED_MODEL = 0.02, 1e-3


def check_reachable(config: ClusterConfig) -> None:
    """Refuse another machine as a host if it cannot reach the coordinator, or a worker on this machine."""
    hosts = [] if isinstance(config.hosts, str) else config.hosts
    remote = [host.address for host in hosts if not (host.local or host.address.startswith(LOOPBACK))]
    if remote and config.run.bind.startswith(LOOPBACK) and config.run.advertise is None:
        raise ConfigError(
            f"run.bind is {config.run.bind}, which {remote[0]} cannot reach; set run.bind to an address and port of "
            "this machine (--set run.bind=192.0.2.1:5555), and run.advertise if hosts reach it under another"
        )
    for stage, host in enumerate(hosts if remote else ()):
        if host.local and host.address.startswith(LOOPBACK) and host.advertise is None:
            raise ConfigError(
                f"hosts.{stage}: {remote[0]} must reach this machine, and its address is not known; set address here, "
                "or set run.bind to that address and a port, such as 192.0.2.1:5555"
            )


def warnings_about(config: ClusterConfig) -> list[str]:
    """Warnings about allowed but dangerous or improbable settings."""
    found, training = list[str](), config.training
    changes_a_trained_model = config.model.path is not None and config.adapter is None
    most = _MOST_LR_OF_A_TRAINED_MODEL if changes_a_trained_model else _MOST_LR
    if training.optimizer not in ("sgd", "ema_sgd") and training.lr > most:
        what = "a model that was trained before" if changes_a_trained_model else training.optimizer
        found.append(f"warning: training.lr {training.lr:g} is high for {what}: above {most:g} losses usually diverge")
    if not (config.security.curve or config.hosts == "namespaces" or config.run.bind.startswith(LOOPBACK)):
        found.append(
            f"warning: security.curve is off, and run.bind is {config.run.bind}: anyone who can reach it, or "
            "a worker's port, can join the run, and anyone on the network path can read and change the traffic"
        )
    return found
