"""The states of a session, the events that change them, and what happens then: one table.

A state is (this end, the peer). `Session` finds out which event has happened and carries out the actions.
"""

from enum import Enum


class End(Enum):
    """How far one end of a link is."""

    CONNECTING = "connecting"
    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"


class Event(Enum):
    """What can happen to a session."""

    MET = "HELLO has come on all connections"
    CLOSE = "close() was called; frames are queued, or the peer is there to hear BYE"
    CLOSE_IDLE = "close() was called; nothing is queued, and the peer is not there"
    SAID_BYE = "BYE was said on all connections"
    BYE = "BYE has come on all connections, and everything before it"
    FAULT = "BYE has come with a reason"
    LOST = "the peer lacks messages, or has not acknowledged all of them, after our BYE"
    RESET = "the peer knows nothing of this session"


_C, _O, _G, _X = End.CONNECTING, End.OPEN, End.CLOSING, End.CLOSED

TRANSITIONS: dict[tuple[End, End], dict[Event, tuple[End, End, str]]] = {
    # (local, remote): {event: (local, remote, action)}
    (_O, _C): {
        Event.MET: (_O, _O, "greet"),
        Event.CLOSE: (_G, _C, ""),
        Event.CLOSE_IDLE: (_X, _C, ""),
        Event.BYE: (_O, _X, "acknowledge"),
        Event.FAULT: (_O, _X, "fail"),
    },
    (_O, _O): {
        Event.CLOSE: (_G, _O, ""),
        Event.BYE: (_O, _X, "acknowledge"),
        Event.FAULT: (_O, _X, "fail"),
        Event.RESET: (_O, _X, "forget"),
    },
    (_O, _X): {
        Event.CLOSE_IDLE: (_X, _X, ""),
        Event.BYE: (_O, _X, "acknowledge"),
        Event.FAULT: (_O, _X, "acknowledge"),
    },
    (_G, _C): {
        Event.MET: (_G, _O, "greet"),
        Event.CLOSE_IDLE: (_X, _C, ""),
        Event.BYE: (_X, _X, "acknowledge"),
        Event.FAULT: (_X, _X, "fail"),
    },
    (_G, _O): {
        Event.SAID_BYE: (_X, _O, ""),
        Event.BYE: (_X, _X, "acknowledge"),
        Event.FAULT: (_X, _X, "fail"),
        Event.RESET: (_X, _X, "forget"),
    },
    (_X, _C): {Event.BYE: (_X, _X, ""), Event.FAULT: (_X, _X, "")},
    (_X, _O): {
        Event.LOST: (_G, _O, "retract"),
        Event.BYE: (_X, _X, ""),
        Event.FAULT: (_X, _X, ""),
        Event.RESET: (_X, _X, ""),
    },
    (_X, _X): {Event.BYE: (_X, _X, "acknowledge"), Event.FAULT: (_X, _X, "acknowledge")},
}
"""Every state of a session and every event that changes it; an event that is not listed changes nothing."""
