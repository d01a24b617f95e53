"""Where this account joined last, in a file beside its key: so it can come back without the invite.

The file has the coordinator's address and public key, and no secret.
"""

from pathlib import Path

from tahq.comm.keys import default_key_path, parse_public_key
from tahq.comm.zmq.addresses import parse_address
from tahq.errors import UserError


def last_joined() -> tuple[str, str]:
    """The coordinator's host:port and public key, where this account joined last; UserError if it has not."""
    path = _joined_path()
    try:
        address, key = path.read_text(encoding="utf-8").split()
        parse_address(address, str(path))
        return address, parse_public_key(key)
    except FileNotFoundError:
        raise UserError("this account has not joined a run yet; give the invite: tahq join INVITE") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be used ({error}); give the invite again: tahq join INVITE") from None


def note_joined(address: str, coordinator: str) -> None:
    """Note the coordinator's host:port and public key; UserError if that cannot be written."""
    path = _joined_path()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_text(f"{address} {coordinator}\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def _joined_path() -> Path:
    return default_key_path().with_name("joined")
