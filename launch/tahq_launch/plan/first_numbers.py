"""The figures that a run is planned with before its first step: from a file, from the cache, or measured now."""

import hashlib
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tahq import __version__
from tahq.config.cluster import ClusterConfig
from tahq.config.file import yaml_flow
from tahq.coordinator.schedule_choice import MEMORY_SHARE
from tahq.data.token_stream import cache_folder
from tahq.errors import ConfigError, UserError
from tahq.memory.free_memory import free_bytes, shares_of_memory
from tahq.models.model_spec import ModelSpec
from tahq.plan.cluster_numbers import ClusterNumbers, LayerTimes
from tahq.plan.measure.measurement import MeasureRequest, in_megabytes
from tahq.plan.problem import divisors
from tahq.quant import CodecSpec
from tahq.units import WRITTEN_BY_HAND
from tahq_launch.command_line import announce
from tahq_launch.plan.measure import measured, write_numbers
from tahq_launch.plan.numbers import check_names, estimated_numbers, read_numbers, stage_device
from tahq_launch.start.launcher import ORDERLY
from tahq_launch.start.prepared_run import StartRequest, stages_by_hand

COMPUTE_S = 4.0
"""After so long no worker times a larger micro-batch."""
STREAM_S = 0.5
"""Shortest duration of a stream between two hosts."""
HOLDS_S = {True: 24 * 3600.0, False: 7 * 24 * 3600.0}
"""How long measurements are used, with paths between hosts and without."""
_MEMORIES = ("memory", "host_memory")
_OF_MACHINE = ("compute", "device", "memory", "host_memory", "host_link", "codecs")
"""Figures of a host that are not those of its links."""
_LOOPBACK_BITS_PER_S = 4e9
"""Between stages of one machine whose links are not shaped: the copies to the host and back count, too. Frames of 6.6
and 52 MB between stages on one H200 were carried at 3.3 Gbit/s."""
_LIGHTEST_CODECS = ("raw:dtype=bf16", "fixed:bits=8")
"""Timed besides those of fewest bits, for all others of the ladders."""


@dataclass(frozen=True, slots=True)
class FirstNumbers:
    """`cluster` has the figures of all hosts, and `origin` says where they are from.

    `cached`: the file that keeps them; None: the user's own has them. `address`: of the coordinator that has just
    measured; empty: none has.
    """

    cluster: ClusterNumbers
    origin: str
    cached: Path | None = None
    address: str = ""


class StoppedError(Exception):
    """The measurement ended with this status before it was complete; its reason has been printed."""

    def __init__(self, exit_status: int) -> None:
        super().__init__(exit_status)
        self.exit_status = exit_status


def first_numbers(
    given: ClusterConfig,
    config: ClusterConfig,
    start: StartRequest,
    needs_codecs: Callable[[ClusterNumbers], bool],
    *,
    measures: bool,
) -> FirstNumbers | None:
    """The figures of a configuration's hosts; None: there are none, and none may be measured.

    Args:
        given: the configuration as read.
        config: the same, resolved.
        start: the command line, for the workers that measure.
        needs_codecs: whether a plan with these figures would need the times of codecs, too.
        measures: as of `first_plan`.

    Raises:
        StoppedError: a worker was lost, or the user stopped the measurement.
    """
    if given.links.measured is not None:
        path = Path(given.links.measured)
        cluster = read_numbers(path)
        check_names(given, cluster, path)
        return FirstNumbers(cluster, f"from {path}")
    by_hand, sizes = stages_by_hand(config, starts_workers=start.starts_workers), open_micro_batches(given)
    has_paths = measures_paths(config, by_hand)
    path = cache_path(config, sizes, has_paths=has_paths)
    found = _cached(path, HOLDS_S[has_paths])
    if not measures:
        return found
    lacks_codecs = found is not None and needs_codecs(_with_unlimited_memory(found.cluster))
    if found is not None and not lacks_codecs and not by_hand and (now := _with_free_memory(found.cluster, config)):
        return replace(found, cluster=now, origin=f"{found.origin}, free memory just now")
    own = () if has_paths else ("hosts=local", "links={}", f"emulate={_sleep_alone(config)}")
    start = replace(start, overrides=(*start.overrides, *own))
    request = _request(config, sizes, has_paths, needs_codecs)
    if found is not None:
        codecs = request.codecs if lacks_codecs else ()
        request = MeasureRequest((), codecs, access=False, paths=False, known=found.cluster)
    cluster, address = _measured(start, request, by_hand)
    if found is None or lacks_codecs:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_numbers(cluster, path, is_complete=True)
    announce("measured; planning")
    origin = f"{found.origin}, free memory just now" if found else "measured just now"
    return FirstNumbers(cluster, origin, path, address)


def measures_paths(config: ClusterConfig, by_hand: frozenset[int]) -> bool:
    """Whether paths between hosts are measured; else the links are those that are configured."""
    return isinstance(config.hosts, list) or bool(by_hand)


