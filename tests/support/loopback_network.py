"""A network for tests that need no slow links: every host is an address of this machine's loopback."""

import os
import subprocess
from contextlib import nullcontext
from itertools import count

from tahq.comm.network_config import NetworkConfig
from tahq_netem.backends.network import Network
from tahq_netem.network.description import plan_network

_NETWORKS = count()


class LoopbackNetwork(Network):
    """Hosts at 127.x.y.1, 127.x.y.2 …; rates and paths are taken note of and not enforced."""

    backend = "loopback"
    congestion_control = "none"

    def __init__(self, config: NetworkConfig) -> None:
        self.plan = plan_network(config)
        number = os.getpid() * 8 + next(_NETWORKS) % 8
        self._prefix = f"127.{number // 250 % 250 + 1}.{number % 250 + 1}"
        self.is_closed = False

    def address(self, host):
        return f"{self._prefix}.{self.plan.hosts.index(host) + 1}"

    def entered(self, host):
        return nullcontext()

    def popen(self, host, argv, *, env=None, **options):
        return subprocess.Popen(argv, env=env, **options)

    def set_plan(self, plan):
        self.plan = plan

    def set_link(self, host, *, is_up):
        raise AssertionError("no link to cut")

    def reset_tcp(self, host):
        raise AssertionError("no connection of this network's own")

    def _connect(self):
        raise AssertionError("no device to make")

    def _egress_tree(self, host):
        raise AssertionError("no device to shape")

    def describe(self):
        return {"backend": self.backend, "congestion_control": self.congestion_control}

    def close(self):
        self.is_closed = True
