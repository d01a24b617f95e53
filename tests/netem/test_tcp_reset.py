"""What is made of the kernel's answers where it lacks a part; `test_faults_on_hosts` resets connections for real."""

import errno
import struct

import pytest

from tahq.errors import NetworkError
from tahq_netem.backends import tcp_reset

ERROR, DONE, CONNECTION = 2, 3, 20
IDENTITY = bytes(range(48))


def message(kind: int, body: bytes) -> bytes:
    return struct.pack("=IHHII", 16 + len(body), kind, 0, 0, 0) + body


def status(kind: int, number: int = 0) -> bytes:
    return message(kind, struct.pack("=i", -number))


class ScriptedKernel:
    """A netlink socket whose answers are known beforehand."""

    def __init__(self, *answers: bytes) -> None:
        self.answers = list(answers)
        self.requests: list[int] = []

    def send(self, request: bytes) -> None:
        self.requests.append(struct.unpack_from("=IH", request)[1])

    def recv(self, _most: int) -> bytes:
        return self.answers.pop(0)

    def __enter__(self) -> "ScriptedKernel":
        return self

    def __exit__(self, *_exception: object) -> None:
        pass


@pytest.fixture
def can_reset(monkeypatch):
    """can_reset(answer, …) is what is concluded from these answers."""

    def conclude(*answers: bytes) -> bool:
        monkeypatch.setattr(tcp_reset, "_open_kernel", lambda: ScriptedKernel(*answers))
        return tcp_reset.can_reset()

    return conclude


NO_CONNECTION = status(ERROR, errno.ENOENT)


def test_kernel_that_lists_connections_and_looks_for_one_can_reset(can_reset):
    assert can_reset(status(DONE), NO_CONNECTION)
    assert can_reset(message(CONNECTION, bytes(72)), status(DONE), NO_CONNECTION)


@pytest.mark.parametrize("missing", [status(ERROR, errno.ENOENT), status(DONE, errno.ENOENT)])
def test_kernel_without_tcp_diag_cannot_reset_though_it_answers_as_if_there_was_no_connection(can_reset, missing):
    assert not can_reset(missing, NO_CONNECTION)


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EPERM])
def test_kernel_that_refuses_cannot_reset(can_reset, number):
    assert not can_reset(status(DONE), status(ERROR, number))


def test_kernel_without_sock_diag_cannot_reset(monkeypatch):
    def refuse():
        raise OSError(errno.EPROTONOSUPPORT, "Protocol not supported")

    monkeypatch.setattr(tcp_reset, "_open_kernel", refuse)
    assert not tcp_reset.can_reset()


@pytest.mark.parametrize("kind", [ERROR, DONE])
def test_missing_module_is_named(kind):
    with pytest.raises(NetworkError, match="no module tcp_diag"):
        list(tcp_reset._connections(ScriptedKernel(status(kind, errno.ENOENT)), 2))


def test_connections_come_in_pieces():
    entry = message(CONNECTION, bytes(4) + IDENTITY + bytes(20))
    kernel = ScriptedKernel(entry + entry, entry, status(DONE))
    assert list(tcp_reset._connections(kernel, 2)) == [IDENTITY] * 3
    assert kernel.requests == [20]
