"""Connections cannot be reset where the kernel lacks a part; `test_networks` resets connections for real."""

import errno
import struct

import pytest

from tahq_netem.backends import tcp_reset

ERROR, DONE, CONNECTION = 2, 3, 20


def message(kind: int, body: bytes) -> bytes:
    return struct.pack("=IHHII", 16 + len(body), kind, 0, 0, 0) + body


def status(kind: int, number: int = 0) -> bytes:
    return message(kind, struct.pack("=i", -number))


class ScriptedKernel:
    """A netlink socket with these answers."""

    def __init__(self, *answers: bytes) -> None:
        self.answers = list(answers)

    def send(self, _request: bytes) -> None:
        pass

    def recv(self, _most: int) -> bytes:
        return self.answers.pop(0)

    def __enter__(self) -> "ScriptedKernel":
        return self

    def __exit__(self, *_exception: object) -> None:
        pass


NO_CONNECTION = status(ERROR, errno.ENOENT)


@pytest.mark.parametrize(
    ("answers", "can_reset"),
    [
        ((status(DONE), NO_CONNECTION), True),
        ((message(CONNECTION, bytes(72)) * 2, status(DONE), NO_CONNECTION), True),
        # Without tcp_diag the kernel answers as if there was no connection.
        ((NO_CONNECTION, NO_CONNECTION), False),
        ((status(DONE, errno.ENOENT), NO_CONNECTION), False),
        ((status(DONE), status(ERROR, errno.EOPNOTSUPP)), False),
        ((status(DONE), status(ERROR, errno.EPERM)), False),
    ],
)
def test_kernel_can_reset_if_it_lists_connections_and_looks_for_one(monkeypatch, answers, can_reset):
    monkeypatch.setattr(tcp_reset, "_open_kernel", lambda: ScriptedKernel(*answers))
    assert tcp_reset.can_reset() is can_reset
