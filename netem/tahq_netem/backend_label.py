"""What a network is made by, in words that do not hide what it cannot show."""

from collections.abc import Mapping
from typing import Any


def backend_label(described: Mapping[str, Any]) -> str:
    """The backend's name, and for the relay that TCP's dynamics are not to be looked for.

    Args:
        described: what `Network.describe` says, or said when a result was stored.
    """
    caution = "" if described.get("shows_tcp_dynamics", True) else " (which shows no TCP dynamics)"
    return f"{described['backend']}{caution}"
