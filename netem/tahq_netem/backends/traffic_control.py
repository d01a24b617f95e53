"""The shaper of one network device: an htb root, and a class for each peer that needs one.

Everything that a device sends shares the root class's rate. A peer's packets are recognised by one IPv4 address and go
through a class that may cap them and whose leaf may be a netem; all others meet the root's rate alone::

    1: htb ── 1:1 rate ─┬─ 1:2 everyone else ── bfifo
                        ├─ 1:10 peer 0, cap ─── netem delay, jitter, loss, reorder
                        └─ 1:11 peer 1 ──────── bfifo

A `Shaper` remembers what it has installed and changes only what differs, so packets in other queues stay there. A leaf
that is removed drops its packets. pyroute2 takes rates in bytes per second, times in microseconds and loss in percent.
"""

import errno
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from pyroute2 import IPRoute, NetlinkError
from pyroute2.netlink import NLM_F_ACK, NLM_F_CREATE, NLM_F_REPLACE, NLM_F_REQUEST
from pyroute2.netlink.rtnl import RTM_NEWQDISC
from pyroute2.netlink.rtnl.tcmsg import sched_netem, tcmsg
from pyroute2.protocols import ETH_P_IP

from tahq.comm.network_model import FULL_FRAME_NBYTES, burst_nbytes
from tahq.errors import NetworkError
from tahq_netem.network.description import PathShape

UNSHAPED_BITS_PER_S: Final = 32e9
"""The rate of a class that must exist but should not slow anything down: near the most that a veth carries."""

SOURCE_FIELD: Final = 12
DESTINATION_FIELD: Final = 16
"""Offsets of the addresses in an IPv4 header."""

_QDISC: Final = 0x10000
_ROOT_CLASS: Final = 0x10001
_DEFAULT_CLASS: Final = 0x10002
_FIRST_PEER_CLASS: Final = 0x10010
_FIRST_PEER_LEAF: Final = 0x100000
_DEFAULT_LEAF: Final = 0x20000
_FIRST_PRIORITY: Final = 10
_OWN_BYTES_PER_S: Final = 125
_ANY_SEGMENTS: Final = 0xFFFF
_REPLACE: Final = NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE | NLM_F_REPLACE
_QUANTUM_NBYTES: Final = 60_000
"""Bytes that a class may send before the next one's turn: one full segment of TCP offload."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One peer's packets: its path (with the cap of the class) and the length of its queue."""

    path: PathShape
    queue_nbytes: int
    netem_limit: int = 0
    """Most packets in a netem: those on their way and those in the queue behind it."""


@dataclass(frozen=True, slots=True)
class Tree:
    """The wanted state of a device's shaper; leaves by the index of the peer."""

    rate_bits_per_s: float | None
    queue_nbytes: int
    leaves: Mapping[int, Leaf]
    burst_s: float = 0.0
    """Burst of an idle line, as time at its rate; never less than `burst_nbytes`."""
    most_segments: int | None = None
    """Packets that TCP may hand to the device as one; None: the kernel's default."""

    @property
    def is_needed(self) -> bool:
        """Whether there is anything to shape."""
        return self.rate_bits_per_s is not None or bool(self.leaves)


