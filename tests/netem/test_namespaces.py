import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support.processes import is_alive, wait_until

from tahq.errors import NetworkError
from tahq_netem.backends.namespace_group import NamespaceGroup
from tahq_netem.backends.namespaces import (
    create_namespace,
    end_processes,
    entered,
    list_namespaces,
    namespace_path,
    netlink,
    popen,
    processes_in,
    read_sysctl,
    remove_namespace,
    write_sysctl,
)

pytestmark = pytest.mark.netns

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"


def here() -> int:
    """The namespace that the calling thread is in."""
    return os.stat("/proc/thread-self/ns/net").st_ino


@pytest.fixture
def namespace(own_namespaces):
    group = NamespaceGroup(["a"])
    yield group["a"]
    group.close()


def test_block_runs_in_the_namespace_and_returns(namespace):
    home = here()
    with entered(namespace):
        assert here() == namespace_path(namespace).stat().st_ino != home
    assert here() == home


def test_thread_returns_after_an_error(namespace):
    home = here()
    with pytest.raises(ZeroDivisionError), entered(namespace):
        1 / 0  # noqa: B018
    assert here() == home


def test_other_threads_stay_where_they_are(namespace):
    home, is_inside, seen = here(), threading.Event(), []
    other = threading.Thread(target=lambda: (is_inside.wait(10), seen.append(here())))
    other.start()
    with entered(namespace):
        is_inside.set()
        other.join()
    assert seen == [home]


def test_new_namespace_has_lo_up_and_no_ipv6(namespace):
    with netlink(namespace) as kernel:
        [lo] = kernel.get_links()
        assert lo["flags"] & 1
        assert [address.get("family") for address in kernel.get_addr()] == [socket.AF_INET]


def test_sockets_live_where_they_were_made(namespace):
    """The same port can be bound here and there."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with entered(namespace):
            socket.create_server(("127.0.0.1", port)).close()


def test_process_starts_in_the_namespace(namespace):
    argv = [sys.executable, "-c", "import os; print(os.stat('/proc/self/ns/net').st_ino)"]
    with popen(namespace, argv, stdout=subprocess.PIPE, text=True) as process:
        assert int(process.stdout.read()) == namespace_path(namespace).stat().st_ino


def test_setting_belongs_to_the_namespace(namespace):
    name = "net.ipv4.ip_default_ttl"
    here_before = Path("/proc/sys/net/ipv4/ip_default_ttl").read_text()
    write_sysctl(namespace, name, "33")
    assert read_sysctl(namespace, name) == "33"
    assert Path("/proc/sys/net/ipv4/ip_default_ttl").read_text() == here_before


def test_setting_that_the_kernel_refuses_is_named(namespace):
    with pytest.raises(NetworkError, match=r"refuses net.ipv4.ip_default_ttl = 999: Invalid argument"):
        write_sysctl(namespace, "net.ipv4.ip_default_ttl", "999")


def test_processes_of_a_namespace_are_found_and_ended(namespace):
    process = popen(namespace, SLEEP)
    assert processes_in(namespace) == [process.pid]
    end_processes([namespace])
    assert process.wait(60) == -15
    assert processes_in(namespace) == []


def test_process_that_ignores_sigterm_is_killed(namespace):
    with popen(namespace, [sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        end_processes([namespace], grace_s=0.2)
        assert process.wait(60) == -9


def test_closing_a_group_ends_what_runs_in_it(own_namespaces):
    group = NamespaceGroup(["a"])
    process = popen(group["a"], ["/bin/sh", "-c", f"{sys.executable} -c 'import time; time.sleep(60)' & wait"])
    wait_until(lambda: len(processes_in(group["a"])) == 2, 10, "the shell starts its child")
    pids = processes_in(group["a"])
    group.close()
    process.wait(60)
    wait_until(lambda: not any(map(is_alive, pids)), 10, "all are gone")


def test_two_groups_of_one_process_live_side_by_side(own_namespaces):
    first, second = NamespaceGroup(["a"]), NamespaceGroup(["a"])
    try:
        assert first["a"] == f"tahq-{os.getpid()}-a"
        assert second["a"] == f"tahq-{os.getpid()}.1-a"
        first.close()
        assert own_namespaces() == [second["a"]]
    finally:
        first.close()
        second.close()


def test_closing_twice_does_nothing(own_namespaces):
    group = NamespaceGroup(["a"])
    group.close()
    group.close()


def test_taken_name_is_refused_and_kept(namespace):
    with pytest.raises(NetworkError, match="exists already"):
        create_namespace(namespace)
    assert namespace in list_namespaces()


def test_entering_what_is_gone_says_so():
    with pytest.raises(NetworkError, match="cannot open namespace tahq-0-gone"), entered("tahq-0-gone"):
        pass


def test_removing_what_is_gone_is_no_error():
    assert remove_namespace("tahq-0-gone")
    assert processes_in("tahq-0-gone") == []
