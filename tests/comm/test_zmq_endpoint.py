"""Endpoints on loopback: who is let in, who is not, and what happens when something breaks."""

import errno
import logging
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import zmq

from tahq.comm.link.frame import FrameHeader, FrameKind, pack_header
from tahq.comm.link.session import Session
from tahq.comm.link.shaping import Shaping
from tahq.comm.link.spec import LinkSpec, PeerIdentity, SessionLimits
from tahq.comm.zmq import transport
from tahq.comm.zmq.sockets import open_router
from tahq.errors import LocalProtocolError, PeerLostError, RemoteProtocolError, TahqError, UserError

SOON_S = 10.0


def join(make_endpoint, **changes):
    lower, upper = make_endpoint(1, **changes), make_endpoint(2, **changes)
    sender = lower.open_link(1, 2, "upper", upper.address)
    receiver = upper.open_link(1, 1, "lower", "")
    for endpoint in (lower, upper):
        endpoint.wait_connected(SOON_S)
    return lower, upper, sender, receiver


def assert_crosses(sender, receiver, frame):
    receiver.expect(frame.id, frame.payload.numel())
    sender.send(frame)
    got = receiver.recv(SOON_S)
    assert got.id == frame.id
    assert torch.equal(got.payload, frame.payload)


@pytest.fixture
def stranger():
    """stranger(address): a socket that has dialled it."""
    context, dealers = zmq.Context(), []

    def dial(address):
        dealers.append(context.socket(zmq.DEALER))
        dealers[-1].connect(f"tcp://{address}")
        return dealers[-1]

    yield dial
    context.destroy(linger=0)


# Addresses


def test_port_in_use_is_one_line_for_the_user(make_endpoint):
    address = make_endpoint(1).address
    with pytest.raises(UserError, match=rf"cannot listen on {address}: Address already in use") as caught:
        make_endpoint(2, bind=address)
    assert "\n" not in str(caught.value)


def test_bind_to_a_host_that_is_not_ours_is_a_user_error(make_endpoint):
    with pytest.raises(UserError, match=r"cannot listen on 192\.0\.2\.1:0"):
        make_endpoint(1, bind="192.0.2.1:0")


def test_worker_that_only_dials_out_has_no_address(make_endpoint, make_frame):
    upper, lower = make_endpoint(2), make_endpoint(1, bind="")
    assert lower.address == ""
    with pytest.raises(UserError, match="nothing listens here"):
        lower.open_link(0, 0, "nobody", "")
    sender = lower.open_link(1, 2, "upper", upper.address)
    receiver = upper.open_link(1, 1, "lower", "")
    upper.wait_connected(SOON_S)
    assert_crosses(sender, receiver, make_frame(10))


# Meeting


def test_epoch_of_the_plan_is_the_one_both_must_have(make_endpoint):
    lower, upper = make_endpoint(1, epoch=0), make_endpoint(2, epoch=0)
    for endpoint in (lower, upper):
        endpoint.set_epoch(6)
    lower.open_link(1, 2, "upper", upper.address)
    upper.open_link(1, 1, "lower", "")
    lower.wait_connected(SOON_S)
    with pytest.raises(LocalProtocolError, match="epoch 7 came after links were opened in epoch 6"):
        lower.set_epoch(7)


def test_every_peer_that_is_missing_is_named(make_endpoint):
    endpoint = make_endpoint(1)
    endpoint.open_link(0, 0, "host-a", "")
    endpoint.open_link(1, 2, "host-c", "127.0.0.1:9")
    with pytest.raises(
        PeerLostError, match=r"link 0 to stage 0 \(host-a\), link 1 to stage 2 \(host-c at 127.0.0.1:9\)"
    ):
        endpoint.wait_connected(0.1)


@pytest.mark.parametrize(
    "changes",
    [{"run_id": 78}, {"epoch": 2}, {"epoch": 0}, {"config_hash": "decaf"}, {"connections": 2}, {"stage": 0}],
    ids=["run", "later epoch", "earlier epoch", "configuration", "number of connections", "stage"],
)
def test_worker_of_another_run_is_refused_on_both_sides(make_endpoint, make_frame, caplog, changes):
    caplog.set_level(logging.WARNING, "tahq.comm")
    upper = make_endpoint(2)
    receiver = upper.open_link(1, 1, "lower", "")
    wrong = make_endpoint(**{"stage": 1} | changes)
    wrong.open_link(1, 2, "upper", upper.address)
    with pytest.raises(TahqError, match="refused"):
        wrong.wait_connected(SOON_S)
    assert "link 1 to stage 1 (lower)" in caplog.text
    # The right one still gets in.
    right = make_endpoint(1)
    sender = right.open_link(1, 2, "upper", upper.address)
    upper.wait_connected(SOON_S)
    assert_crosses(sender, receiver, make_frame(10))


