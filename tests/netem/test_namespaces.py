"""Namespaces: names, entering and leaving, settings, and the processes in them."""

import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from tahq.comm.network_config import MAX_HOSTS
from tahq.errors import NetworkError
from tahq_netem.backends.namespace_group import set_congestion_control
from tahq_netem.backends.namespaces import (
    create_namespace,
    end_processes,
    entered,
    host_address,
    host_mac,
    list_namespaces,
    namespace_path,
    netlink,
    owner_pid,
    processes_in,
    read_sysctl,
    remove_namespace,
)

netns = pytest.mark.netns
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
SYSCTL = Path("/proc/sys/net/ipv4")


def test_names_tell_their_owner_and_addresses_are_distinct():
    names = ("tahq-12-host0", "tahq-12.3-my-host", "tahq-12-_switch", "tahq-x-host0", "tahq-12", "my-tahq-12-host0")
    assert [owner_pid(name) for name in names] == [12, 12, 12, None, None, None]
    indices = range(MAX_HOSTS)
    assert len({host_address(index) for index in indices}) == len({host_mac(index) for index in indices}) == MAX_HOSTS
    assert host_address(MAX_HOSTS - 1) == "10.77.0.250"


def here() -> int:
    """The namespace that the calling thread is in."""
    return os.stat("/proc/thread-self/ns/net").st_ino


@netns
def test_only_the_calling_thread_enters_and_it_returns_even_after_an_error(namespace):
    home, is_inside, seen = here(), threading.Event(), []
    other = threading.Thread(target=lambda: (is_inside.wait(10), seen.append(here())))
    other.start()
    with suppress(ZeroDivisionError), entered(namespace):
        assert here() == namespace_path(namespace).stat().st_ino != home
        is_inside.set()
        other.join()
        1 / 0  # noqa: B018
    assert here() == home
    assert seen == [home]


@netns
def test_new_namespace_has_lo_up_and_no_ipv6(namespace):
    with netlink(namespace) as kernel:
        [lo] = kernel.get_links()
        assert lo["flags"] & 1
        assert [address.get("family") for address in kernel.get_addr()] == [socket.AF_INET]


@netns
def test_sockets_and_processes_stay_where_they_were_made(namespace):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with entered(namespace):
            socket.create_server(("127.0.0.1", port)).close()  # the same port is free there
    argv = [sys.executable, "-c", "import os; print(os.stat('/proc/self/ns/net').st_ino)"]
    with entered(namespace), subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert int(process.stdout.read()) == namespace_path(namespace).stat().st_ino


@netns
def test_every_congestion_control_of_the_kernel_can_be_set_in_the_namespace_alone(namespace):
    machine = [(SYSCTL / f"tcp_{name}congestion_control").read_text() for name in ("", "allowed_")]
    available = (SYSCTL / "tcp_available_congestion_control").read_text().split()
    default = read_sysctl(namespace, "net.ipv4.tcp_congestion_control")
    assert set_congestion_control(namespace, None) == ("cubic" if "cubic" in available else default)
    for name in available:
        assert set_congestion_control(namespace, name) == name
        assert read_sysctl(namespace, "net.ipv4.tcp_congestion_control") == name
    assert [(SYSCTL / f"tcp_{name}congestion_control").read_text() for name in ("", "allowed_")] == machine
    with pytest.raises(NetworkError, match=r"no congestion control warp.*this kernel has .*reno"):
        set_congestion_control(namespace, "warp")


@netns
def test_process_that_ignores_sigterm_is_killed(namespace):
    with entered(namespace), subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        assert processes_in(namespace) == [process.pid]
        end_processes([namespace], grace_s=0.2)
        assert process.wait(60) == -9
    assert processes_in(namespace) == []


@netns
def test_taken_or_missing_namespace_is_named_and_a_missing_one_need_not_be_removed(namespace):
    with pytest.raises(NetworkError, match="exists already"):
        create_namespace(namespace)
    assert namespace in list_namespaces()
    with pytest.raises(NetworkError, match="cannot open namespace tahq-0-gone"), entered("tahq-0-gone"):
        pass
    assert remove_namespace("tahq-0-gone")
    assert processes_in("tahq-0-gone") == []
