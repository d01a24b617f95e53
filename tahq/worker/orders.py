"""The coordinator's orders to a worker that trains: about its links, and about files of checkpoints.

Orders come in the control thread, which obeys at once, since the main thread may be waiting for a frame of the very
peer that an order is about.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from tahq.comm.control.messages import (
    Admit,
    Assign,
    Copied,
    Copy,
    Hold,
    Plan,
    Published,
    Relink,
    Relinked,
    Snapshotted,
    Widen,
)
from tahq.comm.host_shaping import host_shaping
from tahq.comm.transport import Transport
from tahq.comm.zmq.endpoint import ZmqEndpoint
from tahq.comm.zmq.files import FileSource, pieces
from tahq.comm.zmq.transport import Wanted, ZmqTransport
from tahq.config.cluster import ClusterConfig
from tahq.errors import RemoteProtocolError, TahqError
from tahq.pipeline.checkpoint.copies import CopyKeeper, own_file, restored
from tahq.pipeline.checkpoint.manifest import snapshot_folder
from tahq.worker.assembly import snapshots_folder

LinkOrder = Relink | Widen | Hold | Published
"""Orders about links."""
FileOrder = Copy | Published | Admit
"""Orders about files."""
OpenGroup = Callable[[ZmqTransport, str, str], Transport]
"""(link, address of its peer's process group or "", gloo or nccl) -> the transport that replaces the link."""

RATE_SHARE = 0.05
"""Share of this host's configured receiving rate that copies may take."""
RATE_BITS_PER_S = 10e6
"""Rate of copies where no rate is configured."""


class WorkerLinks:
    """Links to the neighbours: the main thread opens them; orders that come before are carried out then.

    Args:
        endpoint: the sockets.
        stage: this worker's.
        answer: sends an answer to the coordinator; called in any thread.
    """

    def __init__(self, endpoint: ZmqEndpoint, stage: int, answer: Callable[[Relinked], None]) -> None:
        self._endpoint = endpoint
        self._stage = stage
        self._answer = answer
        self._lock = threading.Lock()
        self._epoch = 0
        self._early: list[LinkOrder] = []
        self._is_open = False

    def open(self, plan: Plan, timeout_s: float, open_group: OpenGroup) -> dict[int, Transport]:
        """Open the plan's links and wait until all are connected; by number.

        Raises:
            PeerLostError: a neighbour did not come in time; the message names it.
            RemoteProtocolError: the plan is invalid, or a peer has another identity than planned.
        """
        wanted = _wanted(plan.wanted)
        self._epoch = plan.epoch
        self._endpoint.set_epoch(plan.epoch, plan.start_step)
        links: dict[int, ZmqTransport] = {}
        for row in plan.links:
            link, peer_stage, peer_name, dial, _, peer_key = row
            names = (int(link), int(peer_stage), str(peer_name), str(dial), str(peer_key))
            links[int(link)] = self._endpoint.open_link(*names, wanted.get(int(link), Wanted()))
        with self._lock:
            self._is_open = True
            for order in self._early:
                self._obey(order)
        self._endpoint.wait_connected(timeout_s)
        return {
            int(number): links[int(number)] if kind == "zmq" else open_group(links[int(number)], str(dial), str(kind))
            for number, _, _, dial, kind, _ in plan.links
        }

    def obey(self, order: LinkOrder) -> None:
        """Carry out an order, now or when the links are open."""
        with self._lock:
            if self._is_open:
                self._obey(order)
            else:
                self._early.append(order)

    def say_lacking(self, link: int) -> None:
        """Tell the coordinator that the frames which a neighbour needs again on this link are lost."""
        self._say(Relinked(self._stage, self._epoch, [link]))

    def _obey(self, order: LinkOrder) -> None:
        if isinstance(order, Relink):
            self._relink(order)
        elif isinstance(order, Widen):
            self._endpoint.widen(order.link, _through(order.through))
        elif isinstance(order, Hold):
            for link in order.links:
                self._endpoint.hold(link)
        else:
            self._endpoint.free_logs(order.base, order.step)

    def _relink(self, order: Relink) -> None:
        self._epoch = order.epoch
        wanted = _wanted(order.wanted)
        lacking = [link for link, row in wanted.items() if not self._endpoint.has_log(link, row.since)]
        answer = partial(self._say, Relinked(self._stage, order.epoch, lacking))
        if lacking:
            answer()
            return
        for link, _, peer_name, dial, _, peer_key in order.links:
            row = wanted[int(link)]
            self._endpoint.relink(int(link), order.epoch, str(peer_name), str(dial), row, str(peer_key))
        self._endpoint.after_that(answer)  # the new process may dial at once

    def _say(self, relinked: Relinked) -> None:
        with suppress(TahqError):  # a coordinator that is lost is noticed elsewhere
            self._answer(relinked)


def _wanted(rows: Iterable[Sequence[int]]) -> dict[int, Wanted]:
    try:
        return {link: Wanted(since, evaluations, _through(through)) for link, since, evaluations, through in rows}
    except ValueError as error:
        raise RemoteProtocolError(f"the coordinator sent malformed rows of wanted frames: {error}") from error


def _through(step: int) -> int | None:
    return None if step < 0 else step


class OffHost:
    """Copies of checkpoints off their hosts: offers this worker's files, keeps others', fetches what it lacks.

    Args:
        assign: this worker's.
        config: the configuration in `assign`, parsed.
        endpoint: sends and receives the files.
        report: sends the outcome of an order to the coordinator; called in another thread.
    """

    def __init__(
        self, assign: Assign, config: ClusterConfig, endpoint: ZmqEndpoint, report: Callable[[Copied], None]
    ) -> None:
        self._assign = assign
        self._config = config
        self._endpoint = endpoint
        self._rate = copy_rate_bits_per_s(config, assign.stage)
        self._run_folder = Path(config.run.dir) / config.run.name
        self._keeper = CopyKeeper(self._run_folder / "copies", assign.stage, self._fetch_copy, report, self._offer)
        self.close = self._keeper.close

    @property
    def address(self) -> str:
        """Where this worker's files can be fetched; empty: nowhere."""
        return self._endpoint.address if self._config.run.copies else ""

    def restored(self, working: Callable[[str], None]) -> Assign:
        """`copies.restored`; others may fetch the checkpoint that this worker restarts from."""
        num_stages = self._config.pipeline.stages
        assign = restored(self._assign, self._run_folder, num_stages, self._fetch, working)
        name = own_file(assign, num_stages)
        if name is not None:
            self._offer(assign.snapshot_files[name], self._run_folder / assign.snapshot / name)
        return assign

    def snapshotted(self, part: Snapshotted) -> None:
        """This stage's part of a checkpoint is written: offer it to others."""
        self._offer(part.sha256, snapshot_folder(snapshots_folder(self._config), part.step) / part.file)

    def obey(self, order: FileOrder) -> None:
        """Keep a copy, remove copies that are no longer needed, or let others fetch."""
        if isinstance(order, Copy):
            self._keeper.order(order)
        elif isinstance(order, Admit):
            self._endpoint.allow(order.public_keys)
        else:
            self._keeper.prune(order.base)

    def _offer(self, sha256: str, path: Path) -> None:
        if self._config.run.copies:
            self._endpoint.files.offer(self._assign.run_id, sha256, path)

    def _fetch(self, address: str, public_key: str, sha256: str, offset: int) -> Iterator[bytes]:
        source = FileSource(address, self._assign.run_id, sha256, public_key)
        return pieces(self._endpoint.fetching, source, offset=offset)

    def _fetch_copy(self, order: Copy, offset: int, is_wanted: Callable[[], bool]) -> Iterator[bytes]:
        source = FileSource(order.address, self._assign.run_id, order.sha256, order.public_key)
        return pieces(self._endpoint.fetching, source, offset=offset, rate_bits_per_s=self._rate, is_wanted=is_wanted)


def copy_rate_bits_per_s(config: ClusterConfig, stage: int) -> float:
    """Rate at which a stage's worker fetches copies: `run.copy_rate`, or a share of its host's receiving rate."""
    if config.run.copy_rate is not None:
        return config.run.copy_rate
    rate = host_shaping(config.links, config.hosts, stage, config.pipeline.stages).down_bits_per_s
    return RATE_SHARE * rate if rate < float("inf") else RATE_BITS_PER_S
