"""The session's own messages: HELLO, ACK, HEARTBEAT, RESEND, RESUME, BYE; their contents, and which of them are due.

docs/dev/protocol.md says what they mean. Nothing here decides when one is due.
"""

import struct
from collections.abc import Iterable

from tahq.comm.link.frame import FrameHeader, FrameKind, LogicalId, pack_header, unpack_header
from tahq.comm.link.outbound import Outgoing
from tahq.comm.link.spec import ANY_STAGE, LinkHello, LinkSpec, PeerIdentity, SessionLimits, unpack_hello
from tahq.errors import RemoteProtocolError

_IN_ORDER = (FrameKind.ACK, FrameKind.HELLO, FrameKind.RESEND, FrameKind.RESUME, FrameKind.HEARTBEAT)
"""Messages that do not wait for frames, in the order in which they go."""
_PRIORITY = {kind: priority for priority, kind in enumerate(_IN_ORDER)}
_ROUND = struct.Struct("<I")
_ROUND_AND_NUMBER = struct.Struct("<II")
_FIELDS = {FrameKind.RESEND: _ROUND, FrameKind.RESUME: _ROUND, FrameKind.HEARTBEAT: _ROUND_AND_NUMBER}
_MAX_REASON_NBYTES = 1024


class Signals:
    """Packs and checks the messages of one end of a link, and remembers which are due on which connection."""

    def __init__(self, identity: PeerIdentity, spec: LinkSpec, limits: SessionLimits) -> None:
        self._identity = identity
        self._spec = spec
        self._limits = limits
        self._id = LogicalId.of_session(identity.run_id)
        self._place = (identity.run_id, identity.epoch, spec.link)
        self._due: set[tuple[int, int]] = set()

    def __bool__(self) -> bool:
        return bool(self._due)

    def plan(self, kind: FrameKind, connections: Iterable[int] = (0,)) -> None:
        """Have a message of this kind sent on each of these connections, once."""
        priority = _PRIORITY[kind]
        self._due.update((priority, connection) for connection in connections)

    def cancel(self, kind: FrameKind, connection: int) -> None:
        """It need not be sent there any more."""
        self._due.discard((_PRIORITY[kind], connection))

    def is_due(self, kind: FrameKind) -> bool:
        """Whether one is due on connection 0."""
        return (_PRIORITY[kind], 0) in self._due

    def next(self) -> tuple[FrameKind, int]:
        """Kind and connection of the message that goes first."""
        priority, connection = min(self._due)
        return _IN_ORDER[priority], connection

    def pack(self, kind: FrameKind, sequence: int, now_s: float, payload: bytes = b"", connection: int = 0) -> Outgoing:
        """A message for the wire."""
        place = (kind, self._identity.epoch, self._spec.link, sequence, self._id)
        header = FrameHeader(*place, payload_nbytes=len(payload))
        return Outgoing(pack_header(header, payload), payload, now_s, connection)

    def pack_numbers(self, kind: FrameKind, sequence: int, now_s: float, connection: int, *numbers: int) -> Outgoing:
        """RESEND and RESUME with a round, or HEARTBEAT with a round and its own number."""
        return self.pack(kind, sequence, now_s, _FIELDS[kind].pack(*numbers), connection)

    def pack_hello(self, now_s: float, connection: int) -> Outgoing:
        """HELLO."""
        own = (self._identity.stage, self._spec.peer_stage, self._identity.config_hash)
        limits = (self._limits.connections, self._limits.receive_window_nbytes)
        return self.pack(FrameKind.HELLO, 0, now_s, LinkHello(*own, connection, *limits).pack(), connection)

    def pack_bye(self, sequence: int, now_s: float, connection: int, reason: str) -> Outgoing:
        """BYE."""
        text = reason.encode("utf-8", "replace")[:_MAX_REASON_NBYTES]
        return self.pack(FrameKind.BYE, sequence, now_s, text, connection)

    def unpack(self, data: bytes | memoryview, payload: bytes | memoryview) -> FrameHeader | None:
        """The header of a message from the peer; None if it is of an earlier epoch.

        Raises:
            RemoteProtocolError: it is damaged, or of another run, link or later epoch.
        """
        header = unpack_header(data, payload, self._spec)
        if header.epoch < self._identity.epoch:
            return None
        self._check_place(header)
        return header

    def _check_place(self, header: FrameHeader) -> None:
        got = (header.id.run, header.epoch, header.link)
        if got != self._place:
            raise RemoteProtocolError(f"{self._spec}: sent (run, epoch, link) {got}; expected {self._place}")

    def numbers(self, kind: FrameKind, payload: bytes | memoryview) -> tuple[int, ...]:
        """What `pack_numbers` has packed; RemoteProtocolError if the length is wrong."""
        fields = _FIELDS[kind]
        if len(payload) != fields.size:
            raise RemoteProtocolError(
                f"{self._spec}: sent {len(payload)} bytes with a {kind.name}; expected {fields.size}"
            )
        return fields.unpack(payload)

    def check_hello(self, header: FrameHeader, payload: bytes | memoryview) -> LinkHello:
        """Parse a HELLO and check that it is from our peer, about this link.

        Raises:
            RemoteProtocolError: it is not.
        """
        self._check_place(header)
        hello = unpack_hello(payload, str(self._spec))
        expected_stage = hello.stage if self._spec.peer_stage == ANY_STAGE else self._spec.peer_stage
        own_stage = hello.peer_stage if hello.peer_stage == ANY_STAGE else self._identity.stage
        got = (hello.stage, hello.peer_stage, hello.config_hash, hello.connections)
        expected = (expected_stage, own_stage, self._identity.config_hash, self._limits.connections)
        if got != expected:
            raise RemoteProtocolError(
                f"{self._spec}: sent (stage, peer's stage, configuration, connections) {got}; expected {expected}; "
                f"is it a worker of another run?"
            )
        return hello


def pack_reset(run_id: int, epoch: int, link: int) -> tuple[bytes, bytes]:
    """Header and payload of the answer to a message of a session that this process knows nothing of."""
    return pack_header(FrameHeader(FrameKind.RESET, epoch, link, 0, LogicalId.of_session(run_id)), b""), b""


def pack_refusal(hello: FrameHeader, reason: str) -> tuple[bytes, bytes]:
    """Header and payload of the BYE that answers a HELLO which is refused."""
    payload = f"refused: {reason}".encode()[:_MAX_REASON_NBYTES]
    bye = FrameHeader(FrameKind.BYE, hello.epoch, hello.link, 0, hello.id, payload_nbytes=len(payload))
    return pack_header(bye, payload), payload
