"""The relay as programs see it: real sockets, a real process, no root."""

import contextlib
import hashlib
import itertools
import os
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from support.processes import children, is_alive, wait_until

from tahq.errors import ConfigError, NetworkError
from tahq_netem.calibration import calibrate
from tahq_netem.description import HostConfig, NetworkConfig, PathShape, plan_network, uniform
from tahq_netem.interpreter import module_argv, module_environment
from tahq_netem.network import build_network
from tahq_netem.reactor import READABLE, Reactor
from tahq_netem.relay import RelayNetwork
from tahq_netem.relay_process import Relay
from tahq_netem.wire_control import plan_to_json


@pytest.fixture
def build():
    with contextlib.ExitStack() as stack:
        yield lambda **shape: stack.enter_context(RelayNetwork(plan_network(uniform(2, **shape))))


@contextlib.contextmanager
def connected(network, source="host0", destination="host1"):
    """Both ends of a connection through the network: the one that dialled, and the one that was dialled."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server((network.address(destination), 0)))
        listener.settimeout(20)
        dialled = network.dial_address(source, destination, listener.getsockname()[1])
        near = stack.enter_context(socket.create_connection(dialled, timeout=20))
        far = stack.enter_context(listener.accept()[0])
        far.settimeout(20)
        yield near, far


def receive_all(connection: socket.socket) -> bytes:
    """Everything up to the end of the stream."""
    return b"".join(iter(lambda: connection.recv(1 << 20), b""))


def test_a_stream_arrives_whole_in_both_directions_at_once(build):
    sent = {name: os.urandom(3_000_000) for name in ("near", "far")}
    with connected(build(rate=200e6, delay=0.002)) as ends:
        received = {}

        def send(connection: socket.socket, data: bytes) -> None:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)

        def receive(name: str, connection: socket.socket) -> None:
            received[name] = receive_all(connection)

        near, far = ends
        work = [(send, near, sent["near"]), (send, far, sent["far"]), (receive, "far", near), (receive, "near", far)]
        threads = [threading.Thread(target=function, args=arguments) for function, *arguments in work]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert {name: hashlib.sha256(data).digest() for name, data in received.items()} == {
        name: hashlib.sha256(data).digest() for name, data in sent.items()
    }


def test_one_direction_may_end_before_the_other(build):
    with connected(build()) as (near, far):
        near.sendall(b"question")
        near.shutdown(socket.SHUT_WR)
        assert receive_all(far) == b"question"
        far.sendall(b"answer")
        far.close()
        assert receive_all(near) == b"answer"


def test_a_byte_takes_both_delays_there_and_back(build):
    with connected(build(delay=0.05)) as (near, far):
        start_s = time.monotonic()
        near.sendall(b"x")
        assert far.recv(1) == b"x"
        assert time.monotonic() - start_s >= 0.05
        far.sendall(b"y")
        assert near.recv(1) == b"y"
        assert time.monotonic() - start_s >= 0.1


def test_a_sender_cannot_be_much_ahead_of_the_rate(build):
    # 1 Mbit/s carries 0.06 MB in half a second; what is more is in socket buffers (the sender's own grows to
    # `tcp_wmem`, 4 MB), not in an unbounded queue.
    with connected(build(rate=1e6)) as (near, _far):
        near.settimeout(0.5)
        with pytest.raises(TimeoutError):
            near.sendall(bytes(64_000_000))


def test_ports_of_a_host_are_reached_at_one_address_each(build):
    network = build()
    first = network.dial_address("host0", "host1", 7001)
    assert network.dial_address("host0", "host1", 7001) == first
    assert network.dial_address("host0", "host1", 7002) != first
    assert network.dial_address("host1", "host1", 7001) == (network.address("host1"), 7001)


def test_a_port_where_nobody_listens_resets(build):
    network = build()
    with socket.create_server((network.address("host1"), 0)) as unused:
        port = unused.getsockname()[1]
    # The reset may arrive while `create_connection` still looks whether it has succeeded.
    with (
        pytest.raises(ConnectionError),
        socket.create_connection(network.dial_address("host0", "host1", port), timeout=10) as near,
    ):
        near.recv(1)


def test_a_link_that_is_down_holds_data_up_and_loses_none(build):
    network = build(delay=0.01)
    with connected(network) as (near, far):
        near.sendall(b"before ")
        network.set_link("host1", is_up=False)
        near.sendall(b"meanwhile ")
        far.settimeout(0.3)
        with pytest.raises(TimeoutError):
            far.recv(100)
        network.set_link("host1", is_up=True)
        near.sendall(b"after")
        near.shutdown(socket.SHUT_WR)
        far.settimeout(20)
        assert receive_all(far) == b"before meanwhile after"


def test_a_path_that_loses_everything_stops_one_direction(build):
    network = build()
    with connected(network) as (near, far):
        network.set_path("host0", "host1", PathShape(loss=1.0))
        far.sendall(b"back")
        assert near.recv(4) == b"back"
        near.sendall(b"there")
        far.settimeout(0.3)
        with pytest.raises(TimeoutError):
            far.recv(5)
        network.set_path("host0", "host1", PathShape())
        far.settimeout(20)
        assert far.recv(5) == b"there"


def test_a_reset_reaches_both_ends_and_new_connections_work(build):
    network = build()
    with connected(network) as (near, far), connected(network, "host1", "host0"):
        near.sendall(b"x")
        assert far.recv(1) == b"x"
        assert network.reset_tcp("host0") == 2
        for end in (near, far):
            with pytest.raises(ConnectionResetError):
                end.recv(1)
    with connected(network) as (near, far):
        near.sendall(b"again")
        assert far.recv(5) == b"again"


def test_rates_change_at_run_time_and_are_recorded(build):
    network = build(rate=100e6)
    network.set_rate("host0", up=None)
    network.set_rate("host1", down=2e6)
    described = network.describe()["hosts"]
    assert (described["host0"]["up_bits_per_s"], described["host0"]["down_bits_per_s"]) == (None, 100e6)
    assert (described["host1"]["up_bits_per_s"], described["host1"]["down_bits_per_s"]) == (100e6, 2e6)
    with connected(network) as (near, far):
        start_s = time.monotonic()
        near.sendall(bytes(100_000))
        near.shutdown(socket.SHUT_WR)
        receive_all(far)
        # 100 kB at 2 Mbit/s · 0.956.
        assert time.monotonic() - start_s >= 0.418


def test_a_rate_that_the_relay_refuses_is_not_in_force(build):
    network = build(rate=100e6)
    before = network.plan
    os.kill(network._relay.pid, signal.SIGKILL)
    with pytest.raises(NetworkError, match="relay process"):
        network.set_rate("host0", up=1e6)
    assert network.plan == before


@contextlib.contextmanager
def descriptors_left(pid, num_left):
    """Meanwhile a process may open no more than so many."""
    taken = {int(entry.name) for entry in Path(f"/proc/{pid}/fd").iterdir()}
    free = (number for number in itertools.count() if number not in taken)
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    # The limit is one on the numbers.
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (next(itertools.islice(free, num_left, None)), before[1]))
    yield
    resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def test_a_connection_for_whose_second_socket_there_is_no_descriptor_is_reset(build):
    network = build()
    with connected(network) as (near, far):
        dialled = near.getpeername()
        with (
            descriptors_left(network._relay.pid, 1),
            pytest.raises(ConnectionError),
            socket.create_connection(dialled, timeout=10) as another,
        ):
            another.recv(1)
        near.sendall(b"x")
        assert far.recv(1) == b"x"


def test_connections_wait_while_there_are_no_descriptors(build):
    network = build()
    with socket.create_server((network.address("host1"), 0)) as listener:
        listener.settimeout(0.3)
        dialled = network.dial_address("host0", "host1", listener.getsockname()[1])
        with descriptors_left(network._relay.pid, 0):
            near = socket.create_connection(dialled, timeout=20)
            with pytest.raises(TimeoutError):
                listener.accept()
        listener.settimeout(20)
        far, _ = listener.accept()
        with near, far:
            near.sendall(b"x")
            assert far.recv(1) == b"x"


@contextlib.contextmanager
def in_a_thread(reactor):
    """The loop runs, until the block ends."""
    here, there = socket.socketpair()
    reactor.watch(there.fileno(), READABLE, lambda _events: reactor.stop())
    loop = threading.Thread(target=reactor.run)
    with there:
        with here:
            loop.start()
            yield
        loop.join()


def test_a_source_that_cannot_bind_gets_a_reset_and_others_are_relayed():
    # 192.0.2.1 is nobody's (RFC 5737): binding to it fails as it does when an address has no port left.
    addresses = {"host0": "192.0.2.1", "host1": "127.77.0.2", "host2": "127.77.0.3"}
    reactor = Reactor()
    relay = Relay(reactor, {"plan": plan_to_json(plan_network(uniform(3))), "addresses": addresses})
    with socket.create_server(("127.77.0.2", 0)) as listener:
        port = listener.getsockname()[1]
        dialled = {source: relay.listen(source, "host1", port)["address"] for source in ("host0", "host2")}
        with in_a_thread(reactor):
            with pytest.raises(ConnectionError), socket.create_connection(dialled["host0"], timeout=20) as near:
                near.recv(1)
            with socket.create_connection(dialled["host2"], timeout=20) as near, listener.accept()[0] as far:
                near.sendall(b"x")
                assert far.recv(1) == b"x"
    for listening in relay._listeners:
        listening.close()


def test_it_says_that_it_shows_no_tcp_dynamics(build):
    described = build().describe()
    assert described["backend"] == "relay"
    assert described["shows_tcp_dynamics"] is False


@pytest.mark.parametrize(
    ("shape", "what"),
    [({"loss": 0.01}, "loss"), ({"jitter": 0.001}, "jitter"), ({"delay": 0.1, "reorder": 0.1}, "reorder")],
)
def test_what_only_packets_can_have_is_refused(build, shape, what):
    with pytest.raises(NetworkError, match=f"no {what}"):
        build(**shape)


def test_what_only_packets_can_have_is_refused_at_run_time_and_changes_nothing(build):
    network = build()
    before = network.plan
    with pytest.raises(NetworkError, match="no loss"):
        network.set_path("host0", "host1", PathShape(loss=0.5))
    assert network.plan == before


def test_a_host_that_is_not_there_is_named_with_the_nearest(build):
    with pytest.raises(ConfigError, match="host1"):
        build().set_link("host11", is_up=False)


def test_it_is_built_on_request():
    with build_network(uniform(2), backend="relay") as network:
        assert network.backend == "relay"


def test_programs_and_relay_end_with_the_network(build):
    network = build()
    relay = network._relay.pid
    program = network.popen("host0", [sys.executable, "-c", "import time; time.sleep(600)"])
    network.close()
    network.close()
    assert program.returncode == -signal.SIGTERM
    assert not is_alive(relay)


OWNER = """
import sys, time
from tahq_netem.description import plan_network, uniform
from tahq_netem.relay import RelayNetwork
network = RelayNetwork(plan_network(uniform(2)))
program = network.popen("host0", [sys.executable, "-c", "import time; time.sleep(600)"])
print(network._relay.pid, program.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_an_owner_that_was_ended(number):
    owner = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(OWNER)],
        env=module_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        pids = [int(word) for word in owner.stdout.readline().split()]
        assert set(pids) <= set(children(owner.pid))
        owner.send_signal(number)
        owner.wait(60)
    finally:
        owner.kill()
        owner.communicate()
    assert_ended(pids)


