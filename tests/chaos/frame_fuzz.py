"""Damaged and impossible frames against real sessions, in one process, on a virtual clock, with fixed seeds.

What counts as accepted:

- *corrupted* and *truncated*: bytes are changed, taken away or added, and the checksum is left as it was. Every such
  message must be refused with RemoteProtocolError, and must leave the session as it was.
- *resealed*: bytes of header and payload are changed and the checksum is made right again, as by a hostile
  peer. A message that a peer may send may be taken; any other must be refused with an error that names the peer. In
  both cases memory is only asked for within the limits, and nothing is delivered that was not posted.
- *duplicated*, *reordered*, *old-epoch*: a transfer in both directions in which such messages come between the true
  ones. Every frame must be delivered once, in order, with its own bytes.
"""

import zlib
from collections import Counter, deque
from collections.abc import Callable
from random import Random

import torch
from support.session_pairs import RUN, hear, met_sessions, pieces, urgent

from tahq.comm.link.frame import HEADER_NBYTES, Direction, Frame, FrameKind, LogicalId, Outgoing, Purpose
from tahq.comm.link.session import Session
from tahq.comm.link.spec import LinkSpec, PeerIdentity, SessionLimits
from tahq.comm.link.transitions import End
from tahq.errors import PeerLostError, RemoteProtocolError

FRAME_LIMIT_NBYTES = 8 * 1024 * 1024
_PIECE_NBYTES = 100
_EPOCH_AT = 32
"""Where the header has the epoch, 4 bytes little-endian (docs/dev/protocol.md)."""
_LIMITS = SessionLimits(1e6, 2.0, _PIECE_NBYTES, 1000, 16, FRAME_LIMIT_NBYTES, receive_window_nbytes=1000)
Raw = tuple[bytes, bytes]
"""Header and payload."""


def _frame(number: int, direction: Direction, nbytes: int) -> Frame:
    id = LogicalId(RUN, 0, number, Purpose.TRAIN, 0, 0, direction)
    payload = torch.arange(nbytes, dtype=torch.int32).add(number).to(torch.uint8)
    return Frame(id, 0, torch.uint8, (nbytes,), payload)


def _raw(message: Outgoing) -> Raw:
    return bytes(message.header), bytes(message.payload)


def true_messages() -> list[Raw]:
    """Messages of every kind that a peer may send to the upper end of a link."""
    lower, upper = met_sessions(_LIMITS)
    messages = [_raw(message) for message in _greeting()]
    for number in range(4):
        lower.send(_frame(number, Direction.FORWARD, 130 * number), 0.0)
        upper.send(_frame(number, Direction.BACKWARD, 50), 0.0)
    for now_s in (0.0, 2.0, 4.0):
        for session in (lower, upper):
            if session.timer_s <= now_s:
                session.handle_timer(now_s)
        to_upper = [*urgent(lower, now_s), *pieces(lower, now_s)]
        lost = to_upper[-2:-1] if now_s == 0.0 else []
        messages += map(_raw, to_upper)
        hear(upper, [message for message in to_upper if message not in lost], now_s)
        from_upper = [*urgent(upper, now_s), *pieces(upper, now_s)]
        # one piece is lost each way, so that both ends ask for something again
        data = [message for message in from_upper if message.header[5] == FrameKind.DATA][:1]
        hear(lower, [message for message in from_upper if now_s or message not in data], now_s)
    messages += [_raw(message) for message in (*urgent(lower, 4.0), *pieces(lower, 4.0))]
    lower.close(4.0)
    messages += [_raw(message) for message in (*urgent(lower, 4.0), *pieces(lower, 4.0))]
    return messages


def _greeting() -> list[Outgoing]:
    return urgent(Session(PeerIdentity(RUN, 1, 0, "c0ffee"), LinkSpec(0, 1, "host1", dials=True), _LIMITS))


def fuzz_damaged(family: str, count: int, seed: int) -> dict[str, int]:
    """Give corrupted or truncated messages to one session that goes on delivering frames; returns counts."""
    damage = {"corrupted": _corrupt, "truncated": _truncate}[family]
    dice, base = Random(seed), true_messages()
    session = _Transfer(Random(seed + 1))
    for index in range(count):
        header, payload = damage(dice, *dice.choice(base))
        outcome, said = _outcome(session.ends[1], header, payload, session.now_s)
        assert outcome == "refused", f"a {family} message was {outcome}: {header.hex()} {payload.hex()}"
        assert "link 0 to stage 0" in said, said
        if index % 64 == 0:
            session.turn()
    session.finish()
    return {"refused": count, "frames_delivered": session.num_delivered}


