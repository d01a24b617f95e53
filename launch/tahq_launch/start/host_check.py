"""What `tahq check-host` finds out on a host that ssh reaches, before a worker is started there.

Requests come on stdin and replies go to stdout, one JSON object per line, each reply after `MARK`. A request has one
key, its kind:

- version: the caller's → {version, seen_from}: this one's, and the address that the caller has from here;
- stage: {config, stage, run, checkpoint_nbytes, is_deep, any_is_end} → {findings, dialled, device, free_nbytes}: all
  that was checked, and where this host listens from now on, "" if it can only dial out; if deep, also the machine's own
  checks, and the free memory of the device;
- clock: → {now_s};
- dial: {name: host:port} → {unreachable: {name: reason}};
- measure: [stage, host:port] → {round_trip_s, sent, received} in bits per second, or {failure}.
"""

import contextlib
import json
import os
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tahq import __version__
from tahq_launch.start.machine_checks import Finding, fault, key_file, machine_checks, warning

if TYPE_CHECKING:
    from tahq.comm.config import MachineConfig
    from tahq.config.cluster import ClusterConfig

MARK: Final = "tahq-check-host "
DIAL_TIMEOUT_S: Final = 5.0
STREAM_S: Final = 1.0
"""Longest stream between two hosts, in each direction; it ends earlier once its rate has settled."""
_TRIPS: Final = 10


def check_host() -> int:
    """Answer requests until there are no more; exit status 0 whatever was found."""
    with contextlib.ExitStack() as stack:
        answers = _HostCheck(stack).answers
        for line in sys.stdin:
            ((kind, given),) = json.loads(line).items()
            print(MARK + json.dumps(answers[kind](given)), flush=True)
            if kind == "version":
                import_heavy()
    return 0


def import_heavy() -> None:
    """Import what the next requests need, while the caller prepares them."""
    for module in ("tahq.worker.links", "tahq_launch.start.local_checks", "tahq_launch.plan.numbers"):
        import_module(module)


