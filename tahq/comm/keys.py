"""CURVE keys: one pair per party, as text and as a file that only its owner can read; `security:` of cluster.yaml.

A key is 32 bytes, written as 64 hexadecimal digits, which neither a shell nor YAML misreads. The file of a secret key
begins with a word that says so, so that it is not mistaken for the public one.
"""

import contextlib
import os
import re
import stat
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import zmq
from pydantic import AfterValidator, Field
from zmq.utils import z85

from tahq.errors import UserError
from tahq.units import Section

_KEY = re.compile(r"[0-9a-f]{64}")
_DIGITS = re.compile(r"[0-9a-fA-F]{16,}")
_SECRET_WORD = "tahq-secret-key"


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A party's key pair, in hexadecimal digits; printing a pair leaves the secret one out."""

    public: str
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a worker needs to join: its own pair, and the public key of its coordinator.

    With `is_invite` the pair is the one-time pair of an invite, which only serves to have another key admitted.
    """

    own: KeyPair
    coordinator: str
    is_invite: bool = False


def new_key_pair() -> KeyPair:
    """A pair from the system's source of randomness."""
    public, secret = zmq.curve_keypair()
    return KeyPair(z85.decode(public).hex(), z85.decode(secret).hex())


def key_pair_of(secret: str) -> KeyPair:
    """The pair of a secret key; ValueError, which does not repeat the text, if it is malformed."""
    if _KEY.fullmatch(secret) is None:
        raise ValueError("expected a secret key of 64 hexadecimal digits")
    public = zmq.curve_public(z85.encode(bytes.fromhex(secret)))
    return KeyPair(z85.decode(public).hex(), secret)


def parse_public_key(text: str) -> str:
    """A public key in its canonical form; ValueError if it is malformed."""
    key = text.strip().lower()
    if key.startswith(_SECRET_WORD):
        raise ValueError("this is a secret key; expected a public one, as `tahq keygen` prints it")
    if _KEY.fullmatch(key) is None:
        raise ValueError(
            f"expected a public key of 64 hexadecimal digits, as `tahq keygen` prints it; got {text!r:.80}"
        )
    return key


def default_key_path() -> Path:
    """File of this account's key: ``$XDG_CONFIG_HOME/tahq/key.secret``, else under ``~/.config``."""
    folder = os.environ.get("XDG_CONFIG_HOME")
    return (Path(folder) if folder else Path.home() / ".config") / "tahq" / "key.secret"


def read_key_file(path: Path) -> KeyPair:
    """The pair of the secret key in a file; UserError if it is unreadable, readable by others, or holds no key."""
    try:
        with path.open(encoding="ascii", errors="replace") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            content = file.read(4096)
    except FileNotFoundError:
        raise UserError(f"there is no key at {path}; make one with `tahq keygen --output {path}`") from None
    except OSError as error:
        raise UserError(f"the key {path} cannot be read: {error.strerror}") from None
    if mode & 0o077:
        raise UserError(f"the secret key {path} is open to others (mode {mode:o}); close it with: chmod 600 {path}")
    word, _, secret = content.strip().partition(" ")
    try:
        if word != _SECRET_WORD:
            raise ValueError("it does not begin with " + _SECRET_WORD)
        return key_pair_of(secret)
    except ValueError as error:
        raise UserError(f"{path} holds no secret key: {error}; make another with `tahq keygen`") from None


def write_key_file(path: Path, keys: KeyPair) -> None:
    """Write a secret key to a new file, mode 600, atomically; its folder is created if missing.

    FileExistsError: the file exists. UserError: it cannot be written.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", prefix=".key-", dir=path.parent) as file:  # of mode 600
            file.write(f"{_SECRET_WORD} {keys.secret}\n")
            file.flush()
            os.fsync(file.fileno())
            os.link(file.name, path)  # which fails where there is a file, unlike a rename
    except FileExistsError:
        raise
    except OSError as error:
        raise UserError(f"cannot write the key {path}: {error.strerror}") from error


def read_or_make_key_file(path: Path) -> KeyPair:
    """The pair in a file, which is created if missing; if several processes do so at once, one wins."""
    if not path.exists():
        with contextlib.suppress(FileExistsError):  # another process was faster
            write_key_file(path, new_key_pair())
    return read_key_file(path)


def read_public_keys(path: Path) -> list[str]:
    """The public keys in a file, one per line; the rest of a line, and lines that begin with #, are comments."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UserError(f"the list of public keys {path} cannot be read: {reason}") from None
    keys = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            keys.append(parse_public_key(words[0]))
        except ValueError as error:
            raise UserError(f"{path}:{number}: {error}") from None
    return keys


def _key_or_file(text: str) -> str:
    return parse_public_key(text) if _DIGITS.fullmatch(text) else text


class SecurityConfig(Section):
    """The parties that may take part. Runs whose workers are all started from here need none of this.

    Example: `security: {allow: [workers.keys]}`
    """

    curve: bool = True
    """Whether parties are known by their keys and all traffic is encrypted. Off: anyone who reaches a port can take
    part."""
    key: str | None = Field(default=None, min_length=1)
    """File of the coordinator's secret key. Not set: this account's, which is made if missing."""
    allow: list[Annotated[str, Field(min_length=1), AfterValidator(_key_or_file)]] = Field(default_factory=list)
    """Public keys of workers that are started by hand under other keys than the coordinator's, or files with such
    keys."""

    def allowed_keys(self) -> frozenset[str]:
        """The public keys that `allow` names; UserError if an entry is neither a key nor a readable file of keys."""
        keys: set[str] = set()
        for index, entry in enumerate(self.allow):
            try:
                if _DIGITS.fullmatch(entry):
                    keys.add(entry)
                elif (path := Path(os.path.expanduser(entry))).exists():
                    keys.update(read_public_keys(path))
                else:
                    raise UserError(f"expected a public key of 64 digits or an existing file; got {entry}")
            except UserError as error:
                raise UserError(f"security.allow.{index}: {error}") from None
        return frozenset(keys)
