"""A worker's part in copies of snapshots off their hosts: gives its own, keeps others', fetches what it lacks."""

from collections.abc import Callable, Iterator
from pathlib import Path

from tahq.comm.control.messages import Admit, Assign, Copied, Copy, Published, Snapshotted
from tahq.comm.host_shaping import host_shaping
from tahq.comm.zmq.endpoint import ZmqEndpoint
from tahq.comm.zmq.files import FileSource, pieces
from tahq.config.cluster import ClusterConfig
from tahq.pipeline.checkpoint.copies import CopyKeeper, own_file, restored
from tahq.pipeline.checkpoint.manifest import snapshot_folder
from tahq.worker.assembly import snapshots_folder

RATE_SHARE = 0.05
"""Of what this host receives at, where that is configured: what copies may take of it."""
RATE_BITS_PER_S = 10e6
"""What they may take where it is not."""

FileOrder = Copy | Published | Admit
"""What the coordinator has a worker do about files."""


class OffHost:
    """One worker's part in copies: the files that it offers, and the keeper of those that it fetches.

    Args:
        assign: its stage.
        config: the configuration in `assign`, parsed.
        endpoint: where files come and go.
        report: sends the outcome of an order to the coordinator; called in another thread.
    """

    def __init__(
        self, assign: Assign, config: ClusterConfig, endpoint: ZmqEndpoint, report: Callable[[Copied], None]
    ) -> None:
        self._assign = assign
        self._config = config
        self._endpoint = endpoint
        self._rate = copy_rate_bits_per_s(config, assign.stage)
        self._keeper = CopyKeeper(self._run_folder / "copies", assign.stage, self._fetch_copy, report, self.offer)

    @property
    def _run_folder(self) -> Path:
        return Path(self._config.run.dir) / self._config.run.name

    @property
    def address(self) -> str:
        """Where this worker's files can be fetched; empty: nowhere."""
        return self._endpoint.address if self._config.run.copies else ""

    def restored(self, working: Callable[[str], None]) -> Assign:
        """See `copies.restored`; what this worker begins at is given to others too."""
        num_stages = self._config.pipeline.stages
        assign = restored(self._assign, self._run_folder, num_stages, self._fetch, working)
        name = own_file(assign, num_stages)
        if name is not None:
            self.offer(assign.snapshot_files[name], self._run_folder / assign.snapshot / name)
        return assign

    def offer(self, sha256: str, path: Path) -> None:
        """Give this file to others of the run."""
        if self._config.run.copies:
            self._endpoint.files.offer(self._assign.run_id, sha256, path)

    def snapshotted(self, part: Snapshotted) -> None:
        """This stage's part of a snapshot is written."""
        if not part.error:
            self.offer(part.sha256, snapshot_folder(snapshots_folder(self._config), part.step) / part.file)

    def obey(self, order: FileOrder) -> None:
        """Keep a copy, remove those that nobody will ask for, or let others ask."""
        if isinstance(order, Copy):
            self._keeper.order(order)
        elif isinstance(order, Admit):
            self._endpoint.allow(order.public_keys)
        else:
            self._keeper.prune(order.base)

    def close(self) -> None:
        """End the keeper's thread; a copy that is under way is left."""
        self._keeper.close()

    def _fetch(self, address: str, public_key: str, sha256: str, offset: int) -> Iterator[bytes]:
        source = FileSource(address, self._assign.run_id, sha256, public_key)
        return pieces(self._endpoint, source, offset=offset)

    def _fetch_copy(self, order: Copy, offset: int, is_wanted: Callable[[], bool]) -> Iterator[bytes]:
        source = FileSource(order.address, self._assign.run_id, order.sha256, order.public_key)
        return pieces(self._endpoint, source, offset=offset, rate_bits_per_s=self._rate, is_wanted=is_wanted)


def copy_rate_bits_per_s(config: ClusterConfig, stage: int) -> float:
    """How fast a stage's worker fetches copies of others: `run.copy_rate`, or a share of what its host receives at."""
    if config.run.copy_rate is not None:
        return config.run.copy_rate
    rate = host_shaping(config.links, config.hosts, stage, config.pipeline.stages).down_bits_per_s
    return RATE_SHARE * rate if rate < float("inf") else RATE_BITS_PER_S
