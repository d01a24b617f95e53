"""What a worker has said that a coordinator, started again, may not know of: it is said again then."""

import threading
from collections.abc import Callable

from tahq.comm.control.messages import Commit, Evaluated, Message, Prepare, Published, Snapshotted


class Unheard:
    """The PREPARE that is not answered, the evaluation of the step before, parts of snapshots that are not complete."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._messages: dict[tuple[type[Message], int], Prepare | Evaluated | Snapshotted] = {}

    def said(self, message: Message) -> None:
        """The worker says this; any thread may call it."""
        if isinstance(message, Prepare | Evaluated | Snapshotted):
            with self._lock:
                self._messages[type(message), message.step] = message

    def heard(self, message: Message) -> None:
        """The coordinator says this: what it answers is known."""
        if isinstance(message, Commit):
            self._forget(lambda said: isinstance(said, Prepare) and said.step <= message.step)
            self._forget(lambda said: isinstance(said, Evaluated) and said.step < message.step)
        elif isinstance(message, Published):
            self._forget(lambda said: isinstance(said, Snapshotted) and said.step <= message.step)

    def _forget(self, is_known: Callable[[Message], bool]) -> None:
        with self._lock:
            self._messages = {key: said for key, said in self._messages.items() if not is_known(said)}

    def messages(self) -> list[Message]:
        """All of it, in the order in which it was said."""
        with self._lock:
            return list(self._messages.values())
