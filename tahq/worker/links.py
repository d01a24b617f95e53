"""A worker's links, opened by the main thread as the plan says and changed as the coordinator orders.

Orders come in the control thread, which obeys at once, since the main thread may be waiting for a frame of the very
peer that an order is about.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial

from tahq.comm.control.messages import (
    Hold,
    Plan,
    Published,
    Relink,
    Relinked,
    Widen,
)
from tahq.comm.transport import Transport
from tahq.comm.zmq.endpoint import ZmqEndpoint
from tahq.comm.zmq.transport import Wanted, ZmqTransport
from tahq.errors import RemoteProtocolError, TahqError

LinkOrder = Relink | Widen | Hold | Published
"""Orders about links."""
OpenGroup = Callable[[ZmqTransport, str, str], Transport]
"""(link, address of its peer's process group or "", gloo or nccl) -> the transport that replaces the link."""


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
