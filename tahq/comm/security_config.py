"""`security:` of cluster.yaml."""

import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from tahq.comm.keys import parse_public_key, read_public_keys
from tahq.errors import UserError
from tahq.units import Section

_DIGITS = re.compile(r"[0-9a-fA-F]{16,}")


def _key_or_file(text: str) -> str:
    return parse_public_key(text) if _DIGITS.fullmatch(text) else text


class SecurityConfig(Section):
    """Who may take part, and by what the coordinator is known."""

    curve: bool = True
    """Whether parties are known by their keys, and what they say is encrypted."""
    key: str | None = Field(default=None, min_length=1)
    """File of the coordinator's secret key; None: this account's, which is made if there is none."""
    allow: list[Annotated[str, Field(min_length=1), AfterValidator(_key_or_file)]] = Field(default_factory=list)
    """Public keys of workers that are started by hand, and files of such."""

    def allowed_keys(self) -> frozenset[str]:
        """The public keys that `allow` names.

        Raises:
            UserError: an entry is neither a key nor a file of keys that can be read.
        """
        return frozenset(key for index, entry in enumerate(self.allow) for key in _keys_of(entry, index))


def _keys_of(entry: str, index: int) -> list[str]:
    if _DIGITS.fullmatch(entry):
        return [entry]
    path = Path(entry).expanduser()
    if not path.exists():
        raise UserError(f"security.allow.{index}: neither a public key of 64 digits nor a file: {entry}")
    try:
        return read_public_keys(path)
    except UserError as error:
        raise UserError(f"security.allow.{index}: {error}") from None
