import socket
import subprocess
import sys
import time

import pytest

from tahq.errors import UserError
from tahq_netem.backends.namespace_group import NamespaceGroup
from tahq_netem.backends.namespaces import entered, popen
from tahq_netem.run_command import HostProgram, listening_sockets

pytestmark = pytest.mark.netns


class OneHost:
    """What a program needs of a network: a namespace to run in."""

    def __init__(self) -> None:
        self.group = NamespaceGroup(["a"])

    def namespace(self, host) -> str:
        return self.group[host]

    def popen(self, host, argv, *, env=None, **options) -> subprocess.Popen:
        return popen(self.group[host], argv, env=env, **options)


@pytest.fixture
def host(own_namespaces):
    """A host that is empty."""
    one = OneHost()
    yield one
    one.group.close()


@pytest.fixture
def start(host):
    """start(python) runs it on the host."""
    programs = []

    def begin(python: str, **options) -> HostProgram:
        programs.append(HostProgram(host, "a", [sys.executable, "-c", python], {}, **options))
        return programs[-1]

    yield begin
    host.group.close()
    for program in programs:
        program.wait()
        program.finish_output()


SERVERS = {
    "tcp": "import socket, time; server = socket.create_server(('', 0)); time.sleep(60)",
    "udp": "import socket, time; s = socket.socket(type=socket.SOCK_DGRAM); s.bind(('', 5000)); time.sleep(60)",
}


@pytest.mark.parametrize("kind", SERVERS)
def test_server_is_awaited_until_it_listens(start, kind):
    program = start(SERVERS[kind], copied_to=2)
    program.await_listening(timeout_s=60)
    assert program.is_running


def test_program_that_never_listens_is_awaited_no_longer_than_said(start):
    program = start("import time; time.sleep(60)", copied_to=2)
    program.await_listening(timeout_s=0.1)
    assert program.is_running


def test_server_that_puts_itself_into_the_background_is_no_mistake(start):
    start("", copied_to=2).await_listening(timeout_s=60)


def test_server_that_fails_is_told_with_its_status(start):
    with pytest.raises(UserError, match=r"raise SystemExit\(3\).* on a ended with status 3 at once"):
        start("raise SystemExit(3)", copied_to=2).await_listening(timeout_s=60)


@pytest.mark.parametrize("kind", SERVERS)
def test_second_server_of_a_host_is_awaited_like_the_first(start, host, kind):
    start(SERVERS["tcp"], copied_to=2).await_listening(timeout_s=60)
    late = SERVERS[kind].replace("import socket, time;", "import socket, time; time.sleep(0.3);")
    start(late, copied_to=2).await_listening(timeout_s=60)
    assert len(listening_sockets(host, "a")) == 2


def test_connected_socket_is_no_server(host):
    assert listening_sockets(host, "a") == frozenset()
    with entered(host.namespace("a")):
        server = socket.create_server(("127.0.0.1", 0))
        client = socket.create_connection(server.getsockname())
    with server, client, server.accept()[0]:
        assert len(listening_sockets(host, "a")) == 1
    assert listening_sockets(host, "a") == frozenset()


def test_output_is_copied_with_the_hosts_name(start, tmp_path):
    with (tmp_path / "output").open("wb") as output:
        script = "import sys; print('one'); print('two', end='', file=sys.stderr)"
        program = start(script, copied_to=output.fileno())
        assert program.wait() == 0
        program.finish_output(timeout_s=60)
    assert sorted((tmp_path / "output").read_text().splitlines()) == ["a | one", "a | two"]


def test_end_of_a_program_is_not_that_of_whom_it_left_behind(start):
    leaves = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    program = start(leaves, copied_to=2)
    began_s = time.monotonic()
    assert program.wait() == 0
    program.finish_output(timeout_s=0.1)
    assert time.monotonic() - began_s < 60


def test_program_goes_on_when_nobody_reads_its_output(start):
    reader, writer = socket.socketpair()
    reader.close()
    with writer:
        program = start("print('x' * 1_000_000)\nprint('y')", copied_to=writer.fileno())
        assert program.wait() == 0
        program.finish_output()
