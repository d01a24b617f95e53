"""Networks whose hosts are namespaces: what the backends that join them in different ways have in common.

A host's only way out is its device `eth0`, whose egress htb holds to the host's `up` and to the caps of its pairs.
What happens behind it is the backend's.
"""

import subprocess
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from pyroute2 import IPRoute

from tahq_netem.description import NetworkPlan, PathShape, RateChange, known_host
from tahq_netem.names import HOST_DEVICE, host_address, host_mac
from tahq_netem.namespace_group import NamespaceGroup
from tahq_netem.namespaces import netlink, popen, refusals_explained
from tahq_netem.network import Network
from tahq_netem.tcp_reset import reset_connections
from tahq_netem.traffic_control import DESTINATION_FIELD, Shaper, Tree

_NEIGHBOUR_PERMANENT: Final = 0x80


class NamespacedNetwork(Network):
    """Hosts 10.77.0.1, 10.77.0.2, … in namespaces of their own, in the plan's order.

    Args:
        plan: what the network looks like.
        further: labels of namespaces that the backend needs besides.

    Raises:
        NetworkError: the kernel lacks a part, or this user may not; nothing stays behind.
    """

    def __init__(self, plan: NetworkPlan, further: Iterable[str] = ()) -> None:
        self.plan = plan
        self._addresses = {index: host_address(index) for index in range(len(plan.hosts))}
        self._namespaces = NamespaceGroup([*further, *plan.hosts])
        try:
            with refusals_explained():
                self._tcp = self._namespaces.tune_tcp(plan)
                self._connect()
                self._shape()
        except BaseException:
            self.close()
            raise
        self.congestion_control = self._tcp["congestion_control"]

    @abstractmethod
    def _connect(self) -> None:
        """Give every host its device, call `_set_up_hosts`, and return when packets get through."""

    @abstractmethod
    def _egress_tree(self, host: str) -> Tree:
        """What the shaper of a host's own device should be, by `self.plan`."""

    def address(self, host: str) -> str:
        """10.77.0.x, in the order of the hosts."""
        return self._addresses[self.plan.hosts.index(known_host(host, self.plan.hosts))]

    def namespace(self, host: str) -> str:
        """The host's namespace."""
        return self._namespaces[known_host(host, self.plan.hosts)]

    def popen(
        self, host: str, argv: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a process in the host's namespace."""
        return popen(self.namespace(host), argv, env=env, **options)

    def set_rate(self, host: str, *, up: RateChange = ..., down: RateChange = ...) -> None:
        """Change a host's rates; what waits leaves at the new rate, or is lost where shaping begins or ends."""
        self._change(self.plan.with_rates(host, up, down))

    def set_path(self, source: str, destination: str, shape: PathShape) -> None:
        """Change what packets meet that are sent from now on.

        Those on their way keep the delay that they got; where the path needs no netem before or after, they are lost.
        """
        self._change(self.plan.with_path(source, destination, shape))

    def reset_tcp(self, host: str) -> int:
        """The kernel's SOCK_DESTROY for each connection."""
        return reset_connections(self.namespace(host))

    def describe(self) -> dict[str, Any]:
        """What is in force, with the kernel's and pyroute2's versions."""
        return super().describe() | {"tcp": self._tcp, "tcp_reset": "sock_diag SOCK_DESTROY"}

    def close(self) -> None:
        """End what runs in the namespaces and remove them; devices and shapers go with them."""
        self._namespaces.close()

    def _change(self, plan: NetworkPlan) -> None:
        before, self.plan = self.plan, plan
        with refusals_explained():
            try:
                self._shape()
            except BaseException:
                self.plan = before
                self._shape()
                raise

    def _shape(self) -> None:
        """Make every shaper what the plan says."""
        for host, shaper in self._shapers.items():
            tree = self._egress_tree(host)
            if shaper.installed != tree:
                with netlink(self._namespaces[host]) as kernel:
                    shaper.apply(kernel, tree)

    def _set_up_hosts(self) -> None:
        """Give every host's device its addresses and bring it up."""
        self._shapers = {host: self._set_up_host(index) for index, host in enumerate(self.plan.hosts)}

    def _set_up_host(self, index: int) -> Shaper:
        with netlink(self._namespaces[self.plan.hosts[index]]) as kernel:
            [device] = kernel.link_lookup(ifname=HOST_DEVICE)
            kernel.link("set", index=device, address=host_mac(index))
            kernel.link("set", index=device, state="up")
            kernel.addr("add", index=device, address=self._addresses[index], prefixlen=24)
            self._introduce_others(kernel, index, device)
        return Shaper(device, DESTINATION_FIELD, self._addresses)

    def _introduce_others(self, kernel: IPRoute, index: int, device: int) -> None:
        """Without ARP: hosts far apart share no Ethernet, and an outage must not turn into `no route to host`."""
        for other, address in self._addresses.items():
            if other != index:
                kernel.neigh("add", dst=address, lladdr=host_mac(other), ifindex=device, state=_NEIGHBOUR_PERMANENT)