def assert_ended(pids):
    for pid in pids:
        wait_until(lambda pid=pid: not is_alive(pid), 20, f"end of process {pid}")


FORKING_OWNER = """
import os, sys, time
from tahq_netem.description import plan_network, uniform
from tahq_netem.relay import RelayNetwork
network = RelayNetwork(plan_network(uniform(2)))
program = network.popen("host0", [sys.executable, "-c", "import time; time.sleep(600)"])
if os.fork() == 0:
    time.sleep(600)
print(network._relay.pid, program.pid, flush=True)
os.kill(os.getpid(), 9)
"""


def test_nothing_is_left_of_a_killed_owner_though_a_forked_child_lives_on():
    owner = subprocess.Popen(
        [sys.executable, "-c", FORKING_OWNER],
        env=module_environment(),
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    try:
        pids = [int(word) for word in owner.stdout.readline().split()]
        assert owner.wait(20) == -signal.SIGKILL
        assert_ended(pids)
    finally:
        os.killpg(owner.pid, signal.SIGKILL)
        owner.communicate()


def test_a_relay_whose_owner_is_gone_before_it_has_said_anything_ends_without_a_word():
    own_end, relay_end = socket.socketpair()
    owner = os.pidfd_open(os.getpid())
    own_end.close()
    with relay_end, os.fdopen(owner, "rb"):
        relay = subprocess.run(
            module_argv("tahq_netem.relay_process", str(relay_end.fileno()), str(owner)),
            pass_fds=[relay_end.fileno(), owner],
            env=module_environment(),
            stderr=subprocess.PIPE,
            timeout=60,
        )
    assert (relay.returncode, relay.stderr) == (0, b"")


@pytest.mark.serial
def test_rates_and_delay_are_as_described():
    # The same bounds as for the other backends, at a rate that two busy cores relay without trouble.
    hosts = {"a": HostConfig(up=20e6, down=100e6, delay=0.01), "b": HostConfig(up=100e6, down=50e6, delay=0.03)}
    with RelayNetwork(plan_network(NetworkConfig(hosts=hosts))) as network:
        calibration = calibrate(network, quick=True)
    calibration.check()
    steady = {figure.source: figure.measured for figure in calibration.figures if figure.what == "steady goodput"}
    assert steady["a"] == pytest.approx(20e6 * 1448 / 1514, rel=0.03)
    assert steady["b"] == pytest.approx(100e6 * 1448 / 1514, rel=0.03)
