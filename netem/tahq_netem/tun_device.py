"""Opening a TUN device: an Ethernet interface whose other end is a file descriptor.

Ethernet frames (IFF_TAP) rather than bare IP packets (IFF_TUN), so that the kernel's shaper counts 1,514
bytes for a full packet, as on a real interface. IFF_VNET_HDR puts a virtio-net header before each frame,
in which the kernel hands over, and takes, TCP segments in one piece of up to 64 kB with their checksum
left open: no data is summed or cut on the way.
"""

import fcntl
import os
from struct import Struct
from typing import Final

from tahq.errors import NetworkError
from tahq_netem.wire_packet import VNET_HEADER_BYTES

_TUN: Final = "/dev/net/tun"
_TUNSETIFF: Final = 0x400454CA
_TUNSETOFFLOAD: Final = 0x400454D0
_TUNSETVNETHDRSZ: Final = 0x400454D8
_IFF_TAP: Final = 0x0002
_IFF_NO_PI: Final = 0x1000
_IFF_VNET_HDR: Final = 0x4000
_TUN_F_CSUM: Final = 0x01
_TUN_F_TSO4: Final = 0x02
_INTERFACE_REQUEST: Final = Struct("16sH22x")  # struct ifreq: name, flags
_INT: Final = Struct("i")


def open_device(name: str) -> int:
    """Make the interface `name` in the calling thread's network namespace.

    Returns:
        A descriptor, not blocking. The interface goes when the last copy of it is closed.

    Raises:
        NetworkError: there is no /dev/net/tun, or this user may not use it; says what to do.
    """
    try:
        descriptor = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise NetworkError(
            f"cannot open {_TUN}: {error.strerror}; the tun backend needs root and `modprobe tun`"
        ) from None
    try:
        _attach(descriptor, name)
    except OSError as error:
        os.close(descriptor)
        raise NetworkError(f"cannot make the TUN device {name}: {error.strerror}; it needs CAP_NET_ADMIN") from None
    return descriptor


def _attach(descriptor: int, name: str) -> None:
    flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR
    fcntl.ioctl(descriptor, _TUNSETIFF, _INTERFACE_REQUEST.pack(name.encode(), flags))
    fcntl.ioctl(descriptor, _TUNSETVNETHDRSZ, _INT.pack(VNET_HEADER_BYTES))
    # Neither UDP's segmentation nor ECN's: the kernel cuts those before they get here.
    fcntl.ioctl(descriptor, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4)
