"""A network of hosts on this machine: namespaces with an address each, links between them that can be changed.

A host's only device is `eth0`, whose egress htb holds to the host's `up` rate and to the caps of its pairs, so that
TCP feels them as it would the speed of its own network card. What happens behind it differs by backend: `kernel.py`
and `tun.py`.
"""

import platform
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from importlib.metadata import version
from typing import Any, Final, Self

from tahq_netem.backends.namespace_group import NamespaceGroup
from tahq_netem.backends.namespaces import (
    HOST_DEVICE,
    entered,
    host_address,
    host_mac,
    netlink,
    refusals_explained,
    reset_connections,
)
from tahq_netem.backends.traffic_control import DESTINATION_FIELD, Shaper, Tree
from tahq_netem.network.description import NetworkPlan, known_host

_NEIGHBOUR_PERMANENT: Final = 0x80


class Network(ABC):
    """Hosts 10.77.0.1, 10.77.0.2, … in namespaces, in the plan's order. A context manager.

    `plan` is what holds now; `set_plan` replaces it. `congestion_control` is in force on every host.

    A backend may need further namespaces, with the labels `further`.

    Raises:
        NetworkError: the kernel lacks a part, or this user lacks rights; nothing stays behind.
    """

    backend: str
    """kernel or tun."""

    def __init__(self, plan: NetworkPlan, further: Iterable[str] = ()) -> None:
        self.plan = plan
        self._addresses = {index: host_address(index) for index in range(len(plan.hosts))}
        self._namespaces = NamespaceGroup([*further, *plan.hosts])
        try:
            with refusals_explained():
                self._tcp = self._namespaces.tune_tcp(plan)
                self._connect()
                self._shapers = {host: self._set_up_host(index) for index, host in enumerate(plan.hosts)}
                self._shape()
        except BaseException:
            self.close()
            raise
        self.congestion_control: str = self._tcp["congestion_control"]

    @abstractmethod
    def _connect(self) -> None:
        """Give every host its device."""

    @abstractmethod
    def _egress_tree(self, host: str) -> Tree:
        """The shaper of a host's own device, by `self.plan`."""

    @abstractmethod
    def set_link(self, host: str, *, is_up: bool) -> None:
        """Cut a host off, or join it again: packets to and from it vanish meanwhile, without an error."""

    def address(self, host: str) -> str:
        """The IPv4 address of `host`."""
        return self._addresses[self.plan.hosts.index(known_host(host, self.plan.hosts))]

    def namespace(self, host: str) -> str:
        """The name of the host's network namespace."""
        return self._namespaces[known_host(host, self.plan.hosts)]

    def entered(self, host: str) -> AbstractContextManager[None]:
        """Move the calling thread to `host` for the duration of the block; sockets opened there stay there."""
        return entered(self.namespace(host))

    def popen(self, host: str, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """`subprocess.Popen(argv, **options)` on `host`. It is ended when the network closes."""
        with self.entered(host):
            return subprocess.Popen(argv, **options)

    def set_plan(self, plan: NetworkPlan) -> None:
        """Give the network other rates and paths between the same hosts.

        Waiting packets leave at the new rate, and packets on their way keep their delay. Under `kernel` they are lost
        where shaping begins or ends, and where a path needs no netem before or after.
        """
        before, self.plan = self.plan, plan
        with refusals_explained():
            try:
                self._shape()
            except BaseException:
                self.plan = before
                self._shape()
                raise

    def reset_tcp(self, host: str) -> int:
        """End a host's TCP connections with RST to both ends; return how many there were."""
        return reset_connections(self.namespace(host))

    def describe(self) -> dict[str, Any]:
        """The network, what is in force, and versions, fit for JSON."""
        return {
            "backend": self.backend,
            "congestion_control": self.congestion_control,
            "hosts": {
                host: {"address": self.address(host), **asdict(shape)} for host, shape in self.plan.host_shapes.items()
            },
            "paths": [
                {"source": source, "destination": destination, **asdict(shape)}
                for (source, destination), shape in self.plan.paths.items()
            ],
            "kernel": platform.release(),
            "python": platform.python_version(),
            "pyroute2": version("pyroute2"),
            "tcp": self._tcp,
        }

    def close(self) -> None:
        """End what runs on the hosts and remove everything that was made; a second time does nothing."""
        self._namespaces.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _shape(self) -> None:
        """Make every shaper what the plan says."""
        for host, shaper in self._shapers.items():
            tree = self._egress_tree(host)
            if shaper.installed != tree:
                with netlink(self._namespaces[host]) as kernel:
                    shaper.apply(kernel, tree)

    def _set_up_host(self, index: int) -> Shaper:
        with netlink(self._namespaces[self.plan.hosts[index]]) as kernel:
            [device] = kernel.link_lookup(ifname=HOST_DEVICE)
            kernel.link("set", index=device, address=host_mac(index))
            kernel.link("set", index=device, state="up")
            kernel.addr("add", index=device, address=self._addresses[index], prefixlen=24)
            # In place of ARP: hosts far apart share no Ethernet, and an outage must not turn into `no route to host`.
            for other, address in self._addresses.items():
                if other != index:
                    kernel.neigh("add", dst=address, lladdr=host_mac(other), ifindex=device, state=_NEIGHBOUR_PERMANENT)
        return Shaper(device, DESTINATION_FIELD, self._addresses)
