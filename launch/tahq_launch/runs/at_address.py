"""A live run, over its coordinator's control channel: a copy of its files here, its checkpoints, and stopping it.

Only the coordinator's own key is answered, so this machine needs that key's file.
"""

import json
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from tahq.comm.control.client import ControlClient
from tahq.comm.control.messages import OWNER, FilePlaces, FindFiles, ReadRun, RunLines, StopRequest
from tahq.comm.keys import Credentials, KeyPair, default_key_path, read_key_file
from tahq.comm.link.shaping import Shaping
from tahq.comm.link.spec import ANY_STAGE, PeerIdentity
from tahq.comm.relay.tickets import RelayTicket
from tahq.comm.zmq.addresses import parse_address
from tahq.comm.zmq.endpoint import EndpointSettings, ZmqEndpoint
from tahq.comm.zmq.files import FileSource, pieces
from tahq.errors import PeerLostError, RefusedError
from tahq.pipeline.checkpoint.copies import Pieces
from tahq_launch.command_line import announce

ANSWER_S = 15.0
_RECENT_NBYTES = 1 << 20
"""Of metrics.jsonl at first."""
_LOOK_S = 0.5
_TRY_S = 5.0
"""How long a worker may take to answer until the relay is used."""


def is_address(run: str) -> bool:
    """Whether this is host:port rather than a run's name or folder."""
    return re.fullmatch(r"\S+:\d+", run) is not None and not Path(run).exists()


class RemoteRun:
    """Copies of a run's files in `folder`, as of the last `refresh`."""

    def __init__(self, client: ControlClient, folder: Path) -> None:
        self.folder = folder
        self.is_over = False
        self._client = client
        self._offsets: dict[str, int] = {}

    def refresh(self, *, logs: bool = False) -> None:
        """Fetch what metrics and events have gained, and logs if they are wanted; RefusedError, PeerLostError."""
        try:
            self._fetch("metrics.jsonl", -_RECENT_NBYTES)
            self._fetch("events.jsonl")
            for name in ("launcher", *(f"stage-{stage}" for stage in range(self._num_stages()))) if logs else ():
                self._fetch(f"logs/{name}.log")
        except PeerLostError:
            if not self._offsets:  # it was never there
                raise
            self.is_over = True

    def stop(self, *, now: bool) -> None:
        """Stop the run after its present step and a checkpoint, or now, and wait until its coordinator has left."""
        self.refresh()
        for number in (signal.SIGINT, signal.SIGTERM) if now else (signal.SIGINT,):
            self._client.send(StopRequest(OWNER, int(number)))
        while not self.is_over:
            time.sleep(_LOOK_S)
            self.refresh()

    def _num_stages(self) -> int:
        events = (self.folder / "events.jsonl").read_text().splitlines()
        return max((json.loads(line).get("stages", 0) for line in events), default=0)

    def _fetch(self, name: str, begin: int = 0) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            offset = self._offsets.get(name, begin)
            lines = _asked(self._client, ReadRun(name, offset), RunLines)
            if lines.size < 0:
                return
            self._offsets[name] = lines.next_offset
            with path.open("w" if lines.next_offset < offset else "a", encoding="utf-8") as file:
                file.write(lines.text)
            if not lines.text:
                return


def _owner(address: str, own: KeyPair) -> ControlClient:
    """Connect to the coordinator at host:port with its own key."""
    return ControlClient(
        *(address, "owner"),
        shaping=Shaping(),
        peer_timeout_s=ANSWER_S,
        heartbeat_s=ANSWER_S / 5,
        connect_timeout_s=ANSWER_S,
        credentials=Credentials(own, own.public),
    )


_Answer = TypeVar("_Answer", RunLines, FilePlaces)


def _asked(client: ControlClient, request: ReadRun | FindFiles, kind: type[_Answer]) -> _Answer:
    """The coordinator's answer; RefusedError, PeerLostError."""
    client.send(request)
    try:
        answer = client.recv(ANSWER_S)
    except TimeoutError:
        raise PeerLostError(f"no answer in {ANSWER_S:.0f} s") from None
    if not isinstance(answer, kind):
        raise RefusedError(getattr(answer, "reason", "") or getattr(answer, "message", "") or "the run is over")
    return answer


@contextmanager
def remote_run(address: str, key: Path | None) -> Iterator[RemoteRun]:
    """Connect to the coordinator at host:port; `key`: the file of its key, None: this account's."""
    client = _owner(address, read_key_file(key or default_key_path()))
    with closing(client), tempfile.TemporaryDirectory(prefix="tahq-run-") as name:
        yield RemoteRun(client, Path(name) / address)


def stop_at(address: str, key: Path | None, *, now: bool) -> None:
    """`tahq stop` at an address."""
    with remote_run(address, key) as run:
        run.stop(now=now)
    announce(f"{address}: the run has stopped, and its coordinator has left")


class WorkerFiles:
    """Checkpoint files on the disks of a run's workers, fetched over the files links that workers have among them.

    Args:
        address: host:port of the coordinator.
        own: its key pair.
    """

    def __init__(self, address: str, own: KeyPair) -> None:
        self._host, _ = parse_address(address, "coordinator")
        self._own = own
        self._client = _owner(address, own)
        self._lock = threading.Lock()
        self._endpoint: ZmqEndpoint | None = None

    def places(self, stage: int, sha256: str, is_wanted: Callable[[], bool]) -> Iterator[tuple[str, Pieces]]:
        """Where the file of a stage may be, in words, and its bytes from an offset on: first directly, then relayed.

        Raises:
            RefusedError: this is not the owner's key, or the run is over.
            PeerLostError: the coordinator does not answer.
        """
        for is_relayed in (False, True):
            found = self._find(FindFiles(stage, is_relayed))
            for address, key in found.places:
                dial = RelayTicket.planned(address, self._host) if is_relayed else address
                source = FileSource(dial, found.run_id, sha256, key)
                yield f"stage {stage}'s worker at {dial}", partial(self._pieces, source, is_wanted)

    def close(self) -> None:
        """Release the sockets; safe to call twice."""
        self._client.close()
        if self._endpoint is not None:
            self._endpoint.close()

    def _find(self, request: FindFiles) -> FilePlaces:
        with self._lock:
            found = _asked(self._client, request, FilePlaces)
            if self._endpoint is None:
                settings = EndpointSettings(bind="", peer_timeout_s=ANSWER_S, heartbeat_s=ANSWER_S / 5, keys=self._own)
                identity = PeerIdentity(found.run_id, 0, ANY_STAGE, found.config_hash)
                self._endpoint = ZmqEndpoint(identity, settings)
        return found

    def _pieces(self, source: FileSource, is_wanted: Callable[[], bool], offset: int) -> Iterator[bytes]:
        assert self._endpoint is not None, "the source was found"
        if isinstance(source.address, str) and (
            failure := self._endpoint.dial_failure(source.address, source.public_key, _TRY_S)
        ):
            raise PeerLostError(failure)
        yield from pieces(self._endpoint.fetching, source, offset=offset, is_wanted=is_wanted)
