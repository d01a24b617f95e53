"""Messages from strangers to a worker's listening socket: none may be taken for the peer's.

A message is a true one, resealed after changes, in the wrong number of parts, or random bytes. It may make its sender a
peer only if it has the contents of the peer's HELLO: run, epoch, link, both stages, configuration, connection.
"""

import contextlib
import logging
import struct
from collections import Counter
from collections.abc import Iterator
from random import Random

import zmq
from support.session_pairs import RUN

from chaos.frame_fuzz import reseal, true_messages
from tahq.comm.link.frame import FrameKind, unpack_header
from tahq.comm.link.session import Session
from tahq.comm.link.spec import LinkSpec, PeerIdentity, SessionLimits, unpack_hello
from tahq.comm.zmq.gate import Gate
from tahq.comm.zmq.reception import Reception
from tahq.comm.zmq.transport import LinkEnd

_SPEC = LinkSpec(0, 0, "host0", dials=False)
_ROUTE = struct.Struct("<Q")


def fuzz_strangers(count: int, seed: int) -> dict[str, int]:
    """Each message comes from another stranger; returns counts of admitted and turned away."""
    dice, base = Random(seed), true_messages()
    counts: Counter[str] = Counter()
    with _router() as (router, gate):
        reception = _reception(router, gate)
        for number in range(count):
            parts = _parts(dice, base)
            arrival = reception.sort(_ROUTE.pack(number), [zmq.Frame(part) for part in parts])
            counts["turned_away" if arrival is None else "admitted"] += 1
            if arrival is not None:
                _check_hello(parts)
                reception = _reception(router, gate)  # a link that has its peer takes no other
    return dict(counts)


def _parts(dice: Random, base: list[tuple[bytes, bytes]]) -> list[bytes]:
    header, payload = dice.choice(base[:1] if dice.random() < 0.7 else base)
    match dice.randrange(10):
        case 0:
            return [header, payload]
        case 1:
            return [dice.randbytes(dice.randrange(200)) for _ in range(dice.randrange(4))]
        case 2:
            return [header]
        case 3:
            return [header, payload, payload]
        case _:
            return list(reseal(dice, header, payload))


def _check_hello(parts: list[bytes]) -> None:
    header, payload = parts
    said = unpack_header(header, payload, "stranger")
    hello = unpack_hello(payload, "stranger")
    assert (said.kind, said.id.run, said.epoch, said.link) == (FrameKind.HELLO, RUN, 1, 0)
    assert (hello.stage, hello.peer_stage, hello.config_hash) == (0, 1, "c0ffee")
    assert (hello.connection, hello.connections) == (0, 1)


def _reception(router: zmq.Socket[bytes], gate: Gate) -> Reception:
    reception = Reception(router, gate, {}, "127.0.0.1:1")
    session = Session(PeerIdentity(RUN, 1, 1, "c0ffee"), _SPEC, SessionLimits(1e6, 2.0))
    reception.open(LinkEnd(_SPEC, session))
    return reception


@contextlib.contextmanager
def _router() -> Iterator[tuple[zmq.Socket[bytes], Gate]]:
    """A real socket without connections: refusals go nowhere. Its warnings are not printed."""
    log = logging.getLogger("tahq.comm.zmq.reception")
    level = log.level
    log.setLevel(logging.ERROR)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        router = context.socket(zmq.ROUTER)
        gate = Gate(router, None, where="data port")
        yield router, gate
    finally:
        context.destroy(linger=0)
        log.setLevel(level)