def test_second_peer_for_a_link_is_refused_and_the_first_stays(make_endpoint, make_frame):
    _, upper, sender, receiver = join(make_endpoint)
    double = make_endpoint(1)
    double.open_link(1, 2, "upper", upper.address)
    with pytest.raises(PeerLostError, match="connected already"):
        double.wait_connected(SOON_S)
    assert_crosses(sender, receiver, make_frame(10))


# Strangers


def test_garbage_from_strangers_is_dropped_with_a_line_in_the_log(make_endpoint, make_frame, stranger, caplog):
    caplog.set_level(logging.WARNING, "tahq.comm")
    _, upper, sender, receiver = join(make_endpoint)
    dealer = stranger(upper.address)
    header = FrameHeader(FrameKind.DATA, 1, 1, 1, make_frame(4).id, total_nbytes=4, payload_nbytes=4)
    for parts in ([b"x"], [b"x", b"y"], [b""] * 5, [bytes(100), b""], [pack_header(header, b"abcd"), b"abcd"]):
        dealer.send_multipart(parts)
    assert_crosses(sender, receiver, make_frame(100))
    deadline_s = time.monotonic() + SOON_S
    while "stranger" not in caplog.text and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert "dropped a message: a stranger at 127.0.0.1" in caplog.text
    assert not receiver.end.session.inbound.early


def test_known_peer_that_breaks_the_protocol_fails_its_link_alone(make_endpoint, make_frame, stranger):
    upper = make_endpoint(2)
    bad, good = upper.open_link(1, 1, "lower", ""), upper.open_link(2, 3, "top", "")
    top = make_endpoint(3)
    sender = top.open_link(2, 2, "upper", upper.address)
    dealer = stranger(upper.address)
    spec = LinkSpec(1, 2, "", dials=True)
    hello = Session(PeerIdentity(77, 1, 1, "c0ffee"), spec, SessionLimits()).next_urgent(0.0)
    dealer.send_multipart([hello.header, hello.payload])
    upper.wait_connected(SOON_S)
    dealer.send_multipart([b"not a header", b""])
    with pytest.raises(RemoteProtocolError, match=r"link 1 to stage 1 \(lower\): sent a header of 12 bytes"):
        bad.recv(SOON_S)
    assert_crosses(sender, good, make_frame(10))


# Working


def test_sending_more_than_the_bound_is_our_own_error(make_endpoint, make_frame, monkeypatch):
    monkeypatch.setattr("tahq.comm.zmq.transport.MAX_QUEUED_NBYTES", 100_000)
    lower = make_endpoint(1)
    link = lower.open_link(1, 2, "upper", "")
    link.send(make_frame(200_000))
    deadline_s = time.monotonic() + SOON_S
    while link.end.session.outbound.nbytes == 0 and time.monotonic() < deadline_s:
        time.sleep(0.001)
    with pytest.raises(LocalProtocolError, match="200 kB are queued already"):
        link.send(make_frame(1, micro_batch=1))


def test_pieces_are_spread_over_the_connections(make_endpoint, make_frame, monkeypatch):
    lower, _, sender, receiver = join(make_endpoint, connections=16)
    (wire,) = lower._loop._wires
    used, put = [], type(wire).put
    monkeypatch.setattr(type(wire), "put", lambda wire, out: (used.append(out.connection), put(wire, out)))
    assert_crosses(sender, receiver, make_frame(10_000_000))
    assert set(used) == set(range(16))


# Ending


def test_abort_wakes_everyone_who_waits(make_endpoint, make_id, make_frame):
    lower, _, sender, _ = join(make_endpoint)
    reason = TahqError("stage 3 has failed: out of memory")
    sender.expect(make_id(0), 10)
    threading.Timer(0.1, lower.abort, [reason]).start()
    started_s = time.monotonic()
    with pytest.raises(TahqError, match="stage 3 has failed"):
        sender.recv(SOON_S)
    assert time.monotonic() - started_s < 1.0
    for act in (lambda: sender.recv(0.0), lambda: sender.send(make_frame(1)), lambda: lower.wait_connected(1.0)):
        with pytest.raises(TahqError, match="stage 3 has failed"):
            act()
    with pytest.raises(TahqError, match="stage 3 has failed"):  # a link that is opened later, too
        lower.open_link(0, 0, "nobody", "").recv(SOON_S)