class _HostCheck:
    """The answers, and the port that this host listens on from the second one until the stack is closed."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._run = self._stage = 0
        self.answers: Mapping[str, Callable[[Any], Mapping[str, Any]]] = {
            "version": self._version,
            "stage": self._checked_stage,
            "clock": lambda _: {"now_s": time.time()},
            "dial": lambda named: {"unreachable": {name: why for name in named if (why := dial_failure(named[name]))}},
            "measure": self._measured,
        }

    def _version(self, _: str) -> Mapping[str, Any]:
        return {"version": __version__, "seen_from": _client()}

    def _checked_stage(self, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        from tahq.config.file import config_from_json
        from tahq_launch.plan.numbers import stage_device

        config = config_from_json(asked["config"])
        self._run, self._stage = asked["run"], asked["stage"]
        findings = list(stage_checks(config, self._stage, asked["checkpoint_nbytes"], any_is_end=asked["any_is_end"]))
        reply = {"device": "", "free_nbytes": 0, "dialled": self._listen(config, findings)}
        if asked["is_deep"]:
            from tahq.comm.keys import default_key_path
            from tahq.memory.free_memory import free_bytes

            device = stage_device(config, self._stage)
            findings += machine_checks(str(device), _client() or "127.0.0.1")
            key, none = default_key_path(), "none; only workers that are started by hand need one"
            has_key = key.exists()
            findings.append(
                key_file(key, is_needed=False) if has_key else Finding(check="key", found=none, fix="copy-key")
            )
            if not any(each.check in ("device", "GPU") and each.level == "fault" for each in findings):
                reply |= {"device": device.type, "free_nbytes": free_bytes(device)}
        return {**reply, "findings": [asdict(finding) for finding in findings]}

    def _listen(self, config: "ClusterConfig", findings: list[Finding]) -> str:
        """Listen as the worker would; returns the address that neighbours dial."""
        from tahq.comm.zmq.addresses import format_address
        from tahq.errors import UserError
        from tahq.plan.measure.meter import MeterServer
        from tahq.worker.links import free_bind

        assert isinstance(config.hosts, list), "only listed hosts are reached by ssh"
        host, bind = config.hosts[self._stage], free_bind(config, self._stage)
        try:
            server = MeterServer(self._run, self._stage, bind, host.advertise or format_address(host.address, 0))
        except UserError as error:
            remedy = f"end what listens there (ss -ltnp), or set hosts.{self._stage}.bind to another port"
            what = str(error).removeprefix("bind: ").partition(" (while")[0]  # which Python appends
            findings.append(fault("port", what, remedy))
            return ""
        self._stack.callback(server.close)
        findings.append(Finding(check="port", found=f"listens on {bind}, dialled as {server.address or 'nothing'}"))
        return server.address

    def _measured(self, peer: tuple[int, str]) -> Mapping[str, Any]:
        from tahq.errors import TahqError
        from tahq.plan.measure.meter import Meter, Peer
        from tahq.plan.measure.meter_wire import WINDOW_S, Kind, MeterRequest

        meter, (stage, address) = Meter(self._run, self._stage), peer
        other = Peer(stage, f"stage {stage}", address)
        try:
            trip_s = meter.round_trip_s(other, _TRIPS)
            window_s = max(WINDOW_S, trip_s)
            sent, received = (
                meter.rates([other], [MeterRequest(kind, window_s, STREAM_S / 2, STREAM_S)])[0]
                for kind in (Kind.TAKE, Kind.GIVE)
            )
        except TahqError as error:
            return {"failure": str(error)}
        return {"round_trip_s": trip_s, "sent": sent, "received": received}


def _client() -> str:
    return os.environ.get("SSH_CONNECTION", "").partition(" ")[0]


def dial_failure(address: str) -> str:
    """Why host:port cannot be dialled from this machine; empty if it can."""
    from tahq.comm.zmq.addresses import parse_address

    try:
        socket.create_connection(parse_address(address, "host"), DIAL_TIMEOUT_S).close()
    except TimeoutError:
        return f"no answer in {DIAL_TIMEOUT_S:.0f} s"
    except OSError as error:
        return str(error.strerror or error)
    return ""


def stage_checks(
    config: "ClusterConfig", stage: int, checkpoint_nbytes: int, *, any_is_end: bool = False
) -> Iterator[Finding]:
    """What a worker of this stage needs on this machine: its device, the model, the data, room for checkpoints.

    `any_is_end`: a plan may put this machine at an end of the pipeline, where it reads data.
    """
    from tahq.config.stage_estimate import lacks_bf16
    from tahq.errors import DataError, ModelError
    from tahq.hub import is_hub_name
    from tahq_launch.plan.numbers import stage_device
    from tahq_launch.start.local_checks import check_stage, is_end

    host = config.hosts[stage] if isinstance(config.hosts, list) else None
    missing = set[str]()
    reads_data = any_is_end or is_end(config, stage)
    for error in check_stage(config, stage, reads_data=reads_data):
        if isinstance(error, ModelError):
            missing.add("model")
            path = config.model.path or ""
            if is_hub_name(path):
                yield fault("model", str(error), "give that host access to the Hub, or correct model.path")
            else:
                remedy = copy_command(host, [path])
                yield fault("model", str(error), f"{remedy}, or correct model.path", fix="copy-model")
        elif isinstance(error, DataError):
            missing.add("data")
            yield fault(
                "data", str(error), f"{copy_command(host, data_paths(config))}, or correct the key", fix="copy-data"
            )
        else:
            missing.add("device")
            key = "run" if host is None or host.device == "auto" else f"hosts.{stage}"
            yield fault("device", str(error), f"nvidia-smi there, or set {key}.device: cpu", wanted="a GPU")
    if config.training.precision == "bf16" and "device" not in missing and lacks_bf16(stage_device(config, stage)):
        found = "training.precision is bf16, which this GPU only emulates"
        yield warning("precision", found, "set training.precision: fp16, which is faster there")
    yield _disk(Path(config.run.dir), "run.dir" if host is None else f"hosts.{stage}.workdir", checkpoint_nbytes)
    if "model" not in missing and config.model.path is not None:
        yield Finding(check="model", found=config.model.path)
    if "data" not in missing and reads_data:
        yield Finding(check="data", found=", ".join(data_paths(config)))


def data_paths(config: "ClusterConfig") -> list[str]:
    """The files, folders and globs that `data` names."""
    from tahq.data.sources import as_patterns
    from tahq.hub import is_hub_name

    paths = [path for _, named in config.data.files.values() for path in as_patterns(named)]
    return [path for path in paths if not is_hub_name(path)]


def copy_command(host: "MachineConfig | None", paths: list[str]) -> str:
    """The command that copies files or folders from the launching machine to the same place on a host."""
    if host is None:
        return f"copy {' '.join(paths)} there"
    return f"tar -chf - {' '.join(paths)} | {ssh_words(host)} tar -xf - -C {shlex.quote(place_of(host, paths))}"


def place_of(host: "MachineConfig", paths: list[str]) -> str:
    """The folder on a host that the paths are relative to; tar leaves out the leading slash of absolute ones."""
    return "/" if any(path.startswith("/") for path in paths) else (host.workdir or ".").removeprefix("~/")


def ssh_words(host: "MachineConfig") -> str:
    """ssh to a host, as a person types it."""
    return shlex.join(["ssh", *host.ssh_options, str(host.ssh)])


def _disk(runs: Path, key: str, needed_nbytes: int) -> Finding:
    """Whether checkpoints can be written, and fit."""
    from tahq.units import format_size

    there = next(folder for folder in (runs.absolute(), *runs.absolute().parents) if folder.is_dir())
    free, wanted = shutil.disk_usage(there).free, f"{format_size(needed_nbytes)} for checkpoints"
    if not os.access(there, os.W_OK):
        return fault("disk", f"{there} cannot be written to", f"set {key} to a folder of this account", wanted=wanted)
    if free >= needed_nbytes:
        return Finding(check="disk", found=f"{there}, {format_size(free)} free", wanted=wanted)
    what = f"checkpoints take {format_size(needed_nbytes)}, {there} has {format_size(free)} free"
    remedy = f"du -xsh {there}/* | sort -h, and remove some, or set {key} to a folder on another disk"
    return fault("disk", what, remedy, wanted=wanted)
