"""Commands that run as root without a root's rights over networks, as in most containers."""

import ctypes
import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

_PR_CAPBSET_DROP = 24
_CAP_NET_ADMIN, _CAP_SYS_ADMIN = 12, 21


def run_without_network_rights(
    argv: Sequence[str], env: Mapping[str, str] | None = None, **options: Any
) -> "subprocess.CompletedProcess[str]":
    """`subprocess.run` of a program that may make no namespace and no device."""
    libc = ctypes.CDLL(None, use_errno=True)

    def drop() -> None:
        for capability in (_CAP_NET_ADMIN, _CAP_SYS_ADMIN):
            if libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0):
                os._exit(126)

    return subprocess.run(argv, env=env, capture_output=True, text=True, preexec_fn=drop, **options)
