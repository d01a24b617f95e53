"""`tahq pull`: files of a run's checkpoints, from the disks of its hosts, where each stage has written its own.

A file comes over ssh from its stage's host, or from another host that keeps a copy. From a host without ssh it comes
over a link to its worker, while the run is live; before the run ends its launcher fetches these files (`collected`).
A file grows under another name, from which a later call continues, and has its own name once its SHA-256 is the
manifest's.
"""

import json
import shlex
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from tahq.comm.config import MachineConfig
from tahq.comm.keys import default_key_path, read_key_file
from tahq.config.cluster import ClusterConfig
from tahq.config.file import config_from_json, load_config
from tahq.errors import PeerLostError, RemoteProtocolError, SnapshotError, TahqError, UserError
from tahq.observe import figures
from tahq.pipeline.checkpoint.copies import Pieces, fetch_file, has_file
from tahq.pipeline.checkpoint.manifest import (
    LATEST,
    Manifest,
    StageFile,
    best_folder,
    latest_folder,
    read_latest,
    read_manifest,
    snapshot_folders,
)
from tahq.units import format_size
from tahq_launch.command_line import progress_of
from tahq_launch.runs.at_address import WorkerFiles
from tahq_launch.runs.found import writer_of
from tahq_launch.start.host_talk import ssh_fault
from tahq_launch.start.run_folder import RunFolder
from tahq_launch.start.worker_command import local_peer, ssh_in_folder

_AT_ONCE = 8
_PIECE_NBYTES = 1 << 20
_NOT_THERE = 66
"""Exit status of the script on a host that has no such file."""


Which = int | Literal["best"] | None
"""A checkpoint: after so many steps, with the lowest validation loss, or (None) the newest."""


def checkpoint_of(run: Path, step: Which) -> tuple[Path, Manifest]:
    """Folder and manifest of a run's checkpoint.

    Raises:
        UserError: the run or the checkpoint does not exist.
    """
    folder = RunFolder(run)
    if not run.is_dir():
        raise UserError(f"{run} is not a run's folder; expected a folder such as runs/demo")
    if step is None and (folder.snapshots / LATEST).exists():
        return read_latest(folder.snapshots)
    if step is None:
        raise UserError(
            f"{run} has no checkpoint yet; a live run writes one when run.checkpoint_every says, and at tahq stop"
        )
    if step == "best":
        best = best_folder(folder.snapshots)
        if best is None:
            raise UserError(f"{run} has no best checkpoint; a run with training.eval_every and run.keep_best keeps one")
        return best, read_manifest(best)
    folders = snapshot_folders(folder.snapshots)
    if step not in folders:
        existing = ", ".join(map(str, folders)) or "none"
        raise UserError(f"{run} has no checkpoint after step {step}; it has: {existing}")
    return folders[step], read_manifest(folders[step])


def pull(run: Path, step: Which = None) -> Iterator[str]:
    """Fetch the files of a checkpoint that are not in the run's folder; yields lines about them.

    Raises:
        UserError: the run or the checkpoint does not exist.
        SnapshotError: a file cannot be fetched; the message has its hosts and paths.
    """
    folder, manifest = checkpoint_of(run, step)
    missing = missing_files(folder, manifest)
    if missing:
        fetch(run, folder, manifest, missing)
        yield f"{folder}: fetched {_files(missing)}"
    else:
        yield f"{folder}: {_files(manifest.files)}, all here"


def missing_files(folder: Path, manifest: Manifest) -> list[StageFile]:
    """Files of a checkpoint that are not in its folder, or damaged."""
    return [entry for entry in manifest.files if not has_file(folder / entry.file, entry.sha256)]


def fetch(run: Path, folder: Path, manifest: Manifest, files: Sequence[StageFile]) -> None:
    """Fetch files of a checkpoint into its folder, several at a time; see `pull`."""
    config = config_from_json(json.dumps(manifest.config))
    workers = _workers(run) if any(_lacks_ssh(config, entry) for entry in files) else None
    with _bar(files) as progress, closing(workers) if workers else nullcontext():
        failures = _fetch(config, folder, files, progress.counted, workers)
    if failures:
        raise SnapshotError(f"{'; '.join(failures)}; once that is corrected: tahq pull {run}")


