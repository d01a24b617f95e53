"""An invite as one word that fits into a chat message, its making, and what a machine that has used one keeps.

``tahq-`` and base64url of: format (u8), the coordinator's public key (32 bytes), the invite's one-time secret key (32),
port (u16, little-endian), host (UTF-8), and the first 4 bytes of BLAKE2b of all that.
"""

import base64
import binascii
import hashlib
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tahq.comm.control.members import Members
from tahq.comm.keys import KeyPair, default_key_path, key_pair_of, new_key_pair, parse_public_key
from tahq.comm.zmq.addresses import LOOPBACK, format_address, local_address_towards, parse_address
from tahq.config.cluster import ClusterConfig
from tahq.errors import UserError, file_errors
from tahq_launch.start.run_keys import make_run_keys

PREFIX: Final = "tahq-"
_FORMAT: Final = 1
_HEAD = struct.Struct("<B32s32sH")
_CHECK_NBYTES: Final = 4
_ANYWHERE: Final = "192.0.2.1:9"
"""An address of the internet, which is only looked up in the routing table."""


@dataclass(frozen=True, slots=True)
class Invitation:
    """Where the coordinator listens, its public key, and the one-time pair; printing it leaves the secret out."""

    address: str
    coordinator: str
    keys: KeyPair = field(repr=False)

    @property
    def text(self) -> str:
        """The one word, with the secret."""
        host, port = parse_address(self.address, "address")
        head = _HEAD.pack(_FORMAT, bytes.fromhex(self.coordinator), bytes.fromhex(self.keys.secret), port)
        body = head + host.encode()
        return PREFIX + base64.urlsafe_b64encode(body + _check(body)).decode().rstrip("=")


def parse_invitation(text: str) -> Invitation:
    """The invite that a person was given; UserError, which does not repeat it, if it is not whole."""
    word = "".join(text.split())  # a chat program may have broken the line
    if not word.startswith(PREFIX):
        raise UserError(f"expected an invite, which begins with {PREFIX}, as `tahq invite` prints it")
    try:
        encoded = word.removeprefix(PREFIX)
        data = base64.b64decode(encoded + "=" * (-len(encoded) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise UserError(f"this invite is damaged; {_AGAIN}") from None
    body, check = data[:-_CHECK_NBYTES], data[-_CHECK_NBYTES:]
    if len(body) <= _HEAD.size or check != _check(body):
        raise UserError(f"this invite is cut off or altered; {_AGAIN}")
    version, coordinator, secret, port = _HEAD.unpack_from(body)
    if version != _FORMAT:
        raise UserError(
            f"this invite has format {version}, this version of tahq reads {_FORMAT}; install the inviter's"
        )
    host = body[_HEAD.size :].decode("utf-8", "replace")
    return Invitation(format_address(host, port), coordinator.hex(), key_pair_of(secret.hex()))


_AGAIN: Final = "copy the whole word again, or ask for another invite"


def _check(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_CHECK_NBYTES).digest()


def address_of(config: ClusterConfig) -> str:
    """host:port at which other machines reach the coordinator; UserError if it is not known beforehand."""
    bind, advertise = config.run.bind, config.run.advertise
    host, port = parse_address(advertise or bind, "run.advertise" if advertise else "run.bind")
    if port == 0:
        raise UserError("run.bind: an invite names the coordinator's port, so it cannot be 0; use 0.0.0.0:7700")
    if host in ("0.0.0.0", "::"):
        host = local_address_towards(_ANYWHERE)
    return format_address(host, port)


def make_invites(config: ClusterConfig, members: Members, count: int, lifetime_s: float) -> list[Invitation]:
    """New invites, whose public halves are noted with the members; UserError if this run cannot be joined by invite."""
    keys = make_run_keys(config, starts_workers=False)
    if keys is None:
        raise UserError("security.curve is off, and an invite is a key; remove that line")
    address = address_of(config)
    invites = [Invitation(address, keys.coordinator.public, new_key_pair()) for _ in range(count)]
    for invite in invites:
        members.invite(invite.keys.public, lifetime_s)
    return invites


def reach_warning(address: str) -> str:
    """A note about an address that machines elsewhere cannot dial; empty: it looks as if they can."""
    host, _ = parse_address(address, "address")
    if host.startswith(LOOPBACK):
        return f"note: only this machine reaches {address}; for others set run.bind, and run.advertise behind a router"
    private = ("10.", "192.168.", "169.254.", "fe80:", *(f"172.{number}." for number in range(16, 32)))
    if host.startswith(private):
        return (
            f"note: {address} is reached from this network or VPN only; for others forward the port and set "
            "run.advertise to the router's address"
        )
    return ""


# -- where this account joined last, in a file without secrets beside its key ---------------------------


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
    with file_errors("write", path):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_text(f"{address} {coordinator}\n", encoding="utf-8")


def _joined_path() -> Path:
    return default_key_path().with_name("joined")
