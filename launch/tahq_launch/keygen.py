"""`tahq keygen`: a key for this account, or for one machine, and the public half of it to hand out."""

from pathlib import Path

from tahq.comm.keys import KeyPair, default_key_path, new_key_pair, read_key_file, write_key_file
from tahq.errors import UserError


def keygen(out: Path | None, *, show: bool) -> KeyPair:
    """Make a key and write the secret half of it, or read the one that there is.

    Args:
        out: file of the secret key; None: this account's.
        show: make none.

    Raises:
        UserError: there is one already, or there is none to show, or the file cannot be written or read.
    """
    path = out or default_key_path()
    if show:
        return read_key_file(path)
    keys = new_key_pair()
    try:
        write_key_file(path, keys)
    except FileExistsError:
        raise UserError(
            f"{path} is there already, and may be what others know this machine by; `tahq keygen --show` prints "
            f"its public key, --out names another file"
        ) from None
    return keys
