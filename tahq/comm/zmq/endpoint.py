"""A worker's place on the network: every data socket it has, in one I/O thread.

A ROUTER listens where neighbours may dial in; each link that is dialled from here has a DEALER of its
own for each of its connections. ZMQ's own high-water marks are off: the window of each session bounds what a
socket may hold, so that no call ever blocks on a slow peer.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import zmq

from tahq.comm.keys import KeyPair
from tahq.comm.link.frame import MAX_PIECE_NBYTES, Channel
from tahq.comm.link.frame_log import FrameLog
from tahq.comm.link.inbound import Allocate, pageable
from tahq.comm.link.session import Session
from tahq.comm.link.shaping import Shaping
from tahq.comm.link.spec import (
    ANY_STAGE,
    DEFAULT_WINDOW_NBYTES,
    FILES_LINK,
    First,
    LinkHello,
    LinkSpec,
    PeerIdentity,
    SessionLimits,
)
from tahq.comm.link.transitions import End
from tahq.comm.relay.tickets import RelayTicket
from tahq.comm.zmq import files
from tahq.comm.zmq.addresses import advertised_address, bind_router, format_address, parse_address
from tahq.comm.zmq.dialled import Dialled
from tahq.comm.zmq.endpoint_loop import EndpointLoop, OnTrouble
from tahq.comm.zmq.files import FetchingEnd, FileSource, FileStore, ServingEnd
from tahq.comm.zmq.gate import Gate
from tahq.comm.zmq.reception import Reception
from tahq.comm.zmq.socket_wait import Socket
from tahq.comm.zmq.sockets import open_dealer, open_router
from tahq.comm.zmq.transport import ALL, MAX_MESSAGE_NBYTES, DataEnd, LinkEnd, Wanted, ZmqTransport
from tahq.errors import LocalProtocolError, PeerLostError, RemoteProtocolError

_log = logging.getLogger(__name__)
Dial = str | RelayTicket
"""A peer's host:port, "" for a peer that dials, or this end's ticket at the relay."""
_HOLD_S = 3.0
"""How long a peer that has its plan already waits until this end has it too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointSettings:
    """The address, the limits and the callbacks of an endpoint."""

    bind: str
    """host:port to listen on; port 0: any free one; "": only dial out."""
    advertise: str | None = None
    """host:port that neighbours dial (port 0: the bound one); None: as bound; "none": this host can only dial out."""
    shaping: Shaping = field(default_factory=Shaping)
    """The limits of this host's connection."""
    peer_timeout_s: float
    heartbeat_s: float
    give_up_s: float | None = None
    first: First = "oldest"
    connections: int = 1
    """For `peer_timeout_s` to `connections` see SessionLimits."""
    allocate: Allocate = pageable
    """Returns memory for the frames that come in."""
    keys: KeyPair | None = None
    """This worker's; None: no CURVE."""
    on_trouble: OnTrouble | None = None
    """Called, in the I/O thread, when a link becomes degraded and when it works again."""
    frame_log: Callable[[int], FrameLog] | None = None
    """Makes the log of what is sent on a link, by its number; None: nothing is kept, and no peer can be replaced by
    another process."""

    @property
    def limits(self) -> SessionLimits:
        """The limits of a session between neighbours."""
        return SessionLimits(
            self.peer_timeout_s,
            self.heartbeat_s,
            piece_nbytes=min(self.shaping.message_nbytes, MAX_PIECE_NBYTES),
            receive_window_nbytes=self.shaping.receive_window_nbytes(DEFAULT_WINDOW_NBYTES),
            first=self.first,
            connections=self.connections,
            give_up_s=self.give_up_s,
            max_message_nbytes=MAX_MESSAGE_NBYTES,
        )


