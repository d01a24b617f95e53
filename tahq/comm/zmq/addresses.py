"""host:port: parsed, bound, and advertised to others."""

import errno
import os
import socket

import zmq

from tahq.errors import UserError

LOOPBACK = ("127.", "localhost", "::1", "[::1]")
"""How addresses begin that only this machine reaches."""
WILDCARDS = ("0.0.0.0", "::")
"""Where a program listens that is to be reached at each of a machine's addresses."""


def parse_address(text: str, what: str) -> tuple[str, int]:
    """Host and port of ``10.0.0.3:7000``, ``host:7000`` or ``[::1]:7000``; else UserError, which begins with `what`."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise UserError(f"{what}: {text!r} is not an address; expected host:port, such as 10.0.0.3:7000")
    return host, int(port)


def format_address(host: str, port: int) -> str:
    """``host:port``, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bind_router(router: "zmq.Socket[bytes]", text: str, what: str) -> int:
    """Bind to host:port (port 0: any free one) and return the port; UserError if the address cannot be used."""
    host, port = parse_address(text, what)
    try:
        numeric = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]
        router.bind(f"tcp://{format_address(str(numeric), port)}")
    except socket.gaierror as error:
        raise UserError(f"{what}: cannot listen on {text}: {error.strerror}") from None
    except zmq.ZMQError as error:
        hint = "; stop what listens there or choose another port" if error.errno == zmq.EADDRINUSE else ""
        raise UserError(f"{what}: cannot listen on {text}: {os.strerror(error.errno or 0)}{hint}") from None
    return parse_address(router.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://"), what)[1]


def unless_taken(bind: str) -> str:
    """A host:port to listen on, with any free port in place of one that another process, such as a dying one, holds."""
    host, port = parse_address(bind, "bind")
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return format_address(host, 0)
    return bind


def advertised_address(bind: str, bound_port: int, advertise: str | None) -> str:
    """The address that neighbours dial: `advertise` if given (port 0 in it = the bound port), else as bound.

    ``none`` gives "": this host can only dial out. A wildcard host (0.0.0.0, ::) becomes the host's name.
    """
    if advertise == "none":
        return ""
    host, port = parse_address(advertise or bind, "advertise" if advertise else "bind")
    if host in WILDCARDS and not advertise:
        host = socket.gethostname()
    return format_address(host, port if advertise and port else bound_port)


def local_address_towards(peer: str) -> str:
    """The IP address of this host on its route to `peer` (host:port), without sending; UserError: there is no route."""
    host, port = parse_address(peer, "peer")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UserError(f"{peer}: no route from this machine: {error.strerror}") from None
