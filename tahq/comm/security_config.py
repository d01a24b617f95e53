"""`security:` of cluster.yaml."""

import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from tahq.comm.keys import parse_public_key, read_public_keys
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
            UserError: a file of them cannot be read.
        """
        keys: set[str] = set()
        for entry in self.allow:
            keys.update([entry] if _DIGITS.fullmatch(entry) else read_public_keys(Path(entry).expanduser()))
        return frozenset(keys)