def test_peer_learns_why_the_other_side_gave_up(make_endpoint):
    lower, _, _, receiver = join(make_endpoint)
    lower.abort(TahqError("out of memory"))
    lower.close()
    with pytest.raises(PeerLostError, match=r"link 1 to stage 1 \(lower\): the peer ended it: out of memory"):
        receiver.recv(SOON_S)


def test_opening_a_link_twice_or_after_close_is_our_own_error(make_endpoint):
    endpoint = make_endpoint(1)
    endpoint.open_link(0, 0, "nobody", "")
    with pytest.raises(LocalProtocolError, match="link 0 is open already"):
        endpoint.open_link(0, 0, "nobody", "")
    endpoint.close()
    with pytest.raises(LocalProtocolError, match="endpoint is closed"):
        endpoint.open_link(1, 0, "nobody", "")


def test_bug_in_the_io_thread_reaches_who_waits(make_endpoint, caplog):
    lower, _, sender, _ = join(make_endpoint)
    lower._loop.submit(None, lambda: 1 / 0)
    with pytest.raises(TahqError, match=r"link 1 to stage 2 .*I/O thread has failed: ZeroDivisionError"):
        sender.recv(SOON_S)
    assert "the I/O thread has failed" in caplog.text


def test_idle_endpoint_with_a_shaped_queue_does_not_spin(make_endpoint, make_frame):
    shaping = Shaping(rate_bits_per_s=4e6)
    _, _, sender, receiver = join(make_endpoint, shaping=shaping)
    frame = make_frame(250_000)  # one piece, 0.5 s on the wire
    receiver.expect(frame.id, 250_000)
    threads = [thread for thread in threading.enumerate() if thread.name == "tahq-io"]
    assert len(threads) >= 2
    before_s = cpu_s(threads)
    sender.send(frame)
    receiver.recv(SOON_S)
    assert cpu_s(threads) - before_s < 0.2


def cpu_s(threads):
    """What these threads have computed; others that tests have left in this process don't count."""
    return sum(time.clock_gettime(time.pthread_getcpuclockid(thread.ident)) for thread in threads)


# What the user is told


def test_address_that_cannot_be_reached_is_in_the_log_of_both_ends_soon(make_endpoint, monkeypatch, caplog):
    monkeypatch.setattr(transport, "_LATE_S", 0.3)
    lower, upper = make_endpoint(0, bind=""), make_endpoint(1)
    lower.open_link(0, 1, "host1", "127.0.0.1:9")
    upper.open_link(0, 0, "host0", "")
    deadline_s = time.monotonic() + 10.0
    while len(caplog.records) < 2 and time.monotonic() < deadline_s:
        time.sleep(0.02)
    said = sorted(record.getMessage() for record in caplog.records)
    assert said[0].startswith("link 0 to stage 0 (host0): not connected after 0.3")
    assert said[0].endswith(f" s: the peer has not dialled this host; check that it can reach {upper.address}")
    assert said[1].startswith("link 0 to stage 1 (host1 at 127.0.0.1:9): not connected after 0.3")
    assert " s: cannot reach 127.0.0.1:9 from this host" in said[1]
    time.sleep(0.5)
    assert len(caplog.records) == 2


def test_too_few_open_files_are_one_line_for_the_user():
    """The system permits 64: a worker needs more, and says so before anything fails for it."""
    worker = shutil.which("tahq-worker", path=Path(sys.executable).parent)
    ended = subprocess.run(
        ["sh", "-c", f"ulimit -n 64; exec {worker} --stage 0 --peer 127.0.0.1:9 --no-curve"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 2, ended.stderr
    assert "may have 64 files and connections open" in ended.stderr
    assert "ulimit" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_running_out_of_open_files_is_a_user_error(monkeypatch):
    def fail(self, kind):
        raise zmq.ZMQError(errno.EMFILE)

    with zmq.Context() as context:
        monkeypatch.setattr(zmq.Context, "socket", fail)
        with pytest.raises(UserError, match="raise the limit"):
            open_router(context, 10.0)
