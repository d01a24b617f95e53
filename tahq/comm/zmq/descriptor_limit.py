"""How many connections and files a process may have open; ZMQ accepts connections for as long as it may."""

import resource
from typing import Final

ENOUGH: Final = 16_384
"""Some thousand connections that never say who they are, and all that a process needs beside them."""


def raise_descriptor_limit() -> None:
    """Allow this process as many as `ENOUGH`, if whoever runs the machine does; what it has is not lowered."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(ENOUGH, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
