"""Where a worker begins its stage again: at the newest snapshot that it has, or can get.

In this order: the newest complete snapshot, from this host's disk or from whoever has a copy; then the older one, of
which a copy exists off every stage's host. A run that has no snapshot yet begins anew anywhere.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from tahq.comm.control.messages import Assign
from tahq.errors import PeerLostError, RemoteProtocolError, UserError
from tahq.pipeline.checkpoint.fetched_file import fetch_file, has_file

_log = logging.getLogger(__name__)

Fetch = Callable[[str, str, str, int], Iterator[bytes]]
"""(address of who has it, its public key, SHA-256, offset) -> the bytes of the file from there on."""


def restored(assign: Assign, run_folder: Path, num_stages: int, fetch: Fetch, working: Callable[[str], None]) -> Assign:
    """The assignment with the snapshot to begin at, whose file is on this disk when this returns.

    Args:
        assign: as the coordinator sent it.
        run_folder: on this host.
        num_stages: of the run.
        fetch: see there; raises PeerLostError or RemoteProtocolError.
        working: told what is being done.

    Raises:
        PeerLostError: nobody has this stage's file; the message names it.
        SnapshotError: the disk does not take it.
    """
    reasons: list[str] = []
    for candidate in _candidates(assign):
        name = own_file(candidate, num_stages)
        if name is None or _is_here(candidate, name, run_folder, fetch, working, reasons):
            return candidate
        reasons.append(f"{name} is missing or damaged on this host")
    raise PeerLostError(
        f"stage {assign.stage} cannot begin again: {'; '.join(dict.fromkeys(reasons))}; no other host has a copy"
    )


def own_file(assign: Assign, num_stages: int) -> str | None:
    """The stage's file in the snapshot; None: there is none, or other stages wrote it (its tensors are looked for)."""
    if not assign.snapshot or len(assign.snapshot_files) != num_stages:
        return None
    mine = [name for name in assign.snapshot_files if name.startswith(f"stage-{assign.stage:03d}-")]
    return mine[0] if mine and Path(mine[0]).name == mine[0] else None


def _candidates(assign: Assign) -> Iterator[Assign]:
    yield assign
    if assign.copied_step >= 0:
        yield replace(
            assign,
            snapshot=assign.copied_snapshot,
            snapshot_files=assign.copied_files,
            start_step=assign.copied_step,
        )


def _is_here(
    assign: Assign, name: str, run_folder: Path, fetch: Fetch, working: Callable[[str], None], reasons: list[str]
) -> bool:
    path, sha256 = run_folder / assign.snapshot / name, assign.snapshot_files[name]
    if has_file(path, sha256):
        return True
    for step, address, key in assign.sources:
        if step != assign.start_step:
            continue
        working(f"fetching {name}")
        _log.info("fetching %s from %s", name, address)
        try:
            return fetch_file(path, sha256, partial(fetch, str(address), str(key), sha256))
        except (PeerLostError, RemoteProtocolError, UserError) as error:
            _log.warning("%s", error)
            reasons.append(str(error))
    return False