def open_micro_batches(given: ClusterConfig) -> tuple[int, ...]:
    """The sizes to choose from."""
    training = given.training
    if "micro_batch" in training.model_fields_set or training.is_fused or given.emulate.sleep is not None:
        return (training.micro_batch,)
    return divisors(training.global_batch // given.pipeline.replicas)


def cache_path(config: ClusterConfig, sizes: Sequence[int], *, has_paths: bool = False) -> Path:
    """The file for the figures of these hosts and this model: whatever they depend on is in its name."""
    parts: dict[str, Any] = {
        "versions": (__version__, torch.__version__, platform.node(), os.cpu_count()),
        "devices": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "sizes": list(sizes),
        "gpu": "alone",
        "paths": has_paths,
        **{
            name: config.model_dump(mode="json")[name]
            for name in ("model", "adapter", "data", "memory", "wire", "hosts")
        },
        "sleep": config.emulate.model_dump(mode="json", include={"sleep"}),
        "training": config.training.model_dump(mode="json", include={"precision", "optimizer"}),
        "run": (config.run.device, config.run.threads),
        "stages": config.pipeline.num_workers,
    }
    if has_paths:  # they are capped by what is imitated, and may need the relay
        parts["relay"] = config.run.relay != "never"
        parts["links"] = config.emulate.model_dump(mode="json", include={"rate", "delay"})
    text = json.dumps(parts, sort_keys=True, default=str)
    return cache_folder() / "measured" / f"{hashlib.blake2b(text.encode(), digest_size=12).hexdigest()}.yaml"


def _cached(path: Path, holds_s: float) -> FirstNumbers | None:
    """Figures that still hold."""
    try:
        age_s = time.time() - path.stat().st_mtime
        if age_s > holds_s:
            return None
        return FirstNumbers(read_numbers(path), f"measured {_ago(age_s)} ({path})", path)
    except (OSError, ConfigError):
        return None


def _ago(age_s: float) -> str:
    for unit, unit_s in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if age_s >= unit_s:
            count = int(age_s / unit_s)
            return f"{count} {unit}{'s' * (count > 1)} ago"
    return "less than a minute ago"


def _request(
    config: ClusterConfig, sizes: Sequence[int], has_paths: bool, needs_codecs: Callable[[ClusterNumbers], bool]
) -> MeasureRequest:
    codecs = (config.wire.activations, config.wire.gradients, *_LIGHTEST_CODECS)
    return MeasureRequest(
        tuple(sizes),
        tuple(dict.fromkeys(str(CodecSpec.parse(codec)) for codec in codecs)),
        seconds=STREAM_S,
        parallel=True,
        access=False,
        paths=has_paths,
        compute_s=COMPUTE_S,
        needs_codecs=needs_codecs,
    )


def _measured(start: StartRequest, request: MeasureRequest, by_hand: frozenset[int]) -> tuple[ClusterNumbers, str]:
    """Have the workers measure; returns the figures, and the coordinator's address."""
    folder = Path(tempfile.mkdtemp(prefix="tahq-measure-"))
    try:
        status, cluster, address = measured(start, request, folder, join_again=by_hand)
    except UserError:
        shutil.rmtree(folder)
        raise
    if status in ORDERLY:
        shutil.rmtree(folder)
    else:
        announce(f"no run was begun; the workers' logs are in {folder}")
    if status > 0 or cluster is None:
        raise StoppedError(status or 1)
    return cluster, address


def completed(
    config: ClusterConfig, spec: ModelSpec, cluster: ClusterNumbers, *, has_paths: bool, is_loopback: bool
) -> ClusterNumbers:
    """The figures with a share of the memory left free, and, on this machine, with its links."""
    cluster = with_share(cluster, MEMORY_SHARE)
    if has_paths:
        return cluster
    configured, _ = estimated_numbers(config, spec)
    links = dict.fromkeys(("up", "down"), _LOOPBACK_BITS_PER_S) if is_loopback else {}
    # stages of one machine are equal, whatever their measurements met
    alike = {} if config.emulate.sleep else {"compute": _of_one_machine([host.compute for host in cluster.hosts])}
    merged = [
        host.model_copy(update={key: getattr(own, key) for key in _OF_MACHINE} | alike | links)
        for host, own in zip(configured.hosts, cluster.hosts, strict=True)
    ]
    return configured.model_copy(update={"hosts": merged})


def _of_one_machine(hosts: Sequence[Sequence[LayerTimes]]) -> list[LayerTimes]:
    """The medians over workers that measured the same at the same time."""
    rows = []
    for times in zip(*hosts, strict=False):
        values = [each.model_dump() for each in times]
        keys = {key for key in values[0] if key not in ("micro_batch", "block_activation_bytes")}
        medians = {key: statistics.median(row[key] for row in values) for key in keys if values[0][key] is not None}
        rows.append(times[0].model_copy(update=medians))
    return rows


def _with_free_memory(cluster: ClusterNumbers, config: ClusterConfig) -> ClusterNumbers | None:
    """The figures of workers, each with its share of the memory that is free now; None: that takes workers to tell."""
    devices = [stage_device(config, stage) for stage in range(config.pipeline.num_workers)]
    if not isinstance(config.hosts, str) or (shares := shares_of_memory(devices)) is None:
        return None
    on_host = in_megabytes(free_bytes(torch.device("cpu")) // len(devices))
    hosts = [
        host.model_copy(update={"memory": in_megabytes(share), "host_memory": host.host_memory and on_host})
        for host, share in zip(cluster.hosts, shares, strict=True)
    ]
    return cluster.model_copy(update={"hosts": hosts})


def _sleep_alone(config: ClusterConfig) -> str:
    """`emulate` without its network, as an override."""
    return yaml_flow(config.emulate.model_dump(mode="json", context=WRITTEN_BY_HAND, include={"sleep"}))


def with_share(cluster: ClusterNumbers, share: float) -> ClusterNumbers:
    """The figures with this share of each host's memory."""
    hosts = [
        host.model_copy(update={key: int(share * (getattr(host, key) or 0)) or None for key in _MEMORIES})
        for host in cluster.hosts
    ]
    return cluster.model_copy(update={"hosts": hosts})


def _with_unlimited_memory(cluster: ClusterNumbers) -> ClusterNumbers:
    hosts = [host.model_copy(update=dict.fromkeys(_MEMORIES)) for host in cluster.hosts]
    return cluster.model_copy(update={"hosts": hosts})