def _corrupt(dice: Random, header: bytes, payload: bytes) -> Raw:
    message = bytearray(header + payload)
    for _ in range(dice.randint(1, 8)):
        message[dice.randrange(len(message))] ^= dice.randint(1, 255)
    if message == header + payload:  # the same byte twice
        message[dice.randrange(len(message))] ^= dice.randint(1, 255)
    return bytes(message[:HEADER_NBYTES]), bytes(message[HEADER_NBYTES:])


def _truncate(dice: Random, header: bytes, payload: bytes) -> Raw:
    match dice.randrange(4):
        case 0:
            return header[: dice.randrange(HEADER_NBYTES)], payload
        case 1 if payload:
            return header, payload[: dice.randrange(len(payload))]
        case 2:
            return header[: dice.randrange(HEADER_NBYTES)], b""
        case _:
            return header, payload + dice.randbytes(dice.randint(1, 40))


def fuzz_resealed(count: int, seed: int) -> dict[str, int]:
    """Give changed and resealed messages to sessions in the middle of a frame; returns counts by outcome."""
    dice, base = Random(seed), true_messages()
    return dict(Counter(_give(*reseal(dice, *dice.choice(base))) for _ in range(count)))


def reseal(dice: Random, header: bytes, payload: bytes) -> Raw:
    """A message with up to three of its fields, or bytes of its payload, changed, and a checksum that is right."""
    fields, changed = bytearray(header[:-4]), bytearray(payload)
    for _ in range(dice.randint(1, 3)):
        if changed and dice.random() < 0.3:
            changed[dice.randrange(len(changed))] = dice.randrange(256)
            continue
        # half of the time a number is made extreme as a whole, or magic and version would take most of the changes
        start = dice.randrange(4, len(fields))
        width = dice.choice((1, 1, 2, 4, 8))
        value = dice.choice((b"\0", b"\xff", b"\x7f", b"\x01", None))
        for at in range(start, min(start + width, len(fields))):
            fields[at] = dice.randrange(256) if value is None else value[0]
    if dice.random() < 0.1:
        changed = changed[: dice.randrange(len(changed) + 1)]
        fields[76:80] = len(changed).to_bytes(4, "little")
    sealed = bytes(fields) + zlib.crc32(changed, zlib.crc32(fields)).to_bytes(4, "little")
    return sealed, bytes(changed)


def _give(header: bytes, payload: bytes) -> str:
    asked: list[int] = []

    def allocate(nbytes: int) -> torch.Tensor:
        asked.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)

    session = _in_the_middle(allocate)
    posted = {_frame(number, Direction.FORWARD, 0).id for number in range(4)}
    outcome, said = _outcome(session, header, payload, 0.0)
    assert outcome == "taken" or "link 0 to stage 0" in said, said
    assert sum(asked) <= FRAME_LIMIT_NBYTES, f"{asked} bytes were asked for"
    assert {frame.id for frame in session.take_delivered()} <= posted
    urgent(session)
    pieces(session)
    return outcome


def _outcome(session: Session, header: bytes, payload: bytes, now_s: float) -> tuple[str, str]:
    """How a session reacts to a message, and the text of its error; any other error fails the row."""
    try:
        session.receive(header, payload, now_s)
    except RemoteProtocolError as error:
        return "refused", str(error)
    except PeerLostError as error:
        return "taken as BYE", str(error)
    return "taken", ""


def _in_the_middle(allocate: Callable[[int], torch.Tensor]) -> Session:
    """The upper end of an open link: four frames are posted, the first of three pieces of the second has come."""
    session = Session(PeerIdentity(RUN, 1, 1, "c0ffee"), LinkSpec(0, 0, "host0", dials=False), _LIMITS, allocate)
    for number in range(4):
        session.expect(_frame(number, Direction.FORWARD, 0).id, 1000)
    for header, payload in _OPENING:
        session.receive(header, payload, 0.0)
    session.send(_frame(0, Direction.BACKWARD, 50), 0.0)
    urgent(session)
    pieces(session)
    session.take_delivered()
    assert session.remote is End.OPEN
    return session


