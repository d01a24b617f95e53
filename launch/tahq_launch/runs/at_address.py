"""A live run elsewhere, over its coordinator's control channel: a copy of its files here, and stopping it.

Only the coordinator's own key is answered, so this machine needs that key's file.
"""

import json
import re
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from tahq.comm.control.client import ControlClient
from tahq.comm.control.messages import OWNER, ReadRun, RunLines, StopRequest
from tahq.comm.keys import Credentials, default_key_path, read_key_file
from tahq.comm.link.shaping import Shaping
from tahq.errors import PeerLostError, RefusedError
from tahq_launch.command_line import announce

ANSWER_S = 15.0
_RECENT_NBYTES = 1 << 20
"""Of metrics.jsonl at first."""
_LOOK_S = 0.5


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
            self._client.send(ReadRun(name, offset))
            try:
                lines = self._client.recv(ANSWER_S)
            except TimeoutError:
                raise PeerLostError(f"no answer in {ANSWER_S:.0f} s") from None
            if not isinstance(lines, RunLines):
                raise RefusedError(getattr(lines, "reason", "") or getattr(lines, "message", "") or "the run is over")
            if lines.size < 0:
                return
            self._offsets[name] = lines.next_offset
            with path.open("w" if lines.next_offset < offset else "a", encoding="utf-8") as file:
                file.write(lines.text)
            if not lines.text:
                return


@contextmanager
def remote_run(address: str, key: Path | None) -> Iterator[RemoteRun]:
    """Connect to the coordinator at host:port; `key`: the file of its key, None: this account's."""
    own = read_key_file(key or default_key_path())
    client = ControlClient(
        *(address, "owner"),
        shaping=Shaping(),
        peer_timeout_s=ANSWER_S,
        heartbeat_s=ANSWER_S / 5,
        connect_timeout_s=ANSWER_S,
        credentials=Credentials(own, own.public),
    )
    with closing(client), tempfile.TemporaryDirectory(prefix="tahq-run-") as name:
        yield RemoteRun(client, Path(name) / address)


def stop_at(address: str, key: Path | None, *, now: bool) -> None:
    """`tahq stop` at an address."""
    with remote_run(address, key) as run:
        run.stop(now=now)
    announce(f"{address}: the run has stopped, and its coordinator has left")
