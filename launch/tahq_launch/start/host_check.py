"""What `tahq check-host` finds out on a host that ssh reaches, before a worker is started there.

Requests come on stdin and replies go to stdout, one JSON object per line, each reply after `MARK`:

1. {version, config, stage, checkpoint_nbytes} → {faults, seen_from, dialled}: what is wrong here, the address that the
   caller has from here, and where this host listens from now on, "" if it can only dial out;
2. {dial: {name: host:port}} → {unreachable: {name: reason}}.

A fault is [what is wrong, what to do].
"""

import contextlib
import json
import os
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tahq import __version__
from tahq.version import is_same_source

if TYPE_CHECKING:
    from tahq.config.cluster import ClusterConfig

MARK: Final = "tahq-check-host "
DIAL_TIMEOUT_S: Final = 5.0


def check_host() -> int:
    """Answer both requests; exit status 0 whatever was found."""
    request = json.loads(sys.stdin.readline())
    client = os.environ.get("SSH_CONNECTION", "").partition(" ")[0]
    if not is_same_source(request["version"], __version__):  # it may not know the configuration's keys
        fault = (f"tahq {__version__} is installed there, {request['version']} here", "install the same version")
        _reply({"faults": [fault], "seen_from": client, "dialled": ""})
        return 0
    from tahq.config.file import config_from_json
    from tahq.worker.links import free_bind

    config, stage = config_from_json(request["config"]), request["stage"]
    assert isinstance(config.hosts, list), "only listed hosts are reached by ssh"
    host, bind = config.hosts[stage], free_bind(config, stage)
    faults = [*_missing(config, stage), *_disk(Path(config.run.dir), stage, request["checkpoint_nbytes"])]
    with contextlib.ExitStack() as stack:
        dialled = ""
        try:
            dialled = stack.enter_context(_listening(bind, host.advertise, host.address))
        except OSError as error:
            faults.append(
                (
                    f"cannot listen on {bind}: {os.strerror(error.errno or 0)}",
                    f"end what listens there, or set hosts.{stage}.bind to another port",
                )
            )
        _reply({"faults": faults, "seen_from": client, "dialled": dialled})
        tried = {name: dial_failure(address) for name, address in json.loads(sys.stdin.readline())["dial"].items()}
        _reply({"unreachable": {name: reason for name, reason in tried.items() if reason}})
    return 0


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


def _missing(config: "ClusterConfig", stage: int) -> Iterator[tuple[str, str]]:
    from tahq.errors import DataError, ModelError
    from tahq_launch.start.local_checks import check_stage

    for error in check_stage(config, stage):
        is_file = isinstance(error, DataError | ModelError)
        yield str(error), "copy it there, or correct the key" if is_file else "correct the key"


def _disk(runs: Path, stage: int, needed_nbytes: int) -> Iterator[tuple[str, str]]:
    """Whether checkpoints can be written, and fit."""
    from tahq.units import format_size

    there = next(folder for folder in (runs.absolute(), *runs.absolute().parents) if folder.is_dir())
    if not os.access(there, os.W_OK):
        yield f"{there} cannot be written to", f"set hosts.{stage}.workdir to a folder of this account"
    elif (free := shutil.disk_usage(there).free) < needed_nbytes:
        yield (
            f"checkpoints take {format_size(needed_nbytes)}, {there} has {format_size(free)} free",
            f"free some, or set hosts.{stage}.workdir to a folder on another disk",
        )


@contextlib.contextmanager
def _listening(bind: str, advertise: str | None, address: str) -> Iterator[str]:
    """Listen as the worker would; yields the address that neighbours dial."""
    from tahq.comm.zmq.addresses import advertised_address, format_address, parse_address

    name, port = parse_address(bind, "bind")
    family = socket.AF_INET6 if ":" in name else socket.AF_INET
    with socket.create_server((name, port), family=family) as server:
        yield advertised_address(bind, server.getsockname()[1], advertise or format_address(address, 0))


def _reply(values: Mapping[str, Any]) -> None:
    print(MARK + json.dumps(values), flush=True)
