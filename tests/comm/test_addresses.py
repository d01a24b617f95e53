import pytest

from tahq.comm.zmq.addresses import (
    advertised_address,
    format_address,
    local_address_towards,
    parse_address,
)
from tahq.errors import UserError


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("10.0.0.3:7000", "10.0.0.3", 7000), ("host-a.lan:0", "host-a.lan", 0), ("[::1]:65535", "::1", 65535)],
)
def test_address_parses_and_prints(text, host, port):
    assert parse_address(text, "bind") == (host, port)
    assert format_address(host, port) == text


@pytest.mark.parametrize("text", ["", "host", "host:", ":7", "host:-1", "host:65536", "host:7x", "host:²"])
def test_text_that_is_no_address_is_one_line_for_the_user(text):
    with pytest.raises(UserError, match=r"bind: .* is not an address; expected host:port"):
        parse_address(text, "bind")


@pytest.mark.parametrize(
    ("bind", "advertise", "expected"),
    [
        ("127.0.0.1:0", None, "127.0.0.1:4000"),
        ("0.0.0.0:0", "10.0.0.3:7000", "10.0.0.3:7000"),
        ("0.0.0.0:0", "10.0.0.3:0", "10.0.0.3:4000"),
        ("0.0.0.0:0", "none", ""),
    ],
)
def test_advertised_address(bind, advertise, expected):
    assert advertised_address(bind, 4000, advertise) == expected


def test_wildcard_is_never_advertised():
    assert not advertised_address("0.0.0.0:0", 4000, None).startswith("0.0.0.0")


def test_own_address_towards_loopback_is_loopback():
    assert local_address_towards("127.0.0.1:7000") == "127.0.0.1"


def test_no_way_to_a_peer_is_one_line_for_the_user():
    with pytest.raises(UserError, match="no route"):
        local_address_towards("no-such-host.invalid:7000")