class Shaper:
    """The shaper of the device `index`; calls get the IPRoute of the device's namespace.

    Peers are told apart by the address at offset `field`, one of `addresses`.
    """

    def __init__(self, index: int, field: int, addresses: Mapping[int, str]) -> None:
        self._index = index
        self._field = field
        self._addresses = addresses
        self.installed = Tree(None, 0, {})

    def apply(self, kernel: IPRoute, tree: Tree) -> None:
        """Make the device's shaper what `tree` says; after an error the device has none."""
        try:
            self._change(kernel, self.installed, tree)
        except BaseException:
            self.installed = Tree(None, 0, {})
            with suppress(NetlinkError):  # it was not there yet
                kernel.tc("del", index=self._index, handle=_QDISC, root=True)
            raise
        self.installed = tree

    def _change(self, kernel: IPRoute, before: Tree, tree: Tree) -> None:
        if before.most_segments != tree.most_segments:
            kernel.link("set", index=self._index, gso_max_segs=tree.most_segments or _ANY_SEGMENTS)
        if tree.is_needed:
            self._install(kernel, before, tree)
        elif before.is_needed:
            kernel.tc("del", index=self._index, handle=_QDISC, root=True)

    def _install(self, kernel: IPRoute, before: Tree, tree: Tree) -> None:
        if not before.is_needed:
            kernel.tc("replace", "htb", self._index, _QDISC, default=_DEFAULT_CLASS & 0xFFFF)
        root_changes = not before.is_needed or (before.rate_bits_per_s, before.burst_s) != (
            tree.rate_bits_per_s,
            tree.burst_s,
        )
        if root_changes:
            self._set_class(kernel, _ROOT_CLASS, tree)
            self._set_class(kernel, _DEFAULT_CLASS, tree)
        if root_changes or before.queue_nbytes != tree.queue_nbytes:
            self._set_queue(kernel, _DEFAULT_LEAF, _DEFAULT_CLASS, Leaf(PathShape(), tree.queue_nbytes))
        for peer in before.leaves.keys() - tree.leaves.keys():
            self._filter(kernel, "del-filter", peer)
            kernel.tc("del-class", index=self._index, handle=_FIRST_PEER_CLASS + peer, parent=_ROOT_CLASS)
        for peer, leaf in tree.leaves.items():
            if root_changes or before.leaves.get(peer) != leaf:
                self._set_class(kernel, _FIRST_PEER_CLASS + peer, tree, leaf.path.rate_bits_per_s)
                self._set_leaf(kernel, peer, before.leaves.get(peer), leaf)

    def _set_leaf(self, kernel: IPRoute, peer: int, old: Leaf | None, leaf: Leaf) -> None:
        handle, parent = _FIRST_PEER_LEAF + (peer << 16), _FIRST_PEER_CLASS + peer
        if old is not None and old.path.needs_netem != leaf.path.needs_netem:
            kernel.tc("del", index=self._index, handle=handle, parent=parent)
        if old != leaf:
            self._set_queue(kernel, handle, parent, leaf)
        if old is None:
            self._filter(kernel, "add-filter", peer)

    def _set_queue(self, kernel: IPRoute, handle: int, parent: int, leaf: Leaf) -> None:
        try:
            kernel.nlm_request_batch([queue_message(self._index, handle, parent, leaf)])
        except NetlinkError as error:
            if leaf.path.needs_netem and error.code in (errno.ENOENT, errno.EOPNOTSUPP):
                raise NetworkError("this kernel has no netem (module sch_netem); backend tun works without") from None
            raise

    def _filter(self, kernel: IPRoute, command: str, peer: int) -> None:
        address = int.from_bytes(socket.inet_aton(self._addresses[peer]), "big")
        match = {"protocol": ETH_P_IP, "keys": [f"0x{address:08x}/0xffffffff+{self._field}"]}
        where = {"parent": _QDISC, "prio": _FIRST_PRIORITY + peer, "target": _FIRST_PEER_CLASS + peer}
        kernel.tc(command, "u32", self._index, **where, **match)

    def _set_class(self, kernel: IPRoute, handle: int, tree: Tree, cap_bits_per_s: float | None = None) -> None:
        rate = min(rate for rate in (tree.rate_bits_per_s, cap_bits_per_s, UNSHAPED_BITS_PER_S) if rate is not None)
        burst = max(burst_nbytes(rate), int(rate / 8 * tree.burst_s))
        options = {"rate": int(rate / 8), "burst": burst, "cburst": burst, "quantum": _QUANTUM_NBYTES}
        if handle != _ROOT_CLASS:
            # htb always grants a class its own rate, so that is almost nothing, and the rest is borrowed.
            options |= {"rate": _OWN_BYTES_PER_S, "burst": FULL_FRAME_NBYTES, "ceil": int(rate / 8)}
        parent = _QDISC if handle == _ROOT_CLASS else _ROOT_CLASS
        kernel.tc("replace-class", "htb", self._index, handle, parent=parent, **options)


def netem_options(leaf: Leaf) -> dict[str, float]:
    """A path as netem's options: µs, percent, packets.

    With jitter, a rate that is never reached is set as well: a netem with a rate keeps packets in order; without one,
    jitter reorders them.
    """
    path = leaf.path
    options: dict[str, float] = {
        "delay": round(path.delay_s * 1e6),
        "jitter": round(path.jitter_s * 1e6),
        "loss": path.loss * 100,
        "limit": leaf.netem_limit,
    }
    if path.reorder:
        options["prob_reorder"] = path.reorder * 100
    if path.jitter_s:
        options["rate"] = int(UNSHAPED_BITS_PER_S / 8)
    return options


def queue_message(index: int, handle: int, parent: int, leaf: Leaf) -> tcmsg:
    """The request for a leaf's netem, or for a queue of so many bytes.

    pyroute2's own requests (0.9.7) take netem's rate for an attribute of the message, and know only queues that count
    packets, which can have 64 kB each.
    """
    if leaf.path.needs_netem:
        kind, options = "netem", sched_netem.get_parameters(netem_options(leaf))
    else:
        kind, options = "bfifo", struct.pack("=I", leaf.queue_nbytes)
    message = tcmsg()
    message["index"], message["handle"], message["parent"] = index, handle, parent
    message["header"]["type"], message["header"]["flags"] = RTM_NEWQDISC, _REPLACE
    message["attrs"] = [["TCA_KIND", kind], ["TCA_OPTIONS", options]]
    return message
