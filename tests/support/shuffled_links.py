"""Links between stages in one process, on which frames arrive in an order drawn from a seed.

Every stage has its own thread. Nothing arrives while any of them computes: when all of them wait for a frame or are
done, one of the frames in flight is drawn, and arrives. So time is virtual, and the order of arrival depends on the
seed alone. If all stages wait and nothing is in flight, each of them raises Deadlock.
"""

import random
import threading
from collections import deque

import torch

from tahq.comm.link.frame import Frame, LogicalId
from tahq.comm.transport import LinkStats


class Deadlock(Exception):
    """Every stage waits, and nothing is under way."""


class ShuffledNetwork:
    """All links of one pipeline.

    Args:
        num_stages: threads that use them.
        seed: of the order of arrival.
    """

    def __init__(self, num_stages: int, seed: int) -> None:
        self._changed = threading.Condition()
        self._running = num_stages
        self._random = random.Random(seed)
        self._under_way: list[tuple[ShuffledLink, Frame]] = []
        self._is_stuck = False

    def link(self, number: int) -> tuple["ShuffledLink", "ShuffledLink"]:
        """Both ends of a new link, the lower chunk's first."""
        lower, upper = ShuffledLink(self, number), ShuffledLink(self, number)
        lower.peer, upper.peer = upper, lower
        return lower, upper

    def leave(self) -> None:
        with self._changed:
            self._running -= 1
            self._deliver_if_all_wait()

    def put(self, target: "ShuffledLink", frame: Frame) -> None:
        with self._changed:
            self._under_way.append((target, frame))

    def wait_for(self, link: "ShuffledLink") -> Frame:
        """The next frame that arrives on a link."""
        with self._changed:
            while not link.arrived:
                self._running -= 1
                link.is_waited_for = True
                self._deliver_if_all_wait()
                self._changed.wait_for(lambda: not link.is_waited_for or self._is_stuck)
                if self._is_stuck:
                    raise Deadlock(f"link {link.link}")
            return link.arrived.popleft()

    def _deliver_if_all_wait(self) -> None:
        while self._running == 0 and self._under_way:
            target, frame = self._under_way.pop(self._random.randrange(len(self._under_way)))
            target.arrived.append(frame)
            if target.is_waited_for:
                target.is_waited_for = False
                self._running += 1
                self._changed.notify_all()
        if self._running == 0:
            self._is_stuck = True
            self._changed.notify_all()


class ShuffledLink:
    """One end of a link (contract: tahq.comm.transport.Transport); any thread may send, one receives."""

    def __init__(self, network: ShuffledNetwork, link: int) -> None:
        self.link = link
        self.peer: ShuffledLink
        self.payload_device = torch.device("cpu")
        self.arrived: deque[Frame] = deque()
        self.is_waited_for = False
        self._network = network

    def expect(self, id: LogicalId, max_nbytes: int) -> None:
        """Frames are accepted without being posted."""

    def send(self, frame: Frame) -> None:
        self._network.put(self.peer, frame)

    def recv(self, timeout_s: float | None = None) -> Frame:
        return self._network.wait_for(self)

    def take_stats(self) -> list[LinkStats]:
        return []

    def close(self) -> None:
        """There is nothing to release."""