class ZmqEndpoint:
    """Opens links and closes them; the transports it makes do the rest.

    Args:
        identity: this worker's; the epoch may be set later by `set_epoch`.
        settings: see EndpointSettings.

    Raises:
        UserError: the address to bind is malformed or in use.
    """

    def __init__(self, identity: PeerIdentity, settings: EndpointSettings) -> None:
        self._identity = identity
        self._settings = settings
        self._keys = settings.keys
        self._limits = settings.limits
        self._first_step = 0
        self._links: dict[int, ZmqTransport] = {}
        self._aborted: Exception | None = None
        self._is_closed = False
        self.address = ""
        self.files = FileStore(self._send_piece)
        """What other workers may fetch from here."""
        # pyzmq sets up what frees zero-copy messages at the first one, unguarded against threads.
        zmq.Frame(b"\0", copy=False, copy_threshold=0)
        self._context: zmq.Context[Socket] = zmq.Context()
        try:
            self._reception = self._listen(settings.bind, settings.advertise) if settings.bind else None
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._loop = EndpointLoop(self._reception, settings.shaping, settings.on_trouble)
        self._thread = threading.Thread(target=self._loop.run, name="tahq-io", daemon=True)
        self._thread.start()

    def _listen(self, bind: str, advertise: str | None) -> Reception:
        router = open_router(self._context, self._limits.peer_timeout_s)
        gate = Gate(router, self._keys, where="worker", hold_s=_HOLD_S)
        self.address = advertised_address(bind, bind_router(router, bind, "worker"), advertise)
        return Reception(router, gate, {FILES_LINK: self._visit}, self.address)

    def set_epoch(self, epoch: int, first_step: int = 0) -> None:
        """Take the epoch of the plan, and the first step of which anything is sent; before the first `open_link`."""
        if self._links:
            raise LocalProtocolError(f"epoch {epoch} came after links were opened in epoch {self._identity.epoch}")
        self._identity = replace(self._identity, epoch=epoch)
        self._first_step = first_step

    def open_link(
        self, link: int, peer_stage: int, peer_name: str, dial: Dial, peer_key: str = "", wanted: Wanted = ALL
    ) -> ZmqTransport:
        """A link to a neighbour; returns before it is connected.

        Args:
            link: the link's number, the same at both ends.
            peer_stage: the stage at the other end.
            peer_name: what messages call the peer's host.
            dial: the peer's host:port, or "" to be dialled; exactly one end dials. Over a relay both have tickets.
            peer_key: its public key, the only one accepted on this link. "" without CURVE.
            wanted: which frames the peer wants.

        Raises:
            UserError: `dial` is malformed, or is no address where nothing listens.
        """
        if self._is_closed:
            raise LocalProtocolError("the endpoint is closed")
        if link in self._links:
            raise LocalProtocolError(f"link {link} is open already")
        self._check_key(link, peer_name, peer_key)
        spec = _spec(link, peer_stage, peer_name, dial)
        make_log = self._settings.frame_log
        log = make_log(link) if make_log is not None else None
        if log is not None:
            log.begin(self._first_step)
        end = DataEnd(spec, Session(self._identity, spec, self._limits, self._settings.allocate), wanted, log, peer_key)
        self._loop.open(end, self._dial_all(end, dial, peer_key))
        self._links[link] = ZmqTransport(end, self._limits.piece_nbytes, self._loop.submit)
        if self._aborted is not None:
            end.inbox.abort(self._aborted)
        return self._links[link]

    def relink(self, link: int, epoch: int, peer_name: str, dial: Dial, wanted: Wanted, peer_key: str = "") -> None:
        """Join a link that is open to another process, which has taken its peer's place; any thread may call it.

        What the old one has sent stays; what the new one wants again is sent from the log. Frames of the epochs before
        `epoch`, which both ends must have, are not taken any more. The rest: as for `open_link`.
        """
        self._check_key(link, peer_name, peer_key)
        end = self._links[link].end
        spec = _spec(link, end.spec.peer_stage, peer_name, dial)
        session = Session(replace(self._identity, epoch=epoch), spec, self._limits, self._settings.allocate)
        switch = partial(end.relink, spec, session, wanted, peer_key)
        self._loop.submit(end, partial(self._loop.relink, end, self._dial_all(end, dial, peer_key), switch))

    def after_that(self, action: Callable[[], None]) -> None:
        """Call this in the I/O thread, when all that was asked of it before is done; any thread may ask."""
        self._loop.submit(None, action)

    def has_log(self, link: int, since: int) -> bool:
        """Whether all is kept that was sent on a link from this step on."""
        log = self._links[link].end.log
        return log is not None and log.is_complete_from(since)

    def widen(self, link: int, through: int | None) -> None:
        """See `DataEnd.widen`; any thread may call it."""
        end = self._links[link].end
        self._loop.submit(end, partial(end.widen, through))

    def hold(self, link: int) -> None:
        """The peer is lost, as others know, and will be replaced: do not give the link up; any thread may call it."""
        end = self._links[link].end
        self._loop.submit(end, lambda: end.session.hold())

    def abandon_step(self, link: int, step: int) -> None:
        """See `Session.abandon`; any thread may call it."""
        end = self._links[link].end
        self._loop.submit(end, lambda: end.session.abandon(step))

    def free_logs(self, step: int, droppable: int = 0) -> None:
        """See `FrameLog.free_before`; any thread may call it."""
        for link in list(self._links.values()):
            if link.end.log is not None:
                link.end.log.free_before(step, droppable)

    def _check_key(self, link: int, peer_name: str, peer_key: str) -> None:
        if bool(peer_key) != (self._keys is not None):
            raise LocalProtocolError(f"link {link} to {peer_name}: CURVE is on at one end and off at the other")

    def _dial_all(self, end: LinkEnd, dial: Dial, peer_key: str) -> list[Dialled]:
        connections = range(self._limits.connections if dial else 0)
        if isinstance(dial, RelayTicket):
            return [self._dial_relay(end, dial, peer_key, connection) for connection in connections]
        return [self._dial(end, dial, peer_key, connection) for connection in connections]

    def _dial_relay(self, end: LinkEnd, relay: RelayTicket, peer_key: str, connection: int = 0) -> Dialled:
        dealer = open_dealer(self._context, b"tahq", self._limits.peer_timeout_s, self._keys, peer_key, relay)
        address = f"the peer over {relay}"
        return Dialled(dealer, address, end, connection, endpoint=relay.endpoint(connection))

    def _dial(self, end: LinkEnd, address: str, peer_key: str, connection: int = 0) -> Dialled:
        canonical = format_address(*parse_address(address, str(end.spec)))
        dealer = open_dealer(self._context, b"tahq", self._limits.peer_timeout_s, self._keys, peer_key)
        return Dialled(dealer, canonical, end, connection)

    # Files

    def allow(self, public_keys: Iterable[str]) -> None:
        """Let the owners of these keys in, to fetch files; any thread may call it."""
        if self._reception is not None:
            self._loop.submit(None, partial(self._reception.gate.allow, *public_keys))

    def _files_session(self, spec: LinkSpec) -> Session:
        limits = replace(
            self._limits, connections=1, give_up_s=files.GIVE_UP_S, max_message_nbytes=files.MAX_MESSAGE_NBYTES
        )
        return Session(replace(self._identity, epoch=0), spec, limits)

    def _visit(self, route: bytes, hello: LinkHello, key: str) -> LinkEnd:
        asker = "the run's owner" if hello.stage == ANY_STAGE else f"stage {hello.stage}"
        spec = LinkSpec(FILES_LINK, ANY_STAGE, "", dials=False, title=f"files for {asker}")
        return ServingEnd(spec, self._files_session(spec), key, self.files)

    def serve_files(self, relay: RelayTicket, public_key: str) -> None:
        """Give files to the owner of this key over a relay; any thread may call it."""
        spec = LinkSpec(FILES_LINK, ANY_STAGE, "", dials=False, title=f"files for the run's owner over {relay}")
        end = ServingEnd(spec, self._files_session(spec), public_key, self.files)
        self._loop.open(end, [self._dial_relay(end, relay, public_key)])

    def _send_piece(self, end: LinkEnd, data: bytes) -> None:
        self._loop.submit(end, partial(end.say, Channel.FILES, data))

    @contextmanager
    def fetching(self, source: FileSource) -> Iterator[FetchingEnd]:
        """A link for files to a worker; returns before it is connected. Any thread may call it."""
        spec = LinkSpec(FILES_LINK, ANY_STAGE, "", dials=True, title=str(source))
        end = FetchingEnd(spec, self._files_session(spec), source.public_key, self._send_piece)
        with self._visiting(end, source.address):
            yield end

    def dial_failure(self, address: str, public_key: str, timeout_s: float) -> str:
        """Why the owner of a key cannot be dialled at host:port; empty: it can. Blocks; any thread may call it.

        Raises:
            TahqError: this worker is leaving, or the address or the key cannot be used.
        """
        spec = LinkSpec(FILES_LINK, ANY_STAGE, "", dials=True, title=f"trying {address}")
        end = TryingEnd(spec, self._files_session(spec), public_key)
        with self._visiting(end, address):
            end.met.wait(timeout_s)
            has_met = end.session.remote is End.OPEN
        return "" if has_met else end.obstacle or f"no answer in {timeout_s:g} s"

    @contextmanager
    def _visiting(self, end: LinkEnd, dial: Dial) -> Iterator[None]:
        if self._is_closed:
            raise PeerLostError(f"{end.spec}: this worker is leaving")
        if bool(end.peer_key) != (self._keys is not None):
            raise RemoteProtocolError(f"{end.spec}: CURVE is on at one end and off at the other")
        if isinstance(dial, RelayTicket):
            dialled = self._dial_relay(end, dial, end.peer_key)
        else:
            dialled = self._dial(end, dial, end.peer_key)
        self._loop.open(end, [dialled])
        try:
            yield
        finally:
            self._loop.submit(end, partial(self._loop.leave, end))

    def wait_connected(self, timeout_s: float) -> None:
        """Block until every open link has met its peer.

        Raises:
            PeerLostError: some peer did not come in time (all of them named), or refused us.
            RemoteProtocolError: a peer is not who it should be.
        """
        deadline_s = time.monotonic() + timeout_s
        ends = [link.end for link in self._links.values()]
        for end in ends:
            end.met.wait(max(0.0, deadline_s - time.monotonic()))
        for end in ends:
            if end.inbox.error is not None:
                raise end.inbox.error.with_traceback(None)
        missing = [end for end in ends if not end.met.is_set()]
        if missing:
            obstacles = [f"{end.spec}: {end.obstacle}" for end in missing if end.obstacle]
            advice = "check that the peer runs and that its address can be reached from here"
            raise PeerLostError(
                f"{', '.join(str(end.spec) for end in missing)}: not connected after {timeout_s:g} s; "
                f"{'; '.join(obstacles) or advice}"
            )

    def abort(self, reason: Exception) -> None:
        """Make every `recv` and `send` on every link raise `reason`, now and from now on; any thread may call it."""
        self._aborted = self._aborted or reason
        for link in list(self._links.values()):
            link.end.abort(self._aborted)

    def close(self, linger_s: float = 5.0) -> None:
        """Send what is queued, say goodbye on every link, release the sockets; safe to call twice.

        Waits at most `linger_s` for the peers to acknowledge what was sent.
        """
        if self._is_closed:
            return
        self._is_closed = True
        deadline_s = time.monotonic() + linger_s
        for link in self._links.values():
            link.close(linger_s=0.0)
        for link in self._links.values():
            link.end.flushed.wait(max(0.0, deadline_s - time.monotonic()))
        self._release()

    def abandon(self) -> None:
        """Release the sockets without BYE: another process will replace this one on every link."""
        if not self._is_closed:
            self._is_closed = True
            self._release()

    def _release(self) -> None:
        self._loop.stop()
        self._thread.join()
        self.files.close()
        self._context.destroy(linger=0)  # of sockets that the loop has not closed: commands that came too late
        for link in self._links.values():
            if link.end.log is not None:
                link.end.log.close()


class TryingEnd(LinkEnd):
    """A link that only shows whether a worker can be dialled."""

    is_temporary = True
    warns = False


def _spec(link: int, peer_stage: int, peer_name: str, dial: Dial) -> LinkSpec:
    if isinstance(dial, RelayTicket):
        return LinkSpec(link, peer_stage, f"{peer_name} over {dial}", dial.dials)
    name = " at ".join(dict.fromkeys(part for part in (peer_name, dial) if part))
    return LinkSpec(link, peer_stage, name, dials=bool(dial))