def _opening() -> list[Raw]:
    lower, _ = met_sessions(_LIMITS)
    lower.send(_frame(0, Direction.FORWARD, 0), 0.0)
    lower.send(_frame(1, Direction.FORWARD, 230), 0.0)
    return [_raw(message) for message in (*_greeting(), *pieces(lower)[:2])]


def fuzz_order(family: str, count: int, seed: int) -> dict[str, int]:
    """Duplicate or reorder messages of a transfer, or put messages of an old epoch between them; returns counts."""
    transfer = _Transfer(Random(seed))
    disturb = {"duplicated": transfer.duplicate, "reordered": transfer.reorder, "old-epoch": transfer.replay}[family]
    while transfer.num_disturbed < count:
        transfer.turn(disturb)
    transfer.finish()
    return {"disturbed": transfer.num_disturbed, "frames_delivered": transfer.num_delivered}


class _Transfer:
    """Two sessions that send each other frames; every frame must arrive once, in order, whole."""

    def __init__(self, dice: Random) -> None:
        self.dice = dice
        self.ends = met_sessions(_LIMITS)
        self.now_s = 0.0
        self.num_disturbed = 0
        self.num_delivered = 0
        self._number = 0
        self._waiting: tuple[deque[Frame], deque[Frame]] = (deque(), deque())
        """By the end that sends them."""
        self._past: list[Raw] = []

    def turn(self, disturb: Callable[[list[Raw]], list[Raw]] = list) -> None:
        """Send a few frames each way, and carry all messages, disturbed."""
        for end in (0, 1):
            frame = _frame(self._number, Direction(end), self.dice.randrange(400))
            self.ends[1 - end].expect(frame.id, 400)
            self.ends[end].send(frame, self.now_s)
            self._waiting[end].append(frame)
        self._number += 1
        self._carry(disturb)

    def finish(self) -> None:
        """Everything that was sent arrives, now undisturbed."""
        for _ in range(40):
            self._carry(list)
        assert not self._waiting[0]
        assert not self._waiting[1]

    def _carry(self, disturb: Callable[[list[Raw]], list[Raw]]) -> None:
        for end in (0, 1):
            session, other = self.ends[end], self.ends[1 - end]
            said = [_raw(message) for message in (*urgent(session, self.now_s), *pieces(session, self.now_s))]
            for header, payload in disturb(said):
                other.receive(header, payload, self.now_s)
            for frame in other.take_delivered():
                expected = self._waiting[end].popleft()
                assert frame.id == expected.id
                assert torch.equal(frame.payload, expected.payload)
                self.num_delivered += 1
        self.now_s += 0.01
        for session in self.ends:
            if session.timer_s <= self.now_s:
                session.handle_timer(self.now_s)

    def duplicate(self, said: list[Raw]) -> list[Raw]:
        """Each message two or three times."""
        times = [self.dice.randint(2, 3) for _ in said]
        self.num_disturbed += sum(times) - len(times)
        return [message for message, count in zip(said, times, strict=True) for _ in range(count)]

    def reorder(self, said: list[Raw]) -> list[Raw]:
        """Messages in any order, within a window of four."""
        result = list(said)
        for start in range(0, len(result), 4):
            window = result[start : start + 4]
            self.dice.shuffle(window)
            self.num_disturbed += sum(one is not other for one, other in zip(window, said[start:], strict=False))
            result[start : start + 4] = window
        return result

    def replay(self, said: list[Raw]) -> list[Raw]:
        """Before each message an earlier one of this transfer, as if sent in the previous epoch."""
        result: list[Raw] = []
        for message in said:
            header, payload = self.dice.choice(self._past) if self._past else message
            result += [_of_epoch(0, header, payload), message]
            self.num_disturbed += 1
        self._past = [*self._past[-200:], *said]
        return result


def _of_epoch(epoch: int, header: bytes, payload: bytes) -> Raw:
    fields = bytearray(header[:-4])
    fields[_EPOCH_AT : _EPOCH_AT + 4] = epoch.to_bytes(4, "little")
    return bytes(fields) + zlib.crc32(payload, zlib.crc32(fields)).to_bytes(4, "little"), payload


_OPENING = tuple(_opening())
