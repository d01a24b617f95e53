"""Every error that tahq raises on purpose, and the exit status each one ends a process with.

1 is an internal error, 2 the user's mistake, 3 a lost peer (the run can be resumed), 4 out of memory, 5 a loss that is
not finite. A message names the value, what was expected, where, and the next thing to do. Values in it are cut by
`brief`.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LONG_WORD = re.compile(r"\S{300,}")
_MAX_MESSAGE = 4000


def brief(text: str, most: int = 80) -> str:
    """A value for an error message, cut to about `most` characters."""
    return text if len(text) <= most else f"{text[: most - 20]}… ({len(text):,} characters)"


def message_of(error: BaseException) -> str:
    """An error's message and its notes; overlong values in it are cut."""
    text = "; ".join([str(error), *getattr(error, "__notes__", [])])
    return brief(_LONG_WORD.sub(lambda word: brief(word[0]), text), _MAX_MESSAGE)


class TahqError(Exception):
    """Root of tahq's errors; `exit_status` is that of a process that ends with this error."""

    exit_status = 1


class UserError(TahqError):
    """Something the user gave is wrong; reported as one line, without a traceback."""

    exit_status = 2


@contextmanager
def file_errors(action: str, path: Path, kind: type[UserError] = UserError) -> Iterator[None]:
    """Turn an OSError inside into this kind of error, which says what cannot be done with the file, and why."""
    try:
        yield
    except OSError as error:
        raise kind(f"cannot {action} {path}: {error.strerror}") from error


class ConfigError(UserError):
    """A configuration that cannot be read or does not make sense."""


class DataError(UserError):
    """Text, tokens or a tokenizer that cannot be used."""


class ModelError(UserError):
    """A model that cannot be built, divided or loaded."""


class SnapshotError(UserError):
    """A checkpoint that is missing, damaged, or does not fit the configuration."""


class NetworkError(UserError):
    """A network of hosts that this machine, its kernel or this user cannot make or change."""


class RefusedError(UserError):
    """The coordinator refused this worker."""


class CodecError(TahqError):
    """Bytes that are not a valid stream of the codec asked to decode them, or a tensor that no stream holds."""


class ScheduleError(TahqError):
    """A schedule that is incomplete, out of order or deadlocks."""


class LocalProtocolError(TahqError):
    """This process broke the protocol."""


class RemoteProtocolError(TahqError):
    """A peer broke the protocol; the message names it."""

    exit_status = 3


class PeerLostError(TahqError):
    """A peer has gone; what was committed is safe and the run can be resumed."""

    exit_status = 3


class FrameLogError(PeerLostError):
    """Frames that a neighbour needs again are not in the log of a link, or cannot be read."""

    def __init__(self, message: str, link: int) -> None:
        super().__init__(message)
        self.link = link


class OutOfMemoryError(TahqError):
    """A stage does not fit into its device's memory."""

    exit_status = 4


class NonFiniteError(TahqError):
    """Training was halted because of NaN or infinity."""

    exit_status = 5


class RunAbortedError(TahqError):
    """The coordinator ended the run; message and exit status are the coordinator's."""

    def __init__(self, message: str, exit_status: int) -> None:
        super().__init__(message)
        self.exit_status = exit_status


class NothingToDoError(TahqError):
    """The run to resume has done all its steps; nothing was started, and nothing is wrong."""

    exit_status = 0


class StartOverError(TahqError):
    """The coordinator asked this worker to forget its state and join again."""

    exit_status = 3


class InterruptedRunError(TahqError):
    """The run was stopped by a signal, in an orderly way."""

    exit_status = 130

    def __init__(self, message: str, signal_number: int = 2) -> None:
        super().__init__(message)
        self.exit_status = 128 + signal_number