def _fetch(
    config: ClusterConfig,
    folder: Path,
    files: Sequence[StageFile],
    counted: "Counted",
    workers: WorkerFiles | None,
    is_wanted: Callable[[], bool] = lambda: True,
) -> list[str]:
    """Fetch these files; returns what has failed, and why."""

    def fetched(entry: StageFile) -> str:
        places = iter(_places(config, folder.name, entry))
        if workers is not None and _lacks_ssh(config, entry):
            there = workers.places(_stage_of(entry), entry.sha256, is_wanted)
            places = chain((Place(*place, is_likely=True) for place in there), places)
        return _fetched(folder, entry, places, counted, is_wanted)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        reasons = list(pool.map(fetched, files))
    return [
        f"{entry.file} is not here, and cannot be fetched from {reason}"
        for entry, reason in zip(files, reasons, strict=True)
        if reason
    ]


def _workers(run: Path) -> WorkerFiles | None:
    """The workers of a run that is live on this machine; None: it is not, has no owner, or its port is not known."""
    if writer_of(run) is None:
        return None
    config = load_config(RunFolder(run).config)
    if not config.security.curve or config.run.bind.endswith(":0"):
        return None
    key = Path(config.security.key).expanduser() if config.security.key is not None else default_key_path()
    return WorkerFiles(local_peer(config.run.bind, config.run.bind), read_key_file(key))


def _lacks_ssh(config: ClusterConfig, entry: StageFile) -> bool:
    """Whether the host of the stage that has written a file is listed without ssh."""
    return isinstance(config.hosts, list) and config.hosts[_stage_of(entry)].ssh is None


def collected(
    run: Path, connect: Callable[[], WorkerFiles], warn: Callable[[str], None], is_wanted: Callable[[], bool]
) -> Iterator[str]:
    """Fetch files of a run's newest and best checkpoint from hosts without ssh, in threads beside the coordinator.

    Yields the progress, in words, until that has ended; failures are warnings.
    """
    snapshots = RunFolder(run).snapshots
    newest, best = latest_folder(snapshots), best_folder(snapshots)
    yield from _collected(newest, connect, warn, is_wanted, f"tahq pull {run}")
    if best is not None and best != newest:
        yield from _collected(best, connect, warn, is_wanted, f"tahq pull {run} --best")


def _collected(
    folder: Path,
    connect: Callable[[], WorkerFiles],
    warn: Callable[[str], None],
    is_wanted: Callable[[], bool],
    command: str,
) -> Iterator[str]:
    manifest = read_manifest(folder)
    config = config_from_json(json.dumps(manifest.config))
    files = [entry for entry in manifest.files if _lacks_ssh(config, entry) and not (folder / entry.file).is_file()]
    if not files:
        return
    with Progress(disable=True) as bars, ThreadPoolExecutor(1) as pool:
        progress = _Progress(bars, files)

        def fetch_all() -> list[str]:
            with closing(connect()) as workers:
                return _fetch(config, folder, files, progress.counted, workers, is_wanted)

        fetching = pool.submit(fetch_all)
        while not fetching.done():
            done = figures.share(progress.share)
            yield f"the checkpoint's {_files(files)}, {done} is here (Ctrl-C leaves the rest on its hosts)"
        try:
            failures = fetching.result()
        except TahqError as error:
            failures = [str(error)]
    if failures:
        left = ", ".join(entry.file for entry in files if not (folder / entry.file).is_file())
        reasons = "; ".join(failures) if is_wanted() else f"left on their hosts: {left}"
        warn(
            f"{reasons}; copy them into {folder} by hand, or resume the run (done already: with more training.steps) "
            f"and call `{command}` meanwhile"
        )


@dataclass(frozen=True, slots=True)
class Place:
    """A host that may have a file: where, as scp would name it, and the file's bytes from an offset on."""

    where: str
    pieces: Pieces
    is_likely: bool
    """Whether it is the host of the stage that has written the file."""


def _stage_of(entry: StageFile) -> int:
    """The stage that has written a file, by its name, ``stage-001-88ab….safetensors``."""
    number = entry.file.split("-")[1] if entry.file.startswith("stage-") else ""
    if not number.isdecimal():
        raise SnapshotError(f"{entry.file} is not named after a stage, so its host is unknown; copy it here by hand")
    return int(number)


