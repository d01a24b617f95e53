"""A thread of one direction of a group, whose failures reach the link."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from tahq.comm.group.gloo_group import GlooGroup, GroupBrokenError
from tahq.comm.group.payload_path import PayloadPath
from tahq.comm.group.torch_groups import Store
from tahq.comm.link.spec import PeerIdentity
from tahq.errors import TahqError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Lane:
    """One direction of a link, as its threads see it."""

    group: GlooGroup
    path: PayloadPath
    identity: PeerIdentity
    link: int
    peer: str
    """How messages call link and peer."""
    store: Store
    """Where the ends found each other; NCCL looks there as long as it lives."""

    def abort(self) -> None:
        """Wake whoever waits in it."""
        self.group.abort()
        self.path.abort()


class GroupThread:
    """Runs `body`; what it raises goes to `fail` or `broken`."""

    def __init__(
        self,
        name: str,
        lane: Lane,
        body: Callable[[], None],
        fail: Callable[[TahqError], None],
        broken: Callable[[str], None],
    ) -> None:
        self._lane = lane
        self._body = body
        self._fail = fail
        self._broken = broken
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> bool:
        """Wait until the thread has ended; whether it has."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._body()
        except TahqError as error:
            self._fail(error)
        except GroupBrokenError as error:
            self._broken(str(error))
        except Exception as error:
            _log.exception("%s: a group's thread has failed", self._lane.peer)
            self._fail(TahqError(f"{self._lane.peer}: a group's thread has failed: {error!r}"))
