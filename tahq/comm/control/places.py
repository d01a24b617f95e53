"""Whom a coordinator remembers: those that it leads, and as many of the others as were heard last.

Whoever says something that can be read gets a place, and needs one to be answered. Without CURVE that may be anybody,
under as many names as he likes. So a place is kept only for whom the coordinator has told something that is for
members; of the rest, who has been silent for longest makes room for a newcomer.
"""

from collections import OrderedDict
from collections.abc import Iterator

from tahq.comm.control.clock_offset import ClockComparison
from tahq.comm.control.messages import Abort, Bye, Heartbeat, Message, Refuse, StartOver
from tahq.comm.control.numbering import Numbering

MAX_STRANGERS = 4096
_FAREWELLS = (Refuse, Abort, Bye, StartOver)
"""Who is told one of these is no member any more."""


class Place:
    """What is remembered of one: the numbers of messages, the key that it has, its clock; whether it is heard still."""

    __slots__ = ("clocks", "is_lost", "key", "numbering")

    def __init__(self, numbering: Numbering, key: str) -> None:
        self.numbering = numbering
        self.key = key
        self.clocks: ClockComparison | None = None
        self.is_lost = False


class Places:
    """By identity; bounded whatever strangers say.

    Args:
        max_strangers: the most that are remembered of those who are no members.
    """

    def __init__(self, max_strangers: int = MAX_STRANGERS) -> None:
        self._max_strangers = max_strangers
        self._members: dict[bytes, Place] = {}
        self._strangers: OrderedDict[bytes, Place] = OrderedDict()
        """Who was heard last comes last."""

    def __len__(self) -> int:
        return len(self._members) + len(self._strangers)

    def __iter__(self) -> Iterator[tuple[bytes, Place]]:
        """All of them, as they are now."""
        return iter([*self._members.items(), *self._strangers.items()])

    def find(self, identity: bytes) -> Place | None:
        """The place of whoever has one."""
        return self._members.get(identity) or self._strangers.get(identity)

    def give(self, identity: bytes, place: Place) -> None:
        """Remember a newcomer, and forget who has been silent for longest if there are too many."""
        self._strangers[identity] = place
        if len(self._strangers) > self._max_strangers:
            self._strangers.popitem(last=False)

    def heard(self, identity: bytes) -> None:
        """Somebody with a place gives a sign of life."""
        if identity in self._strangers:
            self._strangers.move_to_end(identity)

    def told(self, identity: bytes, message: Message) -> None:
        """Somebody with a place is told this, which may make a member of it, or end that."""
        if isinstance(message, Heartbeat):
            return
        place = self._members.pop(identity, None) or self._strangers.pop(identity, None)
        if place is None:
            return
        if isinstance(message, _FAREWELLS):
            self.give(identity, place)
        else:
            self._members[identity] = place