def _places(config: ClusterConfig, checkpoint: str, entry: StageFile) -> list[Place]:
    """The stage's host first, then the others, which may have a copy."""
    if isinstance(config.hosts, str):
        return []
    stage = _stage_of(entry)
    run = Path(config.run.dir) / config.run.name
    own = run / "snapshots" / checkpoint / entry.file
    copy = run / "copies" / f"stage-{stage:03d}" / checkpoint / entry.file
    order = sorted(range(len(config.hosts)), key=lambda number: number != stage)
    return [_place(config.hosts[number], number, (own, copy), is_likely=number == stage) for number in order]


def _place(host: MachineConfig, number: int, paths: Sequence[Path], *, is_likely: bool) -> Place:
    path = Path(host.workdir or "") / paths[0]
    if host.ssh is None:
        return Place(f"{host.address}:{path}", _by_hand, is_likely)
    return Place(f"{host.ssh}:{path}", lambda offset: _over_ssh(host, number, paths, offset), is_likely)


def _by_hand(offset: int) -> Iterator[bytes]:
    found = "cluster.yaml has no ssh for this host"
    raise PeerLostError(f"{found}; pull while the run is live, or copy it from there by hand, e.g. with scp")


def _over_ssh(host: MachineConfig, number: int, paths: Sequence[Path], offset: int) -> Iterator[bytes]:
    """The bytes of the first of these files that exists on a host; PeerLostError: none does, or ssh failed."""
    names = shlex.join(map(str, paths))
    script = (
        f'for f in {names}; do if [ -f "$f" ]; then exec tail -c +{offset + 1} -- "$f"; fi; done; exit {_NOT_THERE}'
    )
    argv = ssh_in_folder(host, "{ " + script + "; }")
    try:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except OSError as error:
        raise UserError(f"cannot start ssh: {error.strerror}") from error
    with process:
        assert process.stdout is not None, "a pipe was asked for"
        assert process.stderr is not None, "a pipe was asked for"
        try:
            while piece := process.stdout.read(_PIECE_NBYTES):
                yield piece
        except GeneratorExit:
            process.kill()
            raise
        said = process.stderr.read().decode(errors="replace").splitlines()
    if process.returncode == _NOT_THERE:
        raise PeerLostError("the file is not there")
    if process.returncode:
        finding = ssh_fault((process.returncode, [line for line in said if line.strip()]), host, number)
        raise PeerLostError(f"{finding.found}; {finding.remedy}")


def _fetched(
    folder: Path, entry: StageFile, places: Iterable[Place], counted: "Counted", is_wanted: Callable[[], bool]
) -> str:
    """Fetch a file from the first place that has it; returns why that failed, "" if it has not."""
    reasons, path = [], folder / entry.file
    for place in places:
        try:
            if not fetch_file(path, entry.sha256, counted(path, place.pieces), is_wanted):
                return f"{place.where}: interrupted"
        except (PeerLostError, RemoteProtocolError) as error:
            reasons.append((place.is_likely, f"{place.where}: {error}"))
        else:
            return ""
    told = [reason for is_likely, reason in reasons if is_likely] or [reason for _, reason in reasons]
    return "; ".join(told) or "another host: the run was on this machine alone"


# -- progress ----------------------------------------------------------------------------------------


class _Progress:
    """Bytes of a few files: bars on a terminal, else a line now and then."""

    def __init__(
        self, bars: Progress, files: Sequence[StageFile], line: Callable[[float], None] = lambda share: None
    ) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}
        for entry in files:
            self._tasks[entry.file] = bars.add_task(entry.file.rpartition("-")[0], total=entry.nbytes)
        self._line = line

    def counted(self, path: Path, pieces: Pieces) -> Pieces:
        """The same pieces, which are counted as they pass."""

        def passed(offset: int) -> Iterator[bytes]:
            task = self._tasks[path.name]
            self._bars.update(task, completed=offset)
            for piece in pieces(offset):
                yield piece
                self._bars.advance(task, len(piece))
                self._line(self.share)

        return passed

    @property
    def share(self) -> float:
        """Share of the bytes that is here."""
        tasks = self._bars.tasks
        return sum(each.completed for each in tasks) / max(sum(each.total or 0 for each in tasks), 1)


Counted = Callable[[Path, Pieces], Pieces]


@contextmanager
def _bar(files: Sequence[StageFile]) -> Iterator[_Progress]:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        yield _Progress(bars, files, *([progress_of("fetching")] if bars.disable else []))


def _files(files: Sequence[StageFile]) -> str:
    size = format_size(sum(entry.nbytes for entry in files))
    return f"{len(files)} file{'s' * (len(files) != 1)}, {size}"
